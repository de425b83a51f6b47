"""Notice what spoils a run: another run's claim, gradients that are not finite, bad samples, a lost course."""

import json
from collections.abc import Sequence
from typing import cast

from mmtrain.checkpoint import SUSPECT_SINCE
from mmtrain.data import BadSampleTracker, DataIndex, Quarantined, write_quarantine
from mmtrain.durable_files import append_line
from mmtrain.errors import RunError
from mmtrain.runtime.resilience.divergence import RECOVERY_STEPS, CourseMonitor
from mmtrain.runtime.run_folder import QUARANTINE_FILE, SKIPPED_STEPS_FILE
from mmtrain.runtime.run_owner import FolderClaim
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook
from mmtrain.runtime.world import World

COURSE_STATE = "course"  # key of the state of checkpoints


class FolderGuard(StepHook):
    """Ends the run on all ranks in the same step, before anything else writes."""

    def __init__(self, claim: FolderClaim) -> None:
        self._claim = claim

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. Raises FolderTaken."""
        if ctx.reduction.lost_folder:
            self._claim.require()


class NonFiniteGuard(StepHook):
    """Names the samples of a step whose gradient was not finite; gives up after `max_nonfinite_steps` in a row.

    The optimizer has changed no weight in such a step, on any rank.
    """

    def __init__(self, index: DataIndex, records: RunRecords, max_nonfinite_steps: int) -> None:
        self._index, self._records, self._max_nonfinite_steps = index, records, max_nonfinite_steps
        self._num_bad_steps = 0  # in a row

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. Raises RunError after too many bad steps."""
        if ctx.outcome.stepped:
            self._num_bad_steps = 0
            return
        self._num_bad_steps += 1
        grad_norm = ctx.outcome.grad_norm
        self._records.note(
            f"step {ctx.step_number}: the gradient norm is {grad_norm}; no weight was changed, "
            f"samples in {SKIPPED_STEPS_FILE}"
        )
        if self._records.is_first:
            samples = [self._index.samples[number].id for number in ctx.data.meta.sample_id]
            entry = {"step": ctx.step_number, "grad_norm": str(grad_norm), "samples": samples}
            path = self._records.run_dir / SKIPPED_STEPS_FILE
            self._records.try_write(SKIPPED_STEPS_FILE, lambda: append_line(path, json.dumps(entry)))
        if self._num_bad_steps >= self._max_nonfinite_steps:
            raise RunError(
                f"step {ctx.step_number}: the gradient norm was not finite in {self._max_nonfinite_steps} steps in a "
                f"row (train.max_nonfinite_steps); the weights are those before them. {SKIPPED_STEPS_FILE} in "
                f"{self._records.run_dir} names their samples; look at those, at the learning rate and at "
                "train.precision. `--resume-from last-good --skip-steps "
                f"{ctx.step_number - self._max_nonfinite_steps + 1}-{ctx.step_number}` continues without them"
            )


class QuarantineRecorder(StepHook):
    """Appends to the quarantine what any rank could not decode.

    A sample is recorded once: several ranks may hold images of it, and other ranks in another epoch. `bad_samples`
    counts on the first rank only.
    """

    def __init__(self, world: World, bad_samples: BadSampleTracker, records: RunRecords) -> None:
        self._world, self._bad_samples, self._records = world, bad_samples, records

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. Raises TooManyBadSamples above `data.max_bad_rate`."""
        if not ctx.reduction.num_broken_samples:
            return
        gathered = cast(list[tuple[Quarantined, ...]], self._world.all_gather(ctx.data.quarantined))
        num_new = self._world.on_first(lambda: self._record(gathered))
        if num_new:
            self._records.note(f"step {ctx.step_number}: {num_new} samples could not be decoded, see {QUARANTINE_FILE}")

    def _record(self, gathered: Sequence[tuple[Quarantined, ...]]) -> int:
        new = self._bad_samples.record_new([entry for entries in gathered for entry in entries])
        path = self._records.run_dir / QUARANTINE_FILE
        self._records.try_write(QUARANTINE_FILE, lambda: write_quarantine(path, new, append=True))
        return len(new)


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
