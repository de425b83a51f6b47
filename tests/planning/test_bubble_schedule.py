"""Encoders in an LLM's bubbles: valid on any kernels, and near the optimum on tiny instances."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.planning.colocated.bubble_schedule import (
    EncoderPlan,
    EncoderSchedule,
    EncoderWork,
    LlmTimeline,
    schedule_encoders,
)
from mmtrain.planning.colocated.bubbles import FreeTime, KernelChain, KernelSequence, place_kernels
from tests.planning.colocated_checks import Spans, check_schedule, least_time_outside


def layer(text: str) -> KernelSequence:
    """Parse kernels like `1.5 c0.3`; a `c` marks a collective."""
    words = text.split()
    return KernelSequence(tuple(float(w.lstrip("c")) for w in words), tuple(not w.startswith("c") for w in words))


FORWARD, BACKWARD = layer("0.1 c1 1.8 1.7 c1 1.9 c1"), layer("c1 1.9 1.9 0.1 c1 1.8 c1 0.1")


def llm_with_gaps(pp: int, num_microbatches: int, seed: int = 0) -> tuple[LlmTimeline, list[Spans]]:
    """Return an LLM whose ranks compute now and then, communicate in every second pause, and what they compute."""
    rng = np.random.default_rng(seed)
    busy, free_times = [], []
    for _ in range(pp):
        points = np.cumsum(rng.uniform(0.5, 6.0, 4 * num_microbatches + 2))
        spans = np.stack([points[::2], points[1::2]], axis=1)
        link = np.stack([spans[:-1:2, 1], spans[1::2, 0]], axis=1)
        busy.append([(start, end) for start, end in spans.tolist()])
        free_times.append(FreeTime.around(spans, link))
    end = max(spans[-1][1] for spans in busy)
    starts, ends = (np.sort(rng.uniform(lo, hi, num_microbatches)) for lo, hi in ((0, end / 2), (end / 2, end)))
    return LlmTimeline(tuple(free_times), end, starts, ends), busy


def scheduled(llm: LlmTimeline, *plans: EncoderPlan) -> tuple[EncoderSchedule, ...]:
    """Schedule encoders whose pipelines take the microbatches in turn."""
    turns = [np.arange(len(llm.first_forwards)) % plan.num_pipelines(llm) for plan in plans]
    return schedule_encoders([EncoderWork(llm, plan, owner) for plan, owner in zip(plans, turns, strict=True)])


def encoder(pp: int, layers_per_stage: int = 1) -> EncoderPlan:
    return EncoderPlan(pp, ((FORWARD,) * layers_per_stage,) * pp, ((BACKWARD,) * layers_per_stage,) * pp)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_every_encoder_pipeline_runs_beside_the_llm(pp: int) -> None:
    llm, busy = llm_with_gaps(4, 8)
    (schedule,) = scheduled(llm, encoder(pp, 4 // pp))
    check_schedule(schedule, busy)
    inside = [
        float(np.diff(np.clip(placed.spans, 0, llm.end)[placed.computes]).sum())
        for half in (schedule.forward, schedule.backward)
        for placed in half.values()
    ]
    assert sum(inside) > 0, "bubbles are filled"


@given(st.data())
def test_any_kernels_run_beside_any_llm(data: st.DataObject) -> None:
    def draw_kernels() -> KernelSequence:
        durations = data.draw(st.lists(st.floats(0.01, 3), min_size=1, max_size=5))
        computes = data.draw(st.lists(st.booleans(), min_size=len(durations), max_size=len(durations)))
        return KernelSequence(tuple(durations), tuple(computes))

    pp, llm_pp = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 2), (2, 4)]))
    llm, busy = llm_with_gaps(llm_pp, data.draw(st.integers(1, 6)), data.draw(st.integers(0, 1000)))
    forward, backward = draw_kernels(), draw_kernels()
    is_frozen = data.draw(st.booleans())
    (schedule,) = scheduled(llm, EncoderPlan(pp, ((forward,),) * pp, () if is_frozen else ((backward,),) * pp))
    check_schedule(schedule, busy)


def test_chains_share_a_rank_without_idling() -> None:
    free_time = FreeTime(np.array([[0.0, 4.0], [10.0, np.inf]]), np.array([[4.0, 10.0], [10.0, np.inf]]))
    chains = [KernelChain(7, 0.0, layer("3 c2 1")), KernelChain(8, 1.0, layer("1"))]
    placed, end = place_kernels(free_time, chains)
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
        KernelSequence(tuple(d.astype(float).tolist()), (True,) * len(d))
        for d in (rng.integers(1, 5, n) for n in rng.integers(1, 3, 2))
    )
    return LlmTimeline(tuple(free_times), end, first, last), EncoderPlan(1, ((forward,),), ((backward,),))


@pytest.mark.slow
def test_tiny_instances_are_near_the_optimum() -> None:
    ratios = []
    for seed in range(30):
        llm, plan = tiny_instance(seed)
        (schedule,) = scheduled(llm, plan)
        least_s = least_time_outside(llm, plan, schedule.owner)
        ratios.append((llm.end + schedule.head + max(schedule.tail, 0.0)) / (llm.end + least_s))
    assert min(ratios) >= 1 - 1e-6, "nothing is shorter than the optimum"
    assert np.mean(np.array(ratios) < 1 + 1e-6) > 0.9
    assert max(ratios) < 1.05


def test_kernels_of_two_encoders_compete_for_the_same_bubbles() -> None:
    """The first encoder's backward and the second one's forward want one bubble, and only the backward can wait."""
    busy = np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    free_time = FreeTime.around(busy, np.zeros((0, 2)))
    llm = LlmTimeline((free_time,), 5.0, np.array([0.0, 3.0]), np.array([1.0, 5.0]))
    plans = EncoderPlan(1, ((layer("5"),),), ((layer("1"),),)), EncoderPlan(1, ((layer("1"),),), ())
    together = scheduled(llm, *plans)
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

    (first,) = scheduled(llm, plans[0])  # one after the other, the second one finds no bubble
    left = free_time.without(first.forward[0, 0]).without(first.backward[0, 0])
    (second,) = scheduled(LlmTimeline((left,), 5.0, llm.first_forwards, llm.last_backwards), plans[1])
    assert (max(first.head, second.head), max(first.tail, second.tail)) == (12, 1)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_kernels_of_two_encoders_run_one_at_a_time(pp: int) -> None:
    llm, _ = llm_with_gaps(4, 8)
    both = scheduled(llm, encoder(pp), encoder(pp))
    (alone,) = scheduled(llm, encoder(pp))
    for key in alone.forward:
        of_rank = [placed for schedule in both for placed in (schedule.forward[key], schedule.backward[key])]
        for computes in (True, False):
            spans = sorted(tuple(span) for p in of_rank for span in p.spans[p.computes == computes].tolist())
            assert len(spans) > 0
            assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))
    assert max(schedule.head for schedule in both) >= alone.head - 1e-6
    assert max(schedule.tail for schedule in both) >= alone.tail - 1e-6
