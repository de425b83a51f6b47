"""Which ranks are reported as stragglers, and which are not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mmtrain.program import Backward, Forward, Microbatch, Stage, StageId, Step
from mmtrain.program.trace.step_record import ActionRecord, StepRecord
from mmtrain.runtime.resilience.stragglers import STRAGGLER_WINDOW_STEPS, StragglerDetector, median_of_others
from tests.program.graphs import Unit, chain

VISION, LLM = StageId("vision", 0), StageId("llm", 0)


@given(arrays(np.float64, st.integers(0, 9), elements=st.sampled_from([1.0, 2.0, 3.0, 5.0, np.nan])))
def test_median_of_others(values: np.ndarray) -> None:
    for place, median in enumerate(median_of_others(values)):
        others = [v for k, v in enumerate(values) if k != place and not np.isnan(v)]
        expected = np.nan if np.isnan(values[place]) or not others else np.median(others)
        np.testing.assert_equal(median, expected)


class Seconds:
    """Predicts as many seconds as the index of the microbatch says."""

    def compute(self, action: Forward) -> float:
        return float(action.mb.index)


def by_id(stage: Stage) -> StageId:
    """Make only replicas of a stage equivalent."""
    return stage.id


def record(stage: StageId, replica: int, index: int, seconds: float) -> StepRecord:
    """Record a forward and a backward of a microbatch, each after half a second of waiting."""
    mb = Microbatch(stage.unit, replica, index)
    waits = [ActionRecord(kind(stage, mb), 0.0, 0.5 + seconds, 0.5) for kind in (Forward, Backward)]
    return StepRecord(0.0, 9.0, (*waits, ActionRecord(Step(), 0.0, 9.0, 0.0)), ())


def table(slow: StragglerDetector, paces: list[tuple[StageId, int, int, float]]) -> np.ndarray:
    """Make one row per rank: its stage, replica, predicted seconds, and the ratio of measured to predicted ones."""
    return np.array([slow.rank_values(r, record(s, d, n, n * x), Seconds()) for r, (s, d, n, x) in enumerate(paces)])  # type: ignore[arg-type]


def test_a_rank_is_slow_by_the_pace_of_its_peers_not_by_its_load() -> None:
    slow = StragglerDetector(chain(Unit("vision", dp=3), Unit("llm")), by_id)
    # Everything takes ten times as long as predicted, rank 1 has the largest load, rank 2 is slow.
    usual = [(VISION, 0, 1, 10.0), (VISION, 1, 4, 10.0), (VISION, 2, 2, 30.0), (LLM, 0, 1, 99.0)]
    detections = [slow.detect(table(slow, usual), 50.0) for _ in range(STRAGGLER_WINDOW_STEPS + 1)]
    assert detections[: STRAGGLER_WINDOW_STEPS - 1] == [([], [])] * (STRAGGLER_WINDOW_STEPS - 1), (
        "not before the window is full"
    )
    stragglers, new = detections[STRAGGLER_WINDOW_STEPS - 1]
    assert stragglers == new
    text = "rank 2 takes 3.0x the time of its peers for F vision.0, B vision.0 (80 s a step)"
    assert [s.to_text() for s in stragglers] == [text]
    assert detections[STRAGGLER_WINDOW_STEPS] == (stragglers, []), "said once"
    healthy = [*usual[:2], (VISION, 2, 2, 10.0), usual[3]]
    later = [slow.detect(table(slow, healthy), 50.0) for _ in range(STRAGGLER_WINDOW_STEPS)]
    assert later[-1] == ([], [])


@pytest.mark.parametrize(("paces", "step_time_s"), [((1.0, 1.0, 1.4), 1.0), ((1.0, 1.0, 3.0), 200.0)])
def test_a_small_slowdown_or_a_small_cost_is_not_reported(paces: tuple[float, ...], step_time_s: float) -> None:
    slow = StragglerDetector(chain(Unit("vision", dp=3), Unit("llm")), by_id)
    row = [*((VISION, d, 2, x) for d, x in enumerate(paces)), (LLM, 0, 1, 1.0)]
    assert all(slow.detect(table(slow, row), step_time_s) == ([], []) for _ in range(STRAGGLER_WINDOW_STEPS))


def test_a_single_slow_step_does_not_make_a_rank_a_straggler() -> None:
    slow = StragglerDetector(chain(Unit("vision", dp=2), Unit("llm")), by_id)
    for step in range(3 * STRAGGLER_WINDOW_STEPS):
        row = [
            (VISION, 0, 1, 1.0),
            (VISION, 1, 1, 50.0 if step % STRAGGLER_WINDOW_STEPS == 1 else 1.0),
            (LLM, 0, 1, 1.0),
        ]
        assert slow.detect(table(slow, row), 1.0) == ([], [])


def test_ranks_without_load_and_stages_without_peers_are_not_judged() -> None:
    slow = StragglerDetector(chain(Unit("vision", dp=2), Unit("llm", 2)), by_id)
    rows = [(VISION, 0, 1, 5.0), (VISION, 1, 0, 1.0), (LLM, 0, 1, 1.0), (StageId("llm", 1), 0, 1, 70.0)]
    assert all(slow.detect(table(slow, rows), 1.0) == ([], []) for _ in range(STRAGGLER_WINDOW_STEPS))


def test_a_tp_group_is_judged_as_one() -> None:
    slow = StragglerDetector(chain(Unit("llm", tp=2, dp=2)), by_id)
    rows = [(LLM, 0, 1, 1.0)] * 2 + [(LLM, 1, 1, 2.0)] * 2
    texts = [s.to_text() for _ in range(STRAGGLER_WINDOW_STEPS) for s in slow.detect(table(slow, rows), 1.0)[1]]
    assert texts[0] == "ranks 2, 3 together take 2.0x the time of their peers for F llm.0, B llm.0 (2 s a step)"


def test_stages_that_do_the_same_are_peers_and_a_rank_with_several_is_named_once() -> None:
    graph = chain(Unit("llm", pp=2, num_stages=6))
    ends = {0: "first", 5: "last"}
    slow = StragglerDetector(graph, lambda stage: ends.get(stage.id.index, "middle"))
    assert slow.num_values == 8, "two stages on each rank are compared"

    def row(rank: int, pace: float) -> list[float]:
        records = [record(StageId("llm", k), 0, 1, 90.0 if k in ends else pace) for k in (rank, rank + 2, rank + 4)]
        return slow.rank_values(rank, StepRecord(0.0, 9.0, tuple(d for r in records for d in r.actions), ()), Seconds())

    detections = [slow.detect(np.array([row(0, 2.0), row(1, 1.0)]), 9.0)[0] for _ in range(STRAGGLER_WINDOW_STEPS)]
    assert [s.to_text() for s in detections[-1]] == [
        "rank 0 takes 2.0x the time of its peers for F llm.2, F llm.4, B llm.2, B llm.4 (4 s a step)"
    ]
