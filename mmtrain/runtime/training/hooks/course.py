"""Watch the course of training, so that checkpoints from after it was lost do not replace those from before."""

from mmtrain.checkpoint import SUSPECT_SINCE
from mmtrain.runtime.resilience.divergence import RECOVERY_STEPS, CourseMonitor
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook

COURSE_STATE = "course"  # key of the state of checkpoints


class CourseWatch(StepHook):
    """Notes where a stretch of unusual steps starts and ends, and rates the checkpoints in between as suspect."""

    def __init__(self, monitor: CourseMonitor, records: RunRecords) -> None:
        self._monitor, self._records = monitor, records

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        change = self._monitor.observe(ctx.step_number, ctx.reduction.loss, ctx.outcome.grad_norm or 0.0)
        if change is None:
            return
        if change.reason is None:
            self._records.note(f"step {change.step}: loss and gradient norm are as before again")
            return
        self._records.note(
            f"step {change.step}: {change.reason}; the newest checkpoint from before is kept until {RECOVERY_STEPS} "
            "steps in a row are as usual (`--resume-from last-good` goes back to it)"
        )

    def state(self) -> dict[str, object]:
        """Return the rating of a checkpoint that is saved now, and what later ratings depend on."""
        return {SUSPECT_SINCE: self._monitor.suspect_since, COURSE_STATE: self._monitor.to_state()}
