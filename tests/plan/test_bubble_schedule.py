"""Encoders in an LLM's bubbles: valid on any table, near the best on tiny ones, near the bound on a paper's."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import PlanError
from mmtrain.plan.colocated.bubble_schedule import (
    EncoderPlan,
    LlmTimeline,
    search_encoder_plans,
    search_shares,
    step_time_lower_bound,
)
from mmtrain.plan.colocated.bubbles import FreeTime, KernelChain, KernelSequence, place_kernels
from mmtrain.plan.colocated.kernel_table import KernelTable, LayerKernels, balanced_step_ms, megatron_step_ms
from mmtrain.plan.colocated.llm_timeline import InterleavedPipeline, simulate_interleaved
from tests.plan.colocated_checks import Spans, check_schedule, least_step


def layer(text: str) -> KernelSequence:
    """Kernels like `1.5 c0.3`, collectives with a c."""
    words = text.split()
    return KernelSequence.of([float(w.lstrip("c")) for w in words], [not w.startswith("c") for w in words])


LLM = LayerKernels(layer("0.1 c2 7 c2 0.1 c2 13 c2"), layer("c2 26 c2 0.1 c2 14 c2 0.1"))
ENCODERS = {
    1: LayerKernels(layer("5 9 1"), layer("14 1 12")),
    2: LayerKernels(layer("0.1 c1 1.8 1.7 c1 1.9 c1"), layer("c1 1.9 1.9 0.1 c1 1.8 c1 0.1")),
}
LONG = {2: LayerKernels(layer("0.1 c1 2.4 1.7 c1 1.9 c1"), layer("c1 2.4 2.4 0.1 c1 1.8 c1 0.1"))}


def table(encoders: dict[int, LayerKernels], pp: int = 2, vpp: int = 2, layers: int = 4) -> KernelTable:
    return KernelTable(pp, vpp, 2, pp * vpp, LLM, layers, encoders, 0.5, 11.0, 23.0, (2 * pp,))


def llm_spans(given: KernelTable, num_microbatches: int) -> tuple[list[Spans], list[Spans]]:
    """When each rank of the LLM computes and communicates, kernel by kernel; also that its order runs."""
    timeline = simulate_interleaved(given.pipeline(num_microbatches))
    busy: list[Spans] = []
    link: list[Spans] = []
    for order, starts in zip(timeline.order, timeline.start, strict=True):
        rows = []
        for (is_forward, _, _), start in zip(order, starts, strict=True):
            kernels = given.llm.forward if is_forward else given.llm.backward
            ends = start + np.cumsum(kernels.durations)
            rows += [(e - d, e, c) for e, d, c in zip(ends, kernels.durations, kernels.computes, strict=True)]
        busy.append([(a, b) for a, b, computes in rows if computes])
        link.append([(a, b) for a, b, computes in rows if not computes])
    return busy, link


@pytest.mark.parametrize("encoders", [ENCODERS, LONG], ids=["fits", "is cut"])
@pytest.mark.parametrize("whole_layers", [False, True], ids=["fine", "coarse"])
def test_every_encoder_plan_runs_beside_the_llm(encoders: dict[int, LayerKernels], whole_layers: bool) -> None:
    given = table(encoders, pp=4)
    busy, link = llm_spans(given, 8)
    plans = given.encoder_plans()
    assert {plan.pp for plan in plans} == {1, 2, 4}
    for plan in plans:
        host = given.host(8)
        found = search_shares(host, plan, whole_layers=whole_layers)
        check_schedule(found, busy, link)
        assert found.step_time >= step_time_lower_bound(host, plan) - 1e-6
        assert 0 <= found.efficiency <= 1


def test_a_kernel_longer_than_the_bubbles_is_cut_and_no_other() -> None:
    def most_pieces(encoders: dict[int, LayerKernels]) -> int:
        given = table(encoders, pp=4)
        [plan] = [p for p in given.encoder_plans() if (p.tp, p.pp) == (2, 1)]
        halves = search_shares(given.host(8), plan).backward.values()
        return max(int(np.unique([p.chains, p.kernels], axis=1, return_counts=True)[1].max()) for p in halves)

    assert most_pieces(ENCODERS) == 1
    assert most_pieces(LONG) > 1


@given(st.data())
def test_any_kernels_run_beside_any_llm(data: st.DataObject) -> None:
    def kernels(longest: float) -> KernelSequence:
        durations = data.draw(st.lists(st.floats(0.01, longest), min_size=1, max_size=5))
        return KernelSequence.of(
            durations, data.draw(st.lists(st.booleans(), min_size=len(durations), max_size=len(durations)))
        )

    both = LayerKernels(kernels(3), kernels(3))
    given_table = table({1: both, 2: both}, pp=2, vpp=data.draw(st.integers(1, 3)), layers=data.draw(st.integers(2, 4)))
    total = 2 * data.draw(st.integers(1, 3))
    host, busy_and_link = given_table.host(total), llm_spans(given_table, total)
    plan = data.draw(st.sampled_from(given_table.encoder_plans()))
    frozen = replace(plan, backward=()) if data.draw(st.booleans()) else plan
    for whole_layers in (False, True):
        found = search_shares(host, frozen, whole_layers=whole_layers)
        check_schedule(found, *busy_and_link)
        assert found.step_time >= step_time_lower_bound(host, frozen) - 1e-6


def test_search_takes_the_fastest_of_all_plans_and_none_slower_than_coarse() -> None:
    given = table(ENCODERS, pp=4, layers=6)
    host, plans = given.host(8), given.encoder_plans()
    best = search_encoder_plans(host, plans)
    assert best.step_time <= 1.0005 * min(search_shares(host, plan).step_time for plan in plans)
    assert best.step_time <= search_shares(host, best.plan, whole_layers=True).step_time


def test_a_paper_sized_table_comes_near_the_bound() -> None:
    """The proportions of ViT-22B in GPT-175B: 48 encoder layers in 96 of the LLM, 8 ranks of 12 chunks."""
    given = table({2: ENCODERS[2]}, pp=8, vpp=12, layers=48)
    host = given.host(16)
    found = search_encoder_plans(host, given.encoder_plans())
    check_schedule(found, *llm_spans(given, 16))
    least = sum(k.latency for k in (ENCODERS[2].forward, ENCODERS[2].backward)) * 48 - given.gather - given.scatter
    assert found.step_time <= 1.002 * (host.step_time + least)
    coarse = search_shares(host, found.plan, whole_layers=True)
    assert found.step_time < coarse.step_time < megatron_step_ms(given, 16)
    assert found.step_time < balanced_step_ms(given, 16)
    assert found.efficiency > coarse.efficiency


def test_forwards_are_put_off_and_nothing_takes_longer_for_it() -> None:
    given = table(ENCODERS, pp=4, vpp=3)
    pipeline = given.pipeline(8)
    timeline = simulate_interleaved(pipeline)
    ends = [
        {work: t + pipeline.seconds(rank, work) for work, t in zip(order, start, strict=True)}
        for rank, (order, start) in enumerate(zip(timeline.order, timeline.start, strict=True))
    ]
    for rank, (order, start) in enumerate(zip(timeline.order, timeline.start, strict=True)):
        assert {mb for _, _, mb in order} == set(range(8))
        assert len(set(order)) == len(order) == 2 * 8 * 3
        for (_, chunk, mb), begun in [(w, t) for w, t in zip(order, start, strict=True) if w[0] and rank]:
            assert begun >= ends[rank - 1][True, chunk, mb] + pipeline.transfer - 1e-9
    for change in ([0, 0, -1, 0], [-1, -1, -1, 0], [1, 1, 1, 1]):
        other = [count + more for count, more in zip(pipeline.warm_up, change, strict=True)]
        assert simulate_interleaved(pipeline, other).end >= timeline.end - 1e-9, "another warm-up is no faster"
    assert timeline.start[0][0] == pytest.approx(0)


def test_interleaving_asks_for_whole_groups_and_enough_warm_up() -> None:
    with pytest.raises(PlanError, match="7 microbatches do not go in groups of pp=2"):
        InterleavedPipeline(2, 2, 7, (1.0,) * 4, (2.0,) * 4, 0.0)
    with pytest.raises(PlanError, match="longer warm-up"):
        simulate_interleaved(InterleavedPipeline(2, 2, 4, (1.0,) * 4, (2.0,) * 4, 0.0), [0, 0])


def test_chains_share_a_rank_without_idling() -> None:
    free = FreeTime(np.array([[0.0, 4.0], [10.0, np.inf]]), np.array([[4.0, 10.0], [10.0, np.inf]]))
    kernels = KernelSequence.of([3, 2, 1], [True, False, True])
    single = KernelSequence.of([1], [True])
    placed, done = place_kernels(free, [KernelChain(7, 0.0, kernels), KernelChain(8, 1.0, single)])
    assert placed.spans.tolist() == [[0, 3], [4, 6], [3, 4], [10, 11]]
    assert placed.chains.tolist() == [7, 7, 8, 7]
    assert done == {7: 11, 8: 4}


def tiny(seed: int) -> tuple[LlmTimeline, EncoderPlan]:
    """Two ranks with random gaps, two or three microbatches, one or two kernels each way; whole numbers."""
    rng = np.random.default_rng(seed)
    free_times, ends = [], []
    for _ in range(2):
        points = np.cumsum([rng.integers(0, 4), *rng.integers(1, 5, rng.integers(5, 10))]).astype(float)
        busy = np.array([(a, b) for a, b in pairwise(points)][::2])
        free_times.append(FreeTime.around(busy, busy[:0]))
        ends.append(busy[-1, 1])
    end, total = max(ends), rng.integers(2, 4)
    first = np.sort(rng.integers(0, int(end) // 2, total)).astype(float)
    last = np.sort(rng.integers(int(end) // 2, int(end), total)).astype(float)
    forward, backward = (
        KernelSequence.of(d.astype(float).tolist(), [True] * len(d))
        for d in (rng.integers(1, 5, n) for n in rng.integers(1, 3, 2))
    )
    plan = EncoderPlan(1, 1, 1, ((forward,),), ((backward,),))
    return LlmTimeline(tuple(free_times), end, 1.0, 2.0, first, last, float(rng.integers(0, 2))), plan


def test_tiny_instances_are_near_the_best_there_is() -> None:
    ratios = []
    for seed in range(30):
        host, plan = tiny(seed)
        ratios.append(search_shares(host, plan).step_time / least_step(host, plan))
    assert min(ratios) >= 1 - 1e-6, "nothing is shorter than the best"
    assert np.mean(np.array(ratios) < 1 + 1e-6) > 0.9
    assert max(ratios) < 1.05
