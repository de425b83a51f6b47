"""Copies between sharded layers and the buffers that travel, counted by hand."""

from dataclasses import replace

import pytest

from mmtrain.costs import AnalyticCosts, CostTable, MeasuredCosts, preset
from mmtrain.costs.collectives import GroupLayout
from mmtrain.costs.core_ratios import modelled_core_speed
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.cost_table import CoreSpeed
from mmtrain.costs.framework import Execution
from mmtrain.costs.layer_arithmetic import num_parameters
from mmtrain.costs.sharded_layers import ShardedLayers
from tests.models.factory import settings, shape_of

BYTES_PER_S = 1e9
MACHINE = replace(preset("cpu-core"), memory_bytes_per_s=BYTES_PER_S, kernel_launch_s=0.0)
COSTS = AnalyticCosts(MACHINE, "fp32")
BLOCK = shape_of(settings()).unit("llm").layers[1]


def sharded(shard: int, element_bytes: int, costs: CostModel = COSTS) -> ShardedLayers:
    return ShardedLayers(costs, num_replicas=4, shard=shard, element_bytes=element_bytes, ranks_per_node=4)


# Bytes per parameter that pass through memory. fp32, whole on each rank: a copy of the weights (4 + 4); gradients into
# the buffer (4 + 4), divided (8), copied (8), and added to those of before (4 + 4 + 4). bf16, shared by four: shards
# rounded (4 + 2) and put into the buffer (2 + 2), weights out of it (2 + 2); gradients in (2 + 4), their shard added.
@pytest.mark.parametrize(
    ("shard", "element_bytes", "gathered", "reduced_first", "reduced_later"),
    [(1, 4, 8.0, 24.0, 36.0), (4, 4, 8 + 8 / 4, 8.0, 8 + 12 / 4), (4, 2, 4 + 10 / 4, 6.0, 6 + 12 / 4)],
)
def test_copies_move_the_bytes_that_fsdp_moves(
    shard: int, element_bytes: int, gathered: float, reduced_first: float, reduced_later: float
) -> None:
    layers, parameters = sharded(shard, element_bytes), num_parameters(BLOCK)

    def moved(seconds: float) -> float:
        return seconds * BYTES_PER_S / parameters

    # Prices of layers hold a sum in fp32 that GEMMs read and write, which sharded layers do not have.
    not_added = COSTS.gradient_bytes
    assert moved(layers.gather_copies_seconds(BLOCK)) == pytest.approx(gathered)
    assert moved(layers.reduce_copies_seconds(BLOCK, is_first=True)) == pytest.approx(reduced_first - not_added)
    assert moved(layers.reduce_copies_seconds(BLOCK, is_first=False)) == pytest.approx(reduced_later - not_added)
    frozen = replace(BLOCK, trainable=False)
    assert layers.reduce_copies_seconds(frozen, is_first=False) == 0


