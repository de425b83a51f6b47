"""Encoders in an LLM's bubbles: valid on any cost table, near the optimum on tiny ones, near the bound on a paper's."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import PlanError
from mmtrain.planning.colocated.bubble_schedule import (
    EncoderPlan,
    EncoderWork,
    LlmTimeline,
    schedule_encoder,
    schedule_encoders,
)
from mmtrain.planning.colocated.bubbles import FreeTime, KernelChain, KernelSequence, place_kernels
from scripts.kernel_tables.encoder_search import (
    compute_share_inside_llm,
    search_encoder_plans,
    search_shares,
    step_time_lower_bound,
)
from scripts.kernel_tables.interleaved_timeline import InterleavedPipeline, simulate_interleaved
from scripts.kernel_tables.kernel_table import KernelTable, LayerKernels, balanced_step_ms, megatron_step_ms
from tests.planning.colocated_checks import Spans, check_schedule, least_step


def layer(text: str) -> KernelSequence:
    """Parse kernels like `1.5 c0.3`; a `c` marks a collective."""
    words = text.split()
    return KernelSequence.of([float(w.lstrip("c")) for w in words], [not w.startswith("c") for w in words])


LLM = LayerKernels(layer("0.1 c2 7 c2 0.1 c2 13 c2"), layer("c2 26 c2 0.1 c2 14 c2 0.1"))
ENCODERS = {
    1: LayerKernels(layer("5 9 1"), layer("14 1 12")),
    2: LayerKernels(layer("0.1 c1 1.8 1.7 c1 1.9 c1"), layer("c1 1.9 1.9 0.1 c1 1.8 c1 0.1")),
}
ENCODERS_LONGER_THAN_BUBBLES = {
    2: LayerKernels(layer("0.1 c1 2.4 1.7 c1 1.9 c1"), layer("c1 2.4 2.4 0.1 c1 1.8 c1 0.1"))
}


def make_table(encoders: dict[int, LayerKernels], pp: int = 2, vpp: int = 2, layers: int = 4) -> KernelTable:
    return KernelTable(
        pp=pp,
        vpp=vpp,
        tp=2,
        llm_layers=pp * vpp,
        llm=LLM,
        encoder_layers=layers,
        encoder=encoders,
        transfer=0.5,
        gather=11.0,
        scatter=23.0,
        microbatches=(2 * pp,),
    )


def llm_spans(table: KernelTable, num_microbatches: int) -> tuple[list[Spans], list[Spans]]:
    """Return the spans in which each rank of the LLM computes and communicates, kernel by kernel."""
    timeline = simulate_interleaved(table.pipeline(num_microbatches))
    busy: list[Spans] = []
    link: list[Spans] = []
    for order, starts in zip(timeline.order, timeline.start, strict=True):
        rows = []
        for (is_forward, _, _), start in zip(order, starts, strict=True):
            kernels = table.llm.forward if is_forward else table.llm.backward
            ends = start + np.cumsum(kernels.durations)
            rows += [(e - d, e, c) for e, d, c in zip(ends, kernels.durations, kernels.computes, strict=True)]
        busy.append([(a, b) for a, b, computes in rows if computes])
        link.append([(a, b) for a, b, computes in rows if not computes])
    return busy, link


@pytest.mark.parametrize("encoders", [ENCODERS, ENCODERS_LONGER_THAN_BUBBLES], ids=["fits", "is cut"])
@pytest.mark.parametrize("whole_layers", [False, True], ids=["fine", "coarse"])
def test_every_encoder_plan_runs_beside_the_llm(encoders: dict[int, LayerKernels], whole_layers: bool) -> None:
    table = make_table(encoders, pp=4)
    busy, link = llm_spans(table, 8)
    plans = table.encoder_plans()
    assert {plan.pp for plan in plans} == {1, 2, 4}
    for plan in plans:
        llm = table.llm_timeline(8)
        schedule = search_shares(llm, plan, whole_layers=whole_layers)
        check_schedule(schedule, busy, link)
        assert schedule.step_time >= step_time_lower_bound(llm, plan) - 1e-6
        assert 0 <= compute_share_inside_llm(schedule) <= 1


def test_only_kernels_longer_than_the_bubbles_are_cut() -> None:
    def max_pieces(encoders: dict[int, LayerKernels]) -> int:
        table = make_table(encoders, pp=4)
        [plan] = [p for p in table.encoder_plans() if (p.tp, p.pp) == (2, 1)]
        backward = search_shares(table.llm_timeline(8), plan).backward.values()
        return max(int(np.unique([p.labels, p.kernel_index], axis=1, return_counts=True)[1].max()) for p in backward)

    assert max_pieces(ENCODERS) == 1
    assert max_pieces(ENCODERS_LONGER_THAN_BUBBLES) > 1


@given(st.data())
def test_any_kernels_run_beside_any_llm(data: st.DataObject) -> None:
    def draw_kernels(longest: float) -> KernelSequence:
        durations = data.draw(st.lists(st.floats(0.01, longest), min_size=1, max_size=5))
        return KernelSequence.of(
            durations, data.draw(st.lists(st.booleans(), min_size=len(durations), max_size=len(durations)))
        )

    kernels = LayerKernels(draw_kernels(3), draw_kernels(3))
    vpp, layers = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 4))
    table = make_table({1: kernels, 2: kernels}, pp=2, vpp=vpp, layers=layers)
    num_microbatches = 2 * data.draw(st.integers(1, 3))
    llm = table.llm_timeline(num_microbatches)
    busy, link = llm_spans(table, num_microbatches)
    plan = data.draw(st.sampled_from(table.encoder_plans()))
    if data.draw(st.booleans()):
        plan = replace(plan, backward=())  # a frozen encoder
    for whole_layers in (False, True):
        schedule = search_shares(llm, plan, whole_layers=whole_layers)
        check_schedule(schedule, busy, link)
        assert schedule.step_time >= step_time_lower_bound(llm, plan) - 1e-6


def test_search_takes_the_fastest_of_all_plans_and_none_slower_than_coarse() -> None:
    table = make_table(ENCODERS, pp=4, layers=6)
    llm = table.llm_timeline(8)
    plans = table.encoder_plans()
    best = search_encoder_plans(llm, plans)
    assert best.step_time <= 1.0005 * min(search_shares(llm, plan).step_time for plan in plans)
    assert best.step_time <= search_shares(llm, best.plan, whole_layers=True).step_time


def test_a_paper_sized_table_comes_near_the_bound() -> None:
    """Use the proportions of ViT-22B in GPT-175B: 48 encoder layers in 96 of the LLM, 8 ranks of 12 chunks."""
    table = make_table({2: ENCODERS[2]}, pp=8, vpp=12, layers=48)
    llm = table.llm_timeline(16)
    best = search_encoder_plans(llm, table.encoder_plans())
    check_schedule(best, *llm_spans(table, 16))
    outside = sum(k.latency for k in (ENCODERS[2].forward, ENCODERS[2].backward)) * 48 - table.gather - table.scatter
    assert best.step_time <= 1.002 * (llm.step_time + outside)
    coarse = search_shares(llm, best.plan, whole_layers=True)
    assert best.step_time < coarse.step_time < megatron_step_ms(table, 16)
    assert best.step_time < balanced_step_ms(table, 16)
    assert compute_share_inside_llm(best) > compute_share_inside_llm(coarse)


def test_forwards_are_delayed_and_the_step_takes_no_longer() -> None:
    table = make_table(ENCODERS, pp=4, vpp=3)
    pipeline = table.pipeline(8)
    timeline = simulate_interleaved(pipeline)
    ends = [
        {chunk_pass: t + pipeline.duration(rank, chunk_pass) for chunk_pass, t in zip(order, start, strict=True)}
        for rank, (order, start) in enumerate(zip(timeline.order, timeline.start, strict=True))
    ]
    for rank, (order, starts) in enumerate(zip(timeline.order, timeline.start, strict=True)):
        assert {mb for _, _, mb in order} == set(range(8))
        assert len(set(order)) == len(order) == 2 * 8 * 3
        for (is_forward, chunk, mb), start in zip(order, starts, strict=True):
            if is_forward and rank:
                assert start >= ends[rank - 1][True, chunk, mb] + pipeline.transfer - 1e-9
    for change in ([0, 0, -1, 0], [-1, -1, -1, 0], [1, 1, 1, 1]):
        warm_up = [count + more for count, more in zip(pipeline.warm_up, change, strict=True)]
        assert simulate_interleaved(pipeline, warm_up).end >= timeline.end - 1e-9, "another warm-up is no faster"
    assert timeline.start[0][0] == pytest.approx(0)


def test_interleaving_needs_whole_groups_and_enough_warm_up() -> None:
    with pytest.raises(PlanError, match="7 microbatches do not go in groups of pp=2"):
        InterleavedPipeline(2, 2, 7, (1.0,) * 4, (2.0,) * 4, 0.0)
    with pytest.raises(PlanError, match="longer warm-up"):
        simulate_interleaved(InterleavedPipeline(2, 2, 4, (1.0,) * 4, (2.0,) * 4, 0.0), [0, 0])


def test_chains_share_a_rank_without_idling() -> None:
    free_time = FreeTime(np.array([[0.0, 4.0], [10.0, np.inf]]), np.array([[4.0, 10.0], [10.0, np.inf]]))
    three = KernelSequence.of([3, 2, 1], [True, False, True])
    single = KernelSequence.of([1], [True])
    placed, end = place_kernels(free_time, [KernelChain(7, 0.0, three), KernelChain(8, 1.0, single)])
    assert placed.spans.tolist() == [[0, 3], [4, 6], [3, 4], [10, 11]]
    assert placed.labels.tolist() == [7, 7, 8, 7]
    assert end == {7: 11, 8: 4}


def tiny_instance(seed: int) -> tuple[LlmTimeline, EncoderPlan]:
    """Make two ranks with random gaps, 2 or 3 microbatches, 1 or 2 kernels per direction; whole numbers."""
    rng = np.random.default_rng(seed)
    free_times, ends = [], []
    for _ in range(2):
        points = np.cumsum([rng.integers(0, 4), *rng.integers(1, 5, rng.integers(5, 10))]).astype(float)
        busy = np.array([(a, b) for a, b in pairwise(points)][::2])
        free_times.append(FreeTime.around(busy, busy[:0]))
        ends.append(busy[-1, 1])
    end = max(ends)
    num_microbatches = rng.integers(2, 4)
    first = np.sort(rng.integers(0, int(end) // 2, num_microbatches)).astype(float)
    last = np.sort(rng.integers(int(end) // 2, int(end), num_microbatches)).astype(float)
    forward, backward = (
        KernelSequence.of(d.astype(float).tolist(), [True] * len(d))
        for d in (rng.integers(1, 5, n) for n in rng.integers(1, 3, 2))
    )
    plan = EncoderPlan(1, 1, 1, ((forward,),), ((backward,),))
    llm = LlmTimeline(
        free_times=tuple(free_times),
        end=end,
        gather=1.0,
        scatter=2.0,
        first_forwards=first,
        last_backwards=last,
        transfer=float(rng.integers(0, 2)),
    )
    return llm, plan


@pytest.mark.slow
def test_tiny_instances_are_near_the_optimum() -> None:
    ratios = []
    for seed in range(30):
        llm, plan = tiny_instance(seed)
        ratios.append(search_shares(llm, plan).step_time / least_step(llm, plan))
    assert min(ratios) >= 1 - 1e-6, "nothing is shorter than the optimum"
    assert np.mean(np.array(ratios) < 1 + 1e-6) > 0.9
    assert max(ratios) < 1.05


def test_kernels_of_two_encoders_compete_for_the_same_bubbles() -> None:
    """The first encoder's backward and the second one's forward want one bubble, and only the backward can wait."""
    busy = np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    llm = LlmTimeline(
        free_times=(FreeTime.around(busy, np.zeros((0, 2))),),
        end=5.0,
        gather=0.0,
        scatter=0.0,
        first_forwards=np.array([0.0, 3.0]),
        last_backwards=np.array([1.0, 5.0]),
        transfer=0.0,
    )
    plans = [
        EncoderPlan(tp=1, pp=1, tp_groups_per_rank=1, forward=((layer("5"),),), backward=((layer("1"),),)),
        EncoderPlan(tp=1, pp=1, tp_groups_per_rank=1, forward=((layer("1"),),), backward=()),
    ]
    owner = np.zeros(2, dtype=np.int64)
    together = schedule_encoders([EncoderWork(llm, plan, owner) for plan in plans])
    assert (max(s.head for s in together), max(s.tail for s in together)) == (11, 1)
    spans = sorted(
        tuple(span)
        for schedule in together
        for placed in (*schedule.forward.values(), *schedule.backward.values())
        for span in placed.spans.tolist()
    )
    assert spans[0][0] == -11
    assert spans[-3:] == [(1, 2), (3, 4), (5, 6)]
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))

    first = schedule_encoder(llm, plans[0], owner)  # one after the other, the second one finds no bubble
    left = llm.free_times[0].without(first.forward[0, 0]).without(first.backward[0, 0])
    second = schedule_encoder(replace(llm, free_times=(left,)), plans[1], owner)
    assert (max(first.head, second.head), max(first.tail, second.tail)) == (12, 1)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_kernels_of_two_encoders_run_one_at_a_time(pp: int) -> None:
    table = make_table(ENCODERS, pp=4)
    llm = table.llm_timeline(8)
    plan = next(plan for plan in table.encoder_plans() if plan.pp == pp and plan.tp_groups_per_rank == 1)
    num_pipelines = plan.num_pipelines(llm)
    owner = np.arange(8) % num_pipelines
    both = schedule_encoders([EncoderWork(llm, plan, owner)] * 2)
    alone = schedule_encoder(llm, plan, owner)
    for key in alone.forward:
        of_rank = [placed for schedule in both for placed in (schedule.forward[key], schedule.backward[key])]
        for computes in (True, False):
            spans = sorted(tuple(span) for p in of_rank for span in p.spans[p.computes == computes].tolist())
            assert len(spans) > 0 or not computes
            assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))
    assert min(schedule.step_time for schedule in both) >= alone.step_time - 1e-6
