"""Detect that recorded actions take other times than the plan's costs predict, step after step."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.costs.recorded_costs import RecordedRatios
from mmtrain.program import ReduceShared, StageGraph, Step, Timing
from mmtrain.program.ir.actions import Backward, Compute, Forward
from mmtrain.program.ir.data_dependencies import participants
from mmtrain.program.ir.segments import direction
from mmtrain.program.trace.step_record import StepRecord

FloatArray = npt.NDArray[np.float64]

MIN_DRIFT = 1.1  # recorded over predicted seconds or the inverse; step times are predicted about as well
DRIFT_STEPS = 50  # in a row; more than a save, a validation or a short visit of another job on the machine disturbs
# Steps whose median counts: a single slow step, or up to five beside a save, leave it as it is.
MEDIAN_STEPS = 11
MIN_DRIFT_SHARE = 0.05  # of the recorded seconds of all ranks; less work hardly changes which plan is fastest
# Each drift after the first must last twice as long as the one before: on a machine whose speed changes all the time, a
# run would else plan all the time.
REPEAT_FACTOR = 2
REDUCTIONS = "reductions"
# What holds a rank until it ends. Reductions of gradients and the gathering of parameters do not, so that records do
# not tell how long they took.
_HOLDING_COLLECTIVES = ReduceShared | Step
_LAST_STEPS = np.arange(-MEDIAN_STEPS, 0)
_DIRECTION_NAMES = {"F": "forward", "B": "backward"}


@dataclass(frozen=True)
class CostDrift:
    """How recorded seconds differ from predicted ones, as the median of the last `DRIFT_STEPS` steps."""

    ratios: RecordedRatios
    drifted: tuple[str, ...]  # kinds of work that drifted, like `vision forward 2.1x`
    num_steps: int  # in a row

    def to_text(self) -> str:
        """Return what differs, for a sentence."""
        return ", ".join(self.drifted)


class CostDriftDetector:
    """Compares, by kind of work, what the ranks record with what the costs predict for the loads of the same step.

    Kinds are the forwards and the backwards of each unit, and the reductions at the end of the step. Of compute the
    median over ranks counts, so that a straggler is no drift. Ranks wait for each other in reductions, so there the
    rank counts that waited least. Messages are not compared: their records contain waits for the other end.
    """

    def __init__(self, graph: StageGraph, rank: int) -> None:
        """Compare the steps of `rank`."""
        self._graph, self._rank = graph, rank
        self._units = tuple(mesh.unit for mesh in graph.meshes)
        self._compute_kinds = [(unit, letter) for unit in self._units for letter in _DIRECTION_NAMES]
        self._index = {kind: 2 * number for number, kind in enumerate(self._compute_kinds)}
        self.num_values = 2 * len(self._compute_kinds) + 2
        self._reductions_s: float | None = None  # predicted for this rank; the same in every step
        self._needed_steps = DRIFT_STEPS
        self.restart()

    def restart(self) -> None:
        """Forget all steps: the costs that they were compared with are no longer those of the run."""
        self._num_steps = 0
        self._num_drifted = 0  # steps in a row
        # Ring buffers of the last steps, (steps, kinds): recorded over predicted seconds, and recorded seconds.
        self._ratios = np.full((DRIFT_STEPS, self.num_values // 2), np.nan)
        self._recorded = np.zeros_like(self._ratios)
        self._reductions_s = None

    def rank_values(self, record: StepRecord, timing: Timing) -> list[float]:
        """Return what this rank contributes to a step's table: recorded and predicted seconds of each kind."""
        values = [0.0] * self.num_values
        index, compute_s = self._index, timing.compute
        for action, start_s, end_s, wait_s in record.actions:
            if isinstance(action, Forward | Backward):
                at = index[action.stage.unit, "F" if isinstance(action, Forward) else "B"]
            elif isinstance(action, Compute):
                at = index[action.stage.unit, direction(action)]
            else:
                if isinstance(action, _HOLDING_COLLECTIVES):
                    values[-2] += end_s - start_s - wait_s
                continue
            values[at] += end_s - start_s - wait_s
            values[at + 1] += compute_s(action)
        values[-1] = self._predicted_reductions_s(record, timing)
        return values

    def _predicted_reductions_s(self, record: StepRecord, timing: Timing) -> float:
        if self._reductions_s is None:
            actions = [done.action for done in record.actions]
            self._reductions_s = sum(
                timing.collective(self._rank, action, participants(self._graph, self._rank, action)).seconds
                for action in actions
                if isinstance(action, _HOLDING_COLLECTIVES)
            )
        return self._reductions_s

    def observe(self, table: FloatArray) -> CostDrift | None:
        """Add a step; return the drift when it has lasted long enough, and then start anew.

        table: (ranks, num_values), the same on all ranks, as is the result.
        """
        recorded, predicted = table[:, ::2], table[:, 1::2]
        ratios = np.divide(recorded, predicted, out=np.full_like(recorded, np.nan), where=predicted > 0)
        least_waiting = np.argmin(recorded[:, -1])
        ratios[:, -1] = ratios[least_waiting, -1]
        recorded = recorded.copy()
        recorded[:, -1] = recorded[least_waiting, -1]
        ratios[recorded <= 0] = np.nan
        self._ratios[self._num_steps % DRIFT_STEPS] = _median(ratios)
        self._recorded[self._num_steps % DRIFT_STEPS] = recorded.sum(axis=0)
        self._num_steps += 1
        if self._num_steps < MEDIAN_STEPS:
            return None
        recent = (self._num_steps + _LAST_STEPS) % DRIFT_STEPS
        is_drifted = self._is_drifted(_median(self._ratios[recent])).any()
        self._num_drifted = self._num_drifted + 1 if is_drifted else 0
        if self._num_drifted < self._needed_steps:
            return None
        drift = self._drift(_median(self._ratios), self._num_drifted)
        self._needed_steps *= REPEAT_FACTOR
        self.restart()
        return drift

    def ratios(self) -> RecordedRatios | None:
        """Return recorded over predicted seconds, as the median of the last steps; None before there are enough."""
        return None if self._num_steps < MEDIAN_STEPS else self._recorded_ratios(_median(self._ratios))

    def _is_drifted(self, ratios: FloatArray) -> npt.NDArray[np.bool_]:
        recorded = self._recorded.sum(axis=0)
        is_much = recorded >= MIN_DRIFT_SHARE * recorded.sum()
        is_off = np.maximum(ratios, 1 / ratios) > MIN_DRIFT  # False for kinds without a ratio
        return np.asarray(is_much & is_off)

    def _drift(self, ratios: FloatArray, num_steps: int) -> CostDrift:
        names = [f"{unit} {_DIRECTION_NAMES[letter]}" for unit, letter in self._compute_kinds] + [REDUCTIONS]
        drifted = tuple(f"{names[i]} {ratios[i]:.2g}x" for i in np.flatnonzero(self._is_drifted(ratios)))
        return CostDrift(self._recorded_ratios(ratios), drifted, num_steps)

    def _recorded_ratios(self, ratios: FloatArray) -> RecordedRatios:
        known = {kind: float(ratio) for kind, ratio in zip(self._compute_kinds, ratios, strict=False) if ratio > 0}
        return RecordedRatios(
            forward={unit: known[unit, "F"] for unit in self._units if (unit, "F") in known},
            backward={unit: known[unit, "B"] for unit in self._units if (unit, "B") in known},
            reductions=float(ratios[-1]) if ratios[-1] > 0 else None,
        )


def _median(values: FloatArray) -> FloatArray:
    """Return medians over axis 0 of the values that are not NaN; NaN where there is none."""
    # As `np.nanmedian`, which takes ten times as long: NaN sorts last.
    ordered = np.sort(values, axis=0)
    counts = np.isfinite(ordered).sum(axis=0)
    columns = np.arange(ordered.shape[1])
    lower = ordered[np.maximum(counts - 1, 0) // 2, columns]
    upper = ordered[np.minimum(counts // 2, len(ordered) - 1), columns]
    return np.asarray(np.where(counts % 2 == 1, lower, (lower + upper) / 2))
