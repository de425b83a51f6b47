"""Seconds in which ranks that hold experts together exchange rows, against counts of what they send."""

from dataclasses import replace
from itertools import combinations

import pytest

from mmtrain.costs import AnalyticCosts, GroupLayout, TokenLoad, preset
from mmtrain.costs.analytic_costs import gemm_seconds
from mmtrain.costs.cost_model import LayerWork
from mmtrain.costs.expert_costs import copied_elements, expert_exchange_seconds
from mmtrain.costs.expert_spread import arriving_rows, ranks_of_token
from mmtrain.costs.framework import OWN_RUNTIME, Execution
from mmtrain.costs.part_records import Gemm
from mmtrain.models.shapes.layer_shape import LayerShape, MoeMlp, RouterShape
from tests.models.factory import settings, shape_of

HIDDEN, TOKENS, TOP_K, BYTES = 64, 4096, 2, 2
COSTS = AnalyticCosts(preset("h100-80g"), "bf16")


def mixture(ep: int, hidden: int = HIDDEN) -> LayerShape:
    moe = {"experts": 8, "top_k": TOP_K, "ffn": 32}
    model = settings(vision=None, llm={"layers": 1, "hidden": hidden, "heads": 4, "ffn": 128, "moe": moe})
    block = shape_of(model).unit("llm").layers[1]
    assert isinstance(block.mlp, MoeMlp)
    return replace(block, mlp=replace(block.mlp, ep=ep, load_spread=0.0))


def exchange_s(ep: int, tp: int, hidden: int = HIDDEN, execution: Execution = OWN_RUNTIME) -> float:
    work = LayerWork(mixture(ep, hidden), tp, TokenLoad(TOKENS, TOKENS**2, TOKENS, 1), "forward", input_grad=True)
    return expert_exchange_seconds(work, COSTS, ranks_per_node=8, element_bytes=BYTES, execution=execution)


def counted_ranks(num_ranks: int, router: RouterShape) -> float:
    """Return on how many ranks a token has experts in the mean, over all choices of two of eight experts."""
    size, held = 8 // router.groups, 8 // num_ranks
    of_choices = [
        len({expert // held for expert in chosen})
        for groups in combinations(range(router.groups), router.top_groups)
        for chosen in combinations([i for i in range(8) if i // size in groups], TOP_K)
    ]
    return sum(of_choices) / len(of_choices)


@pytest.mark.parametrize("router", [RouterShape(), RouterShape(groups=4, top_groups=2), RouterShape(groups=2)])
def test_the_ranks_of_a_token_are_those_of_all_choices(router: RouterShape) -> None:
    mlp = mixture(1).mlp
    assert isinstance(mlp, MoeMlp)
    for num_ranks in (1, 2, 4, 8):
        expected = counted_ranks(num_ranks, router)
        assert ranks_of_token(replace(mlp, router=router), num_ranks) == pytest.approx(expected)
    assert arriving_rows(replace(mlp, ep=2, load_spread=9.0)) == 2  # a row cannot arrive twice


def test_a_token_goes_once_to_other_ranks_and_comes_back() -> None:
    sent = TOKENS * counted_ranks(4, RouterShape()) * HIDDEN * BYTES * 3 / 4
    assert exchange_s(1, 1) == 0
    assert exchange_s(4, 1) == pytest.approx(2 * COSTS.all_to_all(round(sent), 0, GroupLayout(4, 1)))


def test_ranks_of_a_tp_group_send_their_columns_and_put_rows_together() -> None:
    whole = TOKENS * counted_ranks(4, RouterShape()) * HIDDEN * BYTES
    tp_group = GroupLayout(4, 1)
    between = 2 * COSTS.all_to_all(round(whole / 4 / 4), round(whole / 4 / 2), GroupLayout(4, 2))
    together = sum(COSTS.collective(kind, round(whole), tp_group) for kind in ("all_gather", "reduce_scatter"))
    assert exchange_s(4, 4) == pytest.approx(between + together)


def test_other_frameworks_fold_experts_and_send_copies_or_one_row_to_a_node() -> None:
    """Eight ranks hold an expert each, on one node or two; each rank of a TP group of two routes half of the tokens."""
    copies = Execution(folds_experts=True, sends_rows="copies")
    nodes = replace(copies, sends_rows="nodes")
    row, group = TOKENS // 2 * HIDDEN * BYTES, GroupLayout(8, 1)
    assert exchange_s(4, 2, execution=copies) == pytest.approx(2 * COSTS.all_to_all(row * TOP_K * 7 // 8, 0, group))
    assert exchange_s(4, 2, execution=nodes) == exchange_s(4, 2, execution=replace(copies, sends_rows="ranks"))
    work = LayerWork(mixture(4), 2, TokenLoad(TOKENS, TOKENS**2, TOKENS, 1), "forward", input_grad=True)
    across_s = expert_exchange_seconds(work, COSTS, ranks_per_node=4, element_bytes=BYTES, execution=nodes)
    to_nodes, to_ranks = (counted_ranks(size, RouterShape()) for size in (2, 8))
    sent = round(row * to_ranks * 3 / 4), round(row * to_nodes / 2)
    assert across_s == pytest.approx(2 * COSTS.all_to_all(*sent, GroupLayout(8, 2)))


def test_ranks_that_cannot_divide_the_columns_send_whole_rows() -> None:
    assert mixture(2).mlp.column_ranks(HIDDEN, 3) == 1  # type: ignore[union-attr]
    assert mixture(2).mlp.column_ranks(HIDDEN, 4) == 4  # type: ignore[union-attr]
    assert mixture(1).mlp.column_ranks(HIDDEN, 4) == 1  # type: ignore[union-attr]


def test_a_mixture_that_is_computed_again_lengthens_backward_by_its_forward() -> None:
    """By its GEMMs, copies and kernels, and by its exchange; norms, attention and residuals are left out."""
    again = AnalyticCosts(COSTS.hardware, "bf16", Execution(recomputes_mixture=True))
    once = AnalyticCosts(COSTS.hardware, "bf16", Execution())
    load = TokenLoad(TOKENS, TOKENS**2, TOKENS, 1)
    layer = mixture(4)
    backward = LayerWork(layer, 1, load, "backward", input_grad=True)
    hidden, ffn, rows = HIDDEN, 32, TOKENS * TOP_K
    gemms = (Gemm(rows, 2 * ffn, hidden, 2), Gemm(rows, hidden, ffn, 2), Gemm(TOKENS, 8, hidden))  # two experts a rank
    gemms_s = sum(gemm_seconds(COSTS.hardware, "bf16", gemm) for gemm in gemms)
    copied_s = copied_elements(layer, TOKENS, 1, Execution()) * BYTES / COSTS.hardware.moved_bytes_per_s
    kernels = Execution().mixture_kernels + Execution().exchange_kernels + 2 * 2  # and two gradients of each expert
    expected = gemms_s + copied_s + kernels * COSTS.hardware.kernel_launch_s + exchange_s(4, 1)
    assert again.seconds(backward) - once.seconds(backward) == pytest.approx(expected)
    for kind in ("forward", "recompute"):
        assert again.seconds(backward._replace(kind=kind)) == once.seconds(backward._replace(kind=kind))
