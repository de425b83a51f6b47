"""A layer's pieces add up to the layer, and tensor parallelism communicates at the same places as in a run."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from mmtrain.costs import AnalyticCosts, CostTable, GroupLayout, MeasuredCosts, TokenLoad, TokenSplit, preset
from mmtrain.costs.block_pieces import (
    ADD,
    DOWN,
    NORM,
    NORM_MLP,
    PROJECTION,
    QKV,
    UP,
    ComputeBeside,
    PieceCollective,
)
from mmtrain.costs.cost_model import LayerWork
from mmtrain.costs.cost_table import LayerEntry, LayerSample, MessageEntry, layer_fields
from mmtrain.models.shapes.model_shape import BLOCK_PIECES
from tests.models.factory import settings, shape_of

MACHINE = preset("h100-80g")
COSTS = AnalyticCosts(MACHINE, "bf16")
LEFT_FREE = 1 - MACHINE.overlap_slowdown  # share of a collective in which the rank computes at full speed
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
            pieces = COSTS.pieces(LayerWork(changed, tp, LOAD, kind, input_grad=input_grad, split=TokenSplit(sp)))
            total = COSTS.seconds(LayerWork(changed, tp, LOAD, kind, input_grad=input_grad))
            if not sp or tp == 1:  # else reduce-scatters and all-gathers take the place of all-reduces
                assert sum(piece.total_s for piece in pieces) == pytest.approx(total, rel=1e-12)
            assert all(p.compute_s >= 0 and 0 <= p.hidden_s <= p.collective_s for p in pieces)
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
    pieces = COSTS.pieces(LayerWork(BLOCK, 2, LOAD, kind, split=TokenSplit(sp)))
    assert {i for i, piece in enumerate(pieces) if piece.collective_s} == ends
    nbytes = LOAD.tokens * BLOCK.hidden * COSTS.element_bytes
    names = ("reduce_scatter", "all_gather") if sp else ("all_reduce",)
    seconds = sum(COSTS.collective(name, nbytes, GroupLayout(2)) for name in names)  # type: ignore[arg-type]
    assert sum(piece.collective_s for piece in pieces) == pytest.approx(2 * seconds * LEFT_FREE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [2, 5])
def test_pieces_in_chunks_add_up_to_their_layer(kind: Literal["forward", "backward"], chunks: int) -> None:
    split = TokenSplit(chunks=chunks)
    for trains, input_grad in ((True, True), (True, False), (False, True), (False, False)):
        changed = replace(BLOCK, trainable=trains)
        for costs in (COSTS, measured_costs()):
            pieces = costs.pieces(LayerWork(changed, 2, LOAD, kind, input_grad=input_grad, split=split))
            total = costs.seconds(LayerWork(changed, 2, LOAD, kind, input_grad=input_grad, split=split))
            assert sum(piece.total_s for piece in pieces) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("chunk_s", [0.5, 1.0, 3.0])
def test_chunks_take_as_long_as_their_two_streams(gathers: bool, chunk_s: float) -> None:
    """A stream of GEMMs and one of collectives, chunk by chunk."""
    chunks, message_s = 4, 1.0
    end = {"first": 0.0, "second": 0.0}
    first_s, second_s = (message_s, chunk_s) if gathers else (chunk_s, message_s)
    for _ in range(chunks):
        end["first"] += first_s
        end["second"] = max(end["first"], end["second"]) + second_s
    beside = ComputeBeside(gemm_s=3.0, chunk_s=chunk_s)
    collective = PieceCollective("all_reduce", 3.5, 0.0, beside, chunks, message_s)
    assert 3.5 + 3.0 - collective.hidden_s == pytest.approx(end["second"])


def test_chunks_of_many_tokens_hide_most_of_what_they_communicate() -> None:
    load = TokenLoad.of(np.array([8192, 8192]))
    attention = replace(BLOCK.attention, heads=64, kv_heads=64, head_dim=128)
    wide = replace(BLOCK, hidden=8192, mixer=attention, mlp=replace(BLOCK.dense_mlp, ffn=32768))
    for sp in (False, True):
        whole, in_chunks = (
            COSTS.pieces(LayerWork(wide, 8, load, "forward", split=TokenSplit(sp, count))) for count in (1, 8)
        )
        communicated = sum(piece.collective_s for piece in whole)
        assert not any(piece.hidden_s for piece in whole)
        assert 0.4 * communicated < sum(piece.hidden_s for piece in in_chunks) < communicated
    assert COSTS.seconds(LayerWork(BLOCK, 2, LOAD, "forward", split=TokenSplit(chunks=8))) > COSTS.seconds(
        LayerWork(BLOCK, 2, LOAD, "forward")
    )


def test_a_layer_measured_in_chunks_takes_what_was_measured() -> None:
    costs = measured_costs()
    [entry] = costs.table.layers
    sample = entry.samples[0].model_copy(update={"seconds": {"forward": 0.4, "backward": 0.6, "recompute": 0.4}})
    in_chunks = entry.model_copy(update={"tp_chunks": 4, "samples": (sample,)})
    both = MeasuredCosts(costs.table.model_copy(update={"layers": (entry, in_chunks)}), COSTS)
    assert both.seconds(LayerWork(BLOCK, 2, LOAD, "forward")) == pytest.approx(0.5)
    assert both.seconds(LayerWork(BLOCK, 2, LOAD, "forward", split=TokenSplit(chunks=4))) == pytest.approx(0.4)
    assert both.seconds(LayerWork(BLOCK, 2, LOAD, "backward", split=TokenSplit(chunks=4))) == pytest.approx(0.6)


def test_a_collective_that_takes_the_whole_rank_leaves_no_gap() -> None:
    """As gloo's do: the pass takes as long, and nothing can run beside them."""
    taking_all = AnalyticCosts(replace(MACHINE, overlap_slowdown=1.0), "bf16")
    for kind in KINDS:
        pieces = taking_all.pieces(LayerWork(BLOCK, 2, LOAD, kind))
        assert not any(piece.collective_s or piece.hidden_s for piece in pieces)
        assert sum(piece.compute_s for piece in pieces) == pytest.approx(
            taking_all.seconds(LayerWork(BLOCK, 2, LOAD, kind))
        )


