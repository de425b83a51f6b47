"""Seconds in which ranks that hold experts together exchange rows, against counts of what they send."""

from dataclasses import replace

import pytest

from mmtrain.costs import AnalyticCosts, GroupLayout, TokenLoad, preset
from mmtrain.costs.cost_model import LayerWork
from mmtrain.costs.expert_costs import expert_exchange_seconds
from mmtrain.models.shapes.layer_shape import LayerShape, MoeMlp
from tests.models.factory import settings, shape_of

HIDDEN, TOKENS, TOP_K, BYTES = 64, 4096, 2, 2
COSTS = AnalyticCosts(preset("h100-80g"), "bf16")


def mixture(ep: int, hidden: int = HIDDEN) -> LayerShape:
    moe = {"experts": 8, "top_k": TOP_K, "ffn": 32}
    model = settings(vision=None, llm={"layers": 1, "hidden": hidden, "heads": 4, "ffn": 128, "moe": moe})
    block = shape_of(model).unit("llm").layers[1]
    assert isinstance(block.mlp, MoeMlp)
    return replace(block, mlp=replace(block.mlp, ep=ep, load_spread=0.0))


def exchange_s(ep: int, tp: int, hidden: int = HIDDEN) -> float:
    work = LayerWork(mixture(ep, hidden), tp, TokenLoad(TOKENS, TOKENS**2, TOKENS, 1), "forward", input_grad=True)
    return expert_exchange_seconds(work, COSTS, ranks_per_node=8, element_bytes=BYTES)


def test_rows_go_to_other_ranks_and_come_back() -> None:
    sent = TOKENS * TOP_K * HIDDEN * BYTES * 3 // 4
    assert exchange_s(1, 1) == 0
    assert exchange_s(4, 1) == pytest.approx(2 * COSTS.all_to_all(sent, 0, GroupLayout(4, 1)))


def test_ranks_of_a_tp_group_send_their_columns_and_put_rows_together() -> None:
    whole = TOKENS * TOP_K * HIDDEN * BYTES
    tp_group = GroupLayout(4, 1)
    between = 2 * COSTS.all_to_all(whole // 4 * 3 // 4 // 3, whole // 4 * 3 // 4 * 2 // 3, GroupLayout(4, 2))
    together = sum(COSTS.collective(kind, whole, tp_group) for kind in ("all_gather", "reduce_scatter"))
    assert exchange_s(4, 4) == pytest.approx(between + together)


def test_ranks_that_cannot_divide_the_columns_send_whole_rows() -> None:
    assert mixture(2).mlp.column_ranks(HIDDEN, 3) == 1  # type: ignore[union-attr]
    assert mixture(2).mlp.column_ranks(HIDDEN, 4) == 4  # type: ignore[union-attr]
    assert mixture(1).mlp.column_ranks(HIDDEN, 4) == 1  # type: ignore[union-attr]
