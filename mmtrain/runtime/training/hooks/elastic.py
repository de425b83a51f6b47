"""Make plans ahead for a run that may lose ranks, and measure how long it did not train when it did."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from mmtrain.planning.artifact.plan import Plan
from mmtrain.runtime.training.background_planning import BackgroundPlanning, PlanningOutcome
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.standby_plans import save_standby_plan
from mmtrain.runtime.training.step_hook import StepContext, StepHook

STEPS_BEFORE_STANDBY_PLANNING = 2  # the first steps are slow by themselves, and everything else starts in them


class StandbyPlanning(StepHook):
    """Makes one plan after another beside the training and keeps it in the run's folder; on rank 0 only.

    If no plan fits some number of ranks, it prints the reason at once: after a loss that would come too late.
    """

    def __init__(
        self,
        rank_counts: Sequence[int],
        planner_for: Callable[[int], Callable[[], Plan]],
        records: RunRecords,
    ) -> None:
        self._waiting = deque(rank_counts)
        self._planner_for, self._records = planner_for, records
        self._num_steps = 0
        self._num_ranks = 0  # that the plan is for which is being made
        self._planning: BackgroundPlanning | None = None

    def close(self) -> None:
        """See `StepHook`."""
        if self._planning is not None:
            self._planning.close()

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        self._num_steps += 1
        if self._num_steps < STEPS_BEFORE_STANDBY_PLANNING or ctx.is_last:
            return
        if self._planning is not None:
            outcome = self._planning.poll()
            if outcome is None:
                return
            self._planning.close()
            self._planning = None
            self._keep(outcome)
        if self._waiting:
            self._num_ranks = self._waiting.popleft()
            self._planning = BackgroundPlanning(self._planner_for(self._num_ranks))

    def _keep(self, outcome: PlanningOutcome) -> None:
        plan, run_dir = outcome.plan, self._records.run_dir
        ranks = f"{self._num_ranks} rank{'s' * (self._num_ranks > 1)}"
        if plan is None:
            self._records.note(f"this run could not go on with {ranks}: {outcome.reason}")
            return
        self._records.try_write(f"the plan for {ranks}", lambda: save_standby_plan(run_dir, plan))
        self._records.note(
            f"a plan for {ranks} is ready (predicted {plan.predicted.step_time_s:.3f} s a step; made in "
            f"{outcome.seconds:.1f} s)"
        )


class ResumeTime(StepHook):
    """Tells and logs how long the run did not train, once the first step after that is done."""

    def __init__(
        self, last_step_s: float | None, records: RunRecords, time_of_day_s: Callable[[], float] = time.time
    ) -> None:
        self._last_step_s, self._records, self._time_of_day_s = last_step_s, records, time_of_day_s

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        if self._last_step_s is None:
            return
        # The file system's clock, which dated the last step, may be ahead of this node's.
        seconds = max(self._time_of_day_s() - self._last_step_s, 0.0)
        self._last_step_s = None
        ctx.metrics = replace(ctx.metrics, resume_s=seconds)
        self._records.note(f"step {ctx.step_number} ended {seconds:.1f} s after the last step before the restart")