def test_a_pass_that_stops_hides_no_reduction_beside_gradients_of_weights() -> None:
    pieces = COSTS.pieces(LayerWork(BLOCK, 2, LOAD, "backward"))
    assert {i for i, piece in enumerate(pieces) if piece.hidden_s} == {QKV, UP}
    frozen = replace(BLOCK, trainable=False)
    assert not any(piece.hidden_s for piece in COSTS.pieces(LayerWork(frozen, 2, LOAD, "backward")))
    assert not any(piece.hidden_s for piece in COSTS.pieces(LayerWork(BLOCK, 2, LOAD, "forward")))


def test_no_tokens_and_no_gradient_take_no_time() -> None:
    frozen = replace(BLOCK, trainable=False)
    for pieces in (
        COSTS.pieces(LayerWork(BLOCK, 2, TokenLoad(0, 0, 0, 0), "forward")),
        COSTS.pieces(LayerWork(frozen, 2, LOAD, "backward", input_grad=False)),
    ):
        assert len(pieces) == len(BLOCK_PIECES)
        assert sum(map(sum, pieces)) == 0


def measured_costs(*messages: MessageEntry) -> MeasuredCosts:
    """Return costs of a block that takes 0.5 s forward and 0.75 s backward, and of these collectives."""
    sample = LayerSample(
        tokens=LOAD.tokens, sum_sq=LOAD.sum_sq, max_len=LOAD.max_len, num_sequences=LOAD.num_sequences,
        seconds={"forward": 0.5, "backward": 0.75, "recompute": 0.5}, activation_bytes=1,
    )  # fmt: skip
    table = CostTable(
        hardware="h100-80g",
        device="test",
        precision="bf16",
        date="2026-01-01",
        software={},
        layers=(LayerEntry(layer=layer_fields(BLOCK), tp=2, samples=(sample,)),),
        messages=messages,
    )
    return MeasuredCosts(table, COSTS)


def test_measured_seconds_are_divided_as_modelled() -> None:
    for kind, measured in (("forward", 0.5), ("backward", 0.75)):
        pieces, modelled = (c.pieces(LayerWork(BLOCK, 2, LOAD, kind)) for c in (measured_costs(), COSTS))  # type: ignore[arg-type]
        assert sum(piece.total_s for piece in pieces) == pytest.approx(measured)
        ratios = {a.compute_s / b.compute_s for a, b in zip(pieces, modelled, strict=True)}
        assert max(ratios) == pytest.approx(min(ratios))


@pytest.mark.parametrize("slowdown", [0.0, 0.25])
def test_measured_collectives_leave_the_gaps_that_were_measured(slowdown: float) -> None:
    """The rest of the layer's measured time is compute, of which backward hides a part beside its reductions."""
    reduce = MessageEntry(
        kind="all_reduce", size=2, nbytes=(1, 2**30), seconds=(0.1, 0.1), overlap_slowdown=(slowdown, slowdown)
    )
    costs = measured_costs(reduce)
    forward = costs.pieces(LayerWork(BLOCK, 2, LOAD, "forward"))
    assert [i for i, piece in enumerate(forward) if piece.collective_s] == [PROJECTION, DOWN]
    assert forward[DOWN].collective_s == pytest.approx(0.1 * (1 - slowdown))
    assert sum(piece.total_s for piece in forward) == pytest.approx(0.5)
    backward = costs.pieces(LayerWork(BLOCK, 2, LOAD, "backward"))
    assert sum(piece.total_s for piece in backward) == pytest.approx(0.75)
    assert 0 < backward[UP].hidden_s < backward[UP].collective_s == pytest.approx(0.1 * (1 - slowdown))
    assert sum(piece.compute_s for piece in backward) > 0.75 - 2 * 0.1


def test_collectives_measured_longer_than_their_layer_leave_some_compute() -> None:
    reduce = MessageEntry(kind="all_reduce", size=2, nbytes=(1, 2**30), seconds=(9.0, 9.0))
    pieces = measured_costs(reduce).pieces(LayerWork(BLOCK, 2, LOAD, "forward"))
    assert sum(piece.compute_s for piece in pieces) > 0.05 * 0.5
