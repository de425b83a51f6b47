"""A layer's pieces add up to the layer, and tensor parallelism communicates at the same places as in a run."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from mmtrain.costs import AnalyticCosts, CostTable, GroupLayout, MeasuredCosts, TokenLoad, preset
from mmtrain.costs.block_pieces import ADD, DOWN, NORM, NORM_MLP, PROJECTION, QKV, UP
from mmtrain.costs.cost_table import LayerEntry, LayerSample, layer_fields
from mmtrain.models.model_shape import BLOCK_PIECES
from tests.models.factory import settings, shape_of

MACHINE = preset("h100-80g")
COSTS = AnalyticCosts(replace(MACHINE, overlap_slowdown=1.0), "bf16")  # hides no collective in a whole layer either
LOAD = TokenLoad.of(np.array([300, 212]))
LAYERS = [layer for unit in shape_of(settings()).units for layer in unit.layers]
BLOCK = next(layer for layer in LAYERS if layer.kind == "decoder_block")
KINDS: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_add_up_to_their_layer(tp: int, sp: bool, kind: Literal["forward", "backward"]) -> None:
    for layer in LAYERS:
        for trains, input_grad in ((True, True), (True, False), (False, True), (False, False)):
            changed = replace(layer, trainable=trains)
            pieces = COSTS.pieces(changed, tp, LOAD, kind, input_grad=input_grad, sp=sp)
            total = COSTS.seconds(changed, tp, LOAD, kind, input_grad=input_grad)
            assert sum(map(sum, pieces)) == pytest.approx(total, rel=1e-12)
            assert all(p.compute_s >= 0 and p.collective_s >= 0 for p in pieces)
            assert tp > 1 or not any(p.collective_s for p in pieces)


@pytest.mark.parametrize(
    ("kind", "sp", "ends"),
    [
        ("forward", False, {PROJECTION, DOWN}),
        ("backward", False, {QKV, UP}),
        ("forward", True, {NORM, PROJECTION, NORM_MLP, DOWN}),
        ("backward", True, {ADD, UP, NORM_MLP, QKV}),
    ],
)
def test_blocks_communicate_around_their_gemms(kind: Literal["forward", "backward"], sp: bool, ends: set[int]) -> None:
    pieces = COSTS.pieces(BLOCK, 2, LOAD, kind, sp=sp)
    assert {i for i, piece in enumerate(pieces) if piece.collective_s} == ends
    reduce = COSTS.collective("all_reduce", LOAD.tokens * BLOCK.hidden * COSTS.element_bytes, GroupLayout(2))
    assert sum(piece.collective_s for piece in pieces) == pytest.approx(2 * reduce)


def test_only_a_whole_backward_hides_reductions_beside_gradients_of_weights() -> None:
    """Pieces start their collectives themselves, so all of these stay open for other work."""
    hiding = AnalyticCosts(MACHINE, "bf16")
    pieces, whole_s = hiding.pieces(BLOCK, 2, LOAD, "backward"), hiding.seconds(BLOCK, 2, LOAD, "backward")
    assert sum(map(sum, pieces)) > whole_s > sum(piece.compute_s for piece in pieces)
    frozen = replace(BLOCK, trainable=False)
    assert sum(map(sum, hiding.pieces(frozen, 2, LOAD, "backward"))) == pytest.approx(
        hiding.seconds(frozen, 2, LOAD, "backward")
    )


def test_no_tokens_and_no_gradient_take_no_time() -> None:
    frozen = replace(BLOCK, trainable=False)
    for pieces in (
        COSTS.pieces(BLOCK, 2, TokenLoad(0, 0, 0, 0), "forward"),
        COSTS.pieces(frozen, 2, LOAD, "backward", input_grad=False),
    ):
        assert len(pieces) == len(BLOCK_PIECES)
        assert sum(map(sum, pieces)) == 0


def test_measured_seconds_are_divided_as_modelled() -> None:
    sample = LayerSample(
        tokens=LOAD.tokens, sum_sq=LOAD.sum_sq, max_len=LOAD.max_len, num_sequences=LOAD.num_sequences,
        seconds={"forward": 0.5, "backward": 0.75, "recompute": 0.5}, activation_bytes=1,
    )  # fmt: skip
    entry = LayerEntry(layer=layer_fields(BLOCK), tp=2, samples=(sample,))
    table = CostTable(
        hardware="h100-80g", device="test", precision="bf16", date="2026-01-01", software={}, layers=(entry,)
    )
    costs = MeasuredCosts(table, COSTS)
    for kind, measured in (("forward", 0.5), ("backward", 0.75)):
        pieces, modelled = (c.pieces(BLOCK, 2, LOAD, kind) for c in (costs, COSTS))  # type: ignore[arg-type]
        assert sum(map(sum, pieces)) == pytest.approx(measured)
        ratios = {a.compute_s / b.compute_s for a, b in zip(pieces, modelled, strict=True)}
        assert max(ratios) == pytest.approx(min(ratios))
