"""Partitions of a layer chain under a limit of memory, compared with all partitions there are."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mmtrain.planning.layer_costs.layer_costs import UnitLayerCosts
from mmtrain.planning.layer_costs.layer_partition import (
    LayerChain,
    anchor_partition,
    chunk_seconds,
    in_flight_by_chunk,
    recompute_to_fit,
)
from mmtrain.planning.layer_costs.min_max_partition import band, min_max_span_partition, spans_of_partitions
from mmtrain.planning.layer_costs.span_recompute import SpanRecompute
from mmtrain.program.ir.graph import StageId


def random_chain(seed: int, num_layers: int, pp: int, vpp: int) -> LayerChain:
    """Return a chain of up to three kinds of layers, in which only the work of a chunk counts."""
    rng = np.random.default_rng(seed)
    _, kind = np.unique(np.sort(rng.integers(0, 3, num_layers)), return_inverse=True)

    def of_layers(low: float, high: float) -> np.ndarray:
        return rng.uniform(low, high, kind.max() + 1)[kind]

    seconds, kept = of_layers(1, 5), of_layers(2, 8)
    costs = UnitLayerCosts(
        seconds=seconds,
        backward_seconds=seconds * 0.6,
        recompute_seconds=seconds * 0.4,
        state_bytes=of_layers(1, 5),
        kept_bytes=kept,
        saved_bytes=kept * of_layers(0.3, 0.9),
        working_bytes=of_layers(0, 3),
        recompute_working_bytes=of_layers(0, 4),
        input_bytes=of_layers(0.1, 0.2),
        parameters=of_layers(1, 2),
        kind=kind,
    )
    no_way = np.zeros(num_layers + 1)
    return LayerChain(("llm",), (0, num_layers), costs, pp, vpp, 3, no_way, masks=())


def recompute_of(chain: LayerChain, share: float) -> SpanRecompute:
    """Return what a chain recomputes to fit into a share of what all ranks hold together without recomputation."""
    num_layers, num_chunks = len(chain.costs.seconds), chain.num_chunks
    num_in_flight = np.broadcast_to(np.arange(num_chunks, 0, -1), (num_layers, num_chunks))
    held = chain.costs.state_bytes.sum() + (chain.costs.kept_bytes[:, None] * num_in_flight).mean(axis=1).sum()
    return recompute_to_fit(chain, num_in_flight, share * held / chain.pp)


@given(seed=st.integers(0, 10_000), num_layers=st.integers(2, 9), pp=st.integers(1, 4), vpp=st.integers(1, 2))
@pytest.mark.parametrize("share", [0.6, 1.0, 1.5])  # of what all ranks hold together without recomputation
def test_the_anchor_under_a_limit_is_the_best_of_all_partitions(
    share: float, seed: int, num_layers: int, pp: int, vpp: int
) -> None:
    assume(pp * vpp <= num_layers)
    chain = random_chain(seed, num_layers, pp, vpp)
    recompute = recompute_of(chain, share)
    inner = combinations(range(1, num_layers), pp * vpp - 1)
    partitions = np.array([(0, *bounds, num_layers) for bounds in inner])
    seconds = chunk_seconds(chain, partitions, recompute)
    found = anchor_partition(chain, recompute)
    if np.isinf(seconds.max(axis=1).min()):
        assert found is None
        return
    assert found is not None
    of_found = chunk_seconds(chain, np.array([found]), recompute)[0]
    least = seconds.max(axis=1).min()
    assert of_found.max() == pytest.approx(least)
    as_good = seconds[seconds.max(axis=1) <= least * (1 + 1e-12)]
    assert (of_found**2).sum() == pytest.approx((as_good**2).sum(axis=1).min())


@given(seed=st.integers(0, 10_000), num_layers=st.integers(8, 40), pp=st.integers(1, 8), vpp=st.integers(1, 2))
@pytest.mark.parametrize("share", [0.6, 1.0, 1.5])
def test_spans_that_are_left_out_change_no_anchor(share: float, seed: int, num_layers: int, pp: int, vpp: int) -> None:
    assume(pp * vpp <= num_layers)
    chain = random_chain(seed, num_layers, pp, vpp)
    recompute = recompute_of(chain, share)
    chunks, (lo, hi) = np.arange(pp * vpp)[:, None, None], np.indices((num_layers + 1, num_layers + 1))
    until = np.concatenate([[0.0], np.cumsum(chain.costs.seconds)])
    work_s = until[hi] - until[lo] + recompute.seconds(chunks, lo, hi)
    reference = min_max_span_partition(3 * work_s, pp * vpp, evened=work_s)  # three microbatches, and no way to chunks
    assert anchor_partition(chain, recompute) == reference


@given(seed=st.integers(0, 10_000), num_layers=st.integers(8, 30), pp=st.integers(2, 6))
@pytest.mark.parametrize("share", [0.6, 1.0, 1.5])
def test_the_anchor_under_a_limit_is_one_that_the_masks_allow(
    share: float, seed: int, num_layers: int, pp: int
) -> None:
    chain = random_chain(seed, num_layers, pp, 1)
    shape = (num_layers + 1, num_layers + 1)
    masks = tuple(np.random.default_rng(seed).random((2, pp, *shape)) < 0.7)
    recompute = recompute_of(chain, share)
    chunks, (lo, hi) = np.arange(pp)[:, None, None], np.indices(shape)
    until = np.concatenate([[0.0], np.cumsum(chain.costs.seconds)])
    work_s = until[hi] - until[lo] + recompute.seconds(chunks, lo, hi)
    for of_chain in ((masks[0],), (masks[0][:1],), masks):
        allowed = replace(chain, masks=of_chain)
        references = [min_max_span_partition(3 * work_s, pp, mask, work_s) for mask in of_chain]
        assert (anchor_partition(allowed, recompute) is None) == (references == [None] * len(references))
        assert anchor_partition(allowed, recompute) in references


@given(seed=st.integers(0, 10_000), share=st.sampled_from([0.6, 1.0, 1.5]))
def test_the_seconds_of_a_span_depend_on_no_other_span(seed: int, share: float) -> None:
    chain = random_chain(seed, 12, 3, 2)
    recompute = recompute_of(chain, share)
    chunks, (lo, hi) = np.arange(6)[:, None, None], np.indices((13, 13))
    together = recompute.seconds(chunks, lo, hi)
    alone = [
        recompute.seconds(np.array([chunk]), np.array([first]), np.array([last]))[0]
        for chunk, first, last in np.ndindex(together.shape)
    ]
    assert together.ravel().tolist() == alone


@pytest.mark.parametrize("share", [0.6, 1.0, 1.5])
def test_spans_worked_out_in_blocks_take_the_same_seconds(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    recompute = recompute_of(random_chain(5, 30, 4, 2), share)
    chunks, (lo, hi) = np.arange(8)[:, None, None], np.indices((31, 31))
    together = recompute.seconds(chunks, lo, hi)
    assert len(np.unique(together)) > 20
    monkeypatch.setattr("mmtrain.planning.layer_costs.span_recompute.MAX_SPANS_AT_ONCE", 2000)
    assert np.array_equal(recompute.seconds(chunks, lo, hi), together)
    assert np.array_equal(recompute.seconds(chunks, lo[None], hi[None]), together)
    rows = np.broadcast_to(np.arange(8), (961, 8))
    in_rows = recompute.seconds(rows, lo.reshape(-1, 1), hi.reshape(-1, 1))
    assert np.array_equal(in_rows.T.reshape(together.shape), together)


@given(st.integers(2, 7), st.integers(1, 4), st.integers(1, 7), st.integers(0, 10_000))
def test_spans_of_partitions_complete_to_one(num_layers: int, chunks: int, longest: int, seed: int) -> None:
    lo, hi = band(num_layers, longest)
    is_open = (np.random.default_rng(seed).random(lo.shape) < 0.7) & (lo >= 0)
    spans = {(int(a), int(b)) for a, b in zip(lo[is_open], hi[is_open], strict=True)}
    inner = combinations(range(1, num_layers), chunks - 1)
    partitions = [list(pairwise((0, *bounds, num_layers))) for bounds in inner]
    complete = [cuts for cuts in partitions if spans.issuperset(cuts)]
    for chunk, of_chunk in enumerate(spans_of_partitions(is_open[None], chunks)):
        found = {(int(a), int(b)) for a, b in zip(lo[of_chunk], hi[of_chunk], strict=True)}
        assert found == {cuts[chunk] for cuts in complete}


def test_a_chain_keeps_what_it_worked_out_for_one_memory_and_number_of_microbatches() -> None:
    chain = random_chain(3, 12, 3, 1)
    tables = [np.tile(in_flight, (12, 1)) for in_flight in ([3, 2, 1], [6, 2, 1])]
    first, *others = [chain.recompute_to_fit(table, memory) for table in tables for memory in (60.0, 40.0)]
    assert chain.recompute_to_fit(tables[0].copy(), 60.0) is first
    assert all(other is not first for other in others)
    for recompute in (first, *others):
        assert chain.anchor_within(recompute) == chain.anchor_within(recompute) == anchor_partition(chain, recompute)
    assert chain.anchor_within(None) == chain.anchor
    assert len({chain.anchor_within(recompute) for recompute in (first, *others)}) > 1


def test_a_chunk_without_layers_of_a_unit_counts_as_the_nearest_that_has_some() -> None:
    chain = random_chain(3, 12, 4, 1)
    assert chain.anchor is not None
    table = in_flight_by_chunk(chain, {StageId("llm", 0): 7, StageId("llm", 2): 5, StageId("llm", 3): 1})
    assert table.tolist() == [[7, 7, 5, 1]] * 12  # chunk 1 is as near to 0 as to 2
