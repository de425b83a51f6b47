"""When recorded actions count as taking other times than predicted, and when they do not."""

from collections.abc import Callable

import numpy as np
import pytest

from mmtrain.program import Backward, Forward, GatherParams, Microbatch, ReduceGrads, StageId, Step
from mmtrain.program.trace.step_record import ActionRecord, StepRecord
from mmtrain.runtime.training.cost_drift import DRIFT_STEPS, MEDIAN_STEPS, CostDrift, CostDriftDetector
from tests.program.graphs import Unit, chain

VISION, LLM = StageId("vision", 0), StageId("llm", 0)
GRAPH = chain(Unit("vision", dp=3), Unit("llm"))
REDUCTION_S = 0.25
Ratios = dict[str, float]  # kind of work -> recorded over predicted seconds


class Seconds:
    """Predicts a second for each forward and backward."""

    def compute(self, action: Forward) -> float:
        return 1.0

    def collective(self, rank: int, action: Step, group: tuple[int, ...]) -> "Seconds":
        return self

    seconds = REDUCTION_S


def record(rank: int, ratios: Ratios, slow_rank: int | None = None) -> StepRecord:
    """Record a microbatch of a rank; all ranks but the last wait 30 s for it in each reduction."""
    stage, replica = (LLM, 0) if rank == 3 else (VISION, rank)
    mb = Microbatch(stage.unit, replica, 0)
    factor = 5.0 if rank == slow_rank else 1.0
    waited = 0.0 if rank == 3 else 30.0
    actions = [
        ActionRecord(Forward(stage, mb), 0.0, 0.5 + factor * ratios.get(f"{stage.unit} forward", 1.0), 0.5),
        ActionRecord(Backward(stage, mb), 0.0, factor * ratios.get(f"{stage.unit} backward", 1.0), 0.0),
        *(
            ActionRecord(action, 0.0, waited + REDUCTION_S * ratios.get("reductions", 1.0), 0.0)
            for action in (GatherParams(stage.unit), ReduceGrads(stage.unit), Step())
        ),
    ]
    return StepRecord(0.0, 9.0, tuple(actions), ())


def observe(
    detector: CostDriftDetector, num_steps: int, ratios: Callable[[int], Ratios], slow_rank: int | None = None
) -> list[tuple[int, CostDrift]]:
    """Feed steps to the detector; return drifts with the number of the step, from 1."""
    ranks = [CostDriftDetector(GRAPH, rank) for rank in range(4)]
    drifts = []
    for step in range(num_steps):
        rows = [of_rank.rank_values(record(r, ratios(step), slow_rank), Seconds()) for r, of_rank in enumerate(ranks)]  # type: ignore[arg-type]
        drift = detector.observe(np.array(rows))
        if drift is not None:
            drifts.append((step + 1, drift))
    return drifts


@pytest.mark.parametrize("kind", ["vision forward", "llm backward", "reductions"])
@pytest.mark.parametrize("ratio", [1.2, 0.8])
def test_work_that_takes_another_time_step_after_step_is_drift(kind: str, ratio: float) -> None:
    [(step, drift)] = observe(CostDriftDetector(GRAPH, 0), 2 * DRIFT_STEPS, lambda step: {kind: ratio})
    assert step == DRIFT_STEPS + MEDIAN_STEPS - 1
    assert drift.to_text() == f"{kind} {ratio:.2g}x"
    assert drift.num_steps == DRIFT_STEPS
    recorded = {f"{unit} forward": r for unit, r in drift.ratios.forward.items()}
    recorded |= {f"{unit} backward": r for unit, r in drift.ratios.backward.items()}
    recorded |= {"reductions": drift.ratios.reductions or 0.0}
    expected = dict.fromkeys(("vision forward", "vision backward", "llm forward", "llm backward", "reductions"), 1.0)
    assert recorded == pytest.approx(expected | {kind: ratio})


def _noise(step: int) -> Ratios:
    rng = np.random.default_rng(step)
    kinds = ("vision forward", "vision backward", "llm forward", "llm backward", "reductions")
    return {kind: float(ratio) for kind, ratio in zip(kinds, rng.uniform(0.85, 1.15, len(kinds)), strict=True)}


@pytest.mark.parametrize(
    "ratios",
    [
        pytest.param(lambda step: {"llm forward": 1.09}, id="less than a tenth"),
        pytest.param(_noise, id="noise"),
        pytest.param(lambda step: {"llm forward": 9.0 if step % 10 < 4 else 1.0}, id="slow steps, as beside saves"),
        pytest.param(lambda step: {"llm forward": 2.0 if step % 70 < 49 else 1.0}, id="slow for less than fifty steps"),
    ],
)
def test_what_passes_is_no_drift(ratios: Callable[[int], Ratios]) -> None:
    assert observe(CostDriftDetector(GRAPH, 0), 6 * DRIFT_STEPS, ratios) == []


def test_a_straggler_is_no_drift() -> None:
    assert observe(CostDriftDetector(GRAPH, 0), 3 * DRIFT_STEPS, lambda step: {}, slow_rank=1) == []


def test_the_next_drift_must_last_twice_as_long() -> None:
    detector = CostDriftDetector(GRAPH, 0)
    drifts = observe(detector, 10 * DRIFT_STEPS, lambda step: {"llm forward": 2.0})
    assert [drift.num_steps for _, drift in drifts] == [DRIFT_STEPS, 2 * DRIFT_STEPS, 4 * DRIFT_STEPS]