@pytest.mark.parametrize(("shard", "tp"), [(4, 2), (2, 4), (8, 1)])
def test_ranks_at_one_place_of_the_tp_groups_gather_and_reduce_its_part(shard: int, tp: int) -> None:
    """On nodes of four: the ranks of a copy lie `tp` apart, so that it may reach over more nodes."""
    costs = AnalyticCosts(preset("h100-80g"), "bf16")
    layers = ShardedLayers(costs, num_replicas=2 * shard, shard=shard, element_bytes=2, ranks_per_node=4, tp=tp)
    copy = GroupLayout.of_ranks(range(0, shard * tp, tp), 4)
    owners = GroupLayout.of_ranks((0, shard * tp), 4)
    count = num_parameters(BLOCK, tp)
    assert layers.gather_seconds(BLOCK) == costs.collective("all_gather", 2 * count, copy)
    inside = costs.collective("reduce_scatter", 4 * count, copy)
    between = costs.collective("all_reduce", 4 * count // shard, owners)
    assert layers.reduce_seconds(BLOCK, is_last=False) == inside
    assert layers.reduce_seconds(BLOCK, is_last=True) == inside + between


def test_experts_are_gathered_and_reduced_by_the_ranks_that_hold_the_same() -> None:
    """Of eight replicas on nodes of four, two hold each expert of a copy on four, and they lie two apart."""
    moe = {"experts": 4, "top_k": 2, "ffn": 64}
    shape = shape_of(settings(llm={"moe": moe}), parallel={"llm": {"ep": 2}})
    block = shape.unit("llm").layers[1]
    costs = AnalyticCosts(preset("h100-80g"), "bf16")
    layers = ShardedLayers(costs, num_replicas=8, shard=4, element_bytes=2, ranks_per_node=4)
    of_experts = 2 * 3 * 64 * block.hidden  # gates, values and outputs of two experts
    others = num_parameters(block) - of_experts
    all_of_copy, pair = GroupLayout.of_ranks(range(4), 4), GroupLayout.of_ranks((0, 2), 4)
    gathered = [costs.collective("all_gather", 2 * n, g) for n, g in ((others, all_of_copy), (of_experts, pair))]
    assert layers.gather_seconds(block) == sum(gathered)
    inside = [costs.collective("reduce_scatter", 4 * n, g) for n, g in ((others, all_of_copy), (of_experts, pair))]
    owners = GroupLayout.of_ranks((0, 4), 4)
    between = [costs.collective("all_reduce", nbytes, owners) for nbytes in (others, 2 * of_experts)]
    assert layers.reduce_seconds(block, is_last=True) == pytest.approx(sum(inside) + sum(between))


def test_a_framework_that_adds_up_whole_gradients_reduces_them_once() -> None:
    once = sharded(4, 4, replace(COSTS, execution=Execution(reduces_once=True)))
    each = sharded(4, 4, replace(COSTS, execution=Execution()))
    assert once.reduce_seconds(BLOCK, is_last=False) == 0 < each.reduce_seconds(BLOCK, is_last=False)
    assert once.reduce_seconds(BLOCK, is_last=True) == each.reduce_seconds(BLOCK, is_last=True)
    added_s = [layers.reduce_copies_seconds(BLOCK, is_first=False) for layers in (once, each)]
    assert added_s[0] > added_s[1], "whole gradients are added, not a quarter"


def test_kernels_of_copies_take_their_start() -> None:
    started = AnalyticCosts(replace(MACHINE, kernel_launch_s=1e-3), "fp32")
    whole, shared = (sharded(shard, 4, started).gather_copies_seconds(BLOCK) for shard in (1, 4))
    assert whole - sharded(1, 4).gather_copies_seconds(BLOCK) == pytest.approx(6e-3)
    assert shared - sharded(4, 4).gather_copies_seconds(BLOCK) == pytest.approx(16e-3)


def test_a_framework_with_flat_weights_copies_nothing() -> None:
    flat = sharded(4, 4, replace(COSTS, execution=Execution(copies_shards=False)))
    assert flat.gather_copies_seconds(BLOCK) == flat.reduce_copies_seconds(BLOCK, is_first=False) == 0


def test_copies_are_as_fast_as_the_cores_of_the_table() -> None:
    now = modelled_core_speed(MACHINE, "fp32")
    slow = CoreSpeed(gemm_s=now.gemm_s, copy_s=3 * now.copy_s)
    table = CostTable(
        hardware="cpu-core", device="cpu-core", precision="fp32", software={}, date="2026-11-27", core_speed=slow
    )
    for measured, ratio in ((table, 3), (table.model_copy(update={"core_speed": None}), 1)):
        seconds = sharded(4, 4, MeasuredCosts(measured, COSTS)).gather_copies_seconds(BLOCK)
        assert seconds == pytest.approx(ratio * sharded(4, 4).gather_copies_seconds(BLOCK))
