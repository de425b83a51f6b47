"""What ranks that share sequences wait for, against sums by hand."""

from dataclasses import replace

import pytest

from mmtrain.costs import TokenLoad
from mmtrain.costs.analytic_costs import AnalyticCosts
from mmtrain.costs.collectives import GroupLayout
from mmtrain.costs.context_parallel_costs import ContextGroup, context_seconds, exchange_buffer_bytes
from mmtrain.costs.cost_model import LayerWork
from mmtrain.costs.find_hardware import preset
from mmtrain.models.shapes.model_shape import LayerShape, build_model_shape
from tests.planning.factory import recipe

COSTS = AnalyticCosts(preset("h100-80g"), "bf16")
BYTES = 2
LOAD = TokenLoad(1000, 400_000, 4000, 5, exchanged=800)


def block(heads: int = 8, kv_heads: int = 2) -> LayerShape:
    settings = recipe(llm={"hidden": 512, "heads": heads, "kv_heads": kv_heads})
    return next(layer for layer in build_model_shape(settings).unit("llm").layers if layer.kind == "decoder_block")


@pytest.mark.parametrize(("tp", "cp", "num_kv_heads"), [(1, 2, 2), (1, 8, 8), (2, 4, 4)])
def test_an_all_to_all_moves_queries_keys_values_and_outputs(tp: int, cp: int, num_kv_heads: int) -> None:
    """Where ranks are more than key-value heads, each gets a whole one."""
    layer, group = block(), ContextGroup.of_mesh(tp, cp, False, ranks_per_node=64)
    moved = LOAD.exchanged * layer.attention.head_dim * BYTES * (cp - 1) / cp
    there, back = round((8 // tp + 2 * num_kv_heads) * moved), round(8 // tp * moved)
    expected = sum(COSTS.all_to_all(nbytes, 0, GroupLayout(cp)) for nbytes in (there, back))
    for kind in ("forward", "backward", "recompute"):
        assert context_seconds(LayerWork(layer, tp, LOAD, kind), COSTS, group, BYTES) == pytest.approx(expected)


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 4)])
def test_an_all_to_all_of_a_gated_delta_net_moves_what_its_first_linear_makes_and_outputs(tp: int, cp: int) -> None:
    net = {"key_heads": 8, "value_heads": 16, "key_head_dim": 64, "value_head_dim": 32}
    settings = recipe(llm={"hidden": 512, "heads": 8, "delta_net": net, "full_attention_blocks": (1,)})
    layer, group = build_model_shape(settings).unit("llm").layers[1], ContextGroup.of_mesh(tp, cp, False, 64)
    queries_and_keys, values, numbers = 2 * 8 * 64, 16 * 32, 2 * 16
    moved = LOAD.exchanged * BYTES * (cp - 1) / cp / tp
    there, back = round((queries_and_keys + 2 * values + numbers) * moved), round(values * moved)
    expected = sum(COSTS.all_to_all(nbytes, 0, GroupLayout(cp)) for nbytes in (there, back))
    for kind in ("forward", "backward", "recompute"):
        assert context_seconds(LayerWork(layer, tp, LOAD, kind), COSTS, group, BYTES) == pytest.approx(expected)


def test_between_nodes_an_all_to_all_takes_the_slower_links() -> None:
    layer = block()
    near, far = (ContextGroup.of_mesh(1, 4, False, ranks_per_node=n) for n in (4, 2))
    assert far.on_node_share == pytest.approx(1 / 3)
    seconds = [context_seconds(LayerWork(layer, 1, LOAD, "forward"), COSTS, group, BYTES) for group in (near, far)]
    assert seconds[1] > 2 * seconds[0]


def test_a_ring_hides_its_messages_behind_attention() -> None:
    layer, group = block(), ContextGroup.of_mesh(1, 4, True, ranks_per_node=4)
    little, much = replace(LOAD, sum_sq=5), replace(LOAD, sum_sq=10**10, max_len=100_000)
    nbytes = 2 * 2 * layer.attention.head_dim * LOAD.exchanged * BYTES
    message_s, doubled_s = (COSTS.transfer(times * nbytes, same_node=True) for times in (1, 2))
    exposed_s = context_seconds(LayerWork(layer, 1, little, "forward"), COSTS, group, BYTES)
    assert exposed_s == pytest.approx(3 * message_s, rel=0.01)
    lost_share = COSTS.hardware.overlap_slowdown
    hidden_s = context_seconds(LayerWork(layer, 1, much, "forward"), COSTS, group, BYTES)
    assert hidden_s == pytest.approx(3 * lost_share * message_s, rel=0.01)
    assert hidden_s < exposed_s / 2
    backward_s = context_seconds(LayerWork(layer, 1, little, "backward"), COSTS, group, BYTES)
    assert backward_s == pytest.approx(3 * doubled_s + message_s, rel=0.01)  # gradients come home at last


def test_nothing_is_exchanged_by_other_layers_whole_sequences_and_single_ranks() -> None:
    layer, group = block(), ContextGroup.of_mesh(1, 4, False, ranks_per_node=4)
    head = build_model_shape(recipe()).unit("llm").layers[-1]
    whole = replace(LOAD, exchanged=0)
    assert context_seconds(LayerWork(head, 1, LOAD, "forward"), COSTS, group, BYTES) == 0
    assert context_seconds(LayerWork(layer, 1, whole, "forward"), COSTS, group, BYTES) == 0
    assert exchange_buffer_bytes(layer, 1, whole, BYTES) == exchange_buffer_bytes(head, 1, LOAD, BYTES) == 0
    alone = ContextGroup.of_mesh(1, 1, False, ranks_per_node=4)
    assert context_seconds(LayerWork(layer, 1, LOAD, "forward"), COSTS, alone, BYTES) == 0
