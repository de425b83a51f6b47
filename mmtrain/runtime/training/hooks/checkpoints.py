"""Save checkpoints when they are due and when the run is asked to stop."""

from pathlib import Path

from mmtrain.errors import CheckpointError, RunError
from mmtrain.recipe.settings.train_settings import CheckpointSettings
from mmtrain.runtime.execution.activity import SAVING, Activity
from mmtrain.runtime.execution.checkpointing import BackgroundSaver
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook


class CheckpointWriter:
    """Saves checkpoints, and decides whether the run goes on after a save that failed."""

    def __init__(
        self, saver: BackgroundSaver, settings: CheckpointSettings, records: RunRecords, activity: Activity
    ) -> None:
        self.saver = saver
        self._settings, self._records, self._activity = settings, records, activity
        self._num_failures = 0  # in a row
        self.newest: Path | None = None  # of the checkpoints saved here

    def save(self, next_step: int, must: bool) -> Path | None:
        """Save in the background; wait for the result if the settings ask for it. Return a checkpoint that is complete.

        Wait also if nothing may come before (`must`), and then raise what went wrong.
        """
        self._activity.start(SAVING)
        if self.saver.pending:
            self.finish(must=False)
        waits = must or not self._settings.async_save
        self.saver.start(next_step, copy=not waits)
        return self.finish(must) if waits else None

    def finish(self, must: bool) -> Path | None:
        """Wait for the save that is pending. One that failed is reported and passed over, up to a limit.

        Raises CheckpointError for a failed save with `must`, and RunError when too many failed in a row.
        """
        limit = self._settings.max_failures
        try:
            folder = self.saver.finish()
        except CheckpointError as error:  # the same on every rank, and no draft is left
            self._num_failures += 1
            self._records.note(f"not saved ({self._num_failures} of {limit} in a row): {error}")
            if must:
                raise
            if self._num_failures >= limit:
                raise RunError(
                    f"{limit} checkpoints in a row could not be saved (train.checkpoint.max_failures); "
                    f"the last: {error}"
                ) from error
            return None
        self._num_failures = 0
        self.newest = folder
        self._records.note(f"saved {folder}")
        self._records.write_state("running", self.saver.step)
        return folder


class FinishBackgroundSave(StepHook):
    """Completes a background save in the first step after which no rank is still writing."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        if self._writer.saver.pending and ctx.reduction.no_rank_saves:
            self._writer.finish(must=False)


class Checkpointing(StepHook):
    """Saves a checkpoint when it is due, after the best and the last step, and when a signal asked to stop."""

    def __init__(self, writer: CheckpointWriter, records: RunRecords, settings: CheckpointSettings) -> None:
        self._writer, self._records = writer, records
        self._intervals = (settings.every, settings.hf_every)

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        if not self.is_due(ctx):
            return
        stops = ctx.reduction.stop_requested
        ctx.checkpoint = self._writer.save(ctx.step_number, must=stops or ctx.is_last)
        if stops and not ctx.is_last:
            self._records.write_state("stopped", ctx.step_number)

    def is_due(self, ctx: StepContext) -> bool:
        """Return whether a checkpoint is saved after this step."""
        return ctx.reduction.stop_requested or ctx.is_best or any(map(ctx.is_due, self._intervals))
