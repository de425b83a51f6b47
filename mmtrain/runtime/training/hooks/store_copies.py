"""Copy checkpoints to an object store beside the training, in a process of its own (`train.checkpoint.remote`).

What is still to be copied is read from the disk and the store. So a run that was killed goes on with it, and what could
not be copied is tried again: after the next checkpoint, or after a while.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mmtrain.recipe.settings.train_settings import CheckpointSettings
from mmtrain.runtime.execution.activity import COPYING, Activity
from mmtrain.runtime.training.background_call import BackgroundCall, CallOutcome, finish_background
from mmtrain.runtime.training.hooks.checkpoints import CheckpointWriter
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook
from mmtrain.runtime.training.stored_runs import copy_run
from mmtrain.runtime.world import World

RETRY_S = 120.0  # after a failure, if no checkpoint comes before
WAIT_SLICE_S = 1.0  # after which the ranks that wait for the last copy show that they are alive
COPY_NICENESS = 5  # a third of a rank's share of a full processor: it mostly waits for the network


class RemoteCopies:
    """The copies of a run's checkpoints in its store, and the process that makes the next ones; for rank 0."""

    def __init__(
        self, settings: CheckpointSettings, records: RunRecords, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._records, self._clock = settings, records, clock
        self._is_due = True  # whether anything may have been saved that was not copied
        self._retry_s: float | None = None  # when to try again by the clock
        self._call: BackgroundCall | None = None

    def look_again(self) -> None:
        """Take note that something was saved."""
        self._is_due = True

    def advance(self) -> bool:
        """Take in what has been copied, and start to copy; return whether all is done, or has failed for now."""
        if self._call is not None:
            outcome = self._call.poll()
            if outcome is None:
                return False
            self.close()
            self._take(outcome)
        if self._is_due or (self._retry_s is not None and self._clock() >= self._retry_s):
            self._is_due, self._retry_s = False, None
            url = str(self._settings.remote)
            self._call = BackgroundCall(partial(copy_run, self._records.run_dir, url, self._settings), COPY_NICENESS)
        return self._call is None

    def wait(self) -> bool:
        """Wait a while for what is being copied; return whether all is done, or has failed."""
        if self.advance():
            return True
        assert self._call is not None
        self._call.wait(WAIT_SLICE_S)
        return False

    def close(self) -> None:
        """End what is being copied."""
        if self._call is not None:
            self._call.close()
            self._call = None

    def _take(self, outcome: CallOutcome) -> None:
        if outcome.reason is None:
            for line in outcome.value:
                self._records.note(line)
            return
        self._retry_s = self._clock() + RETRY_S
        self._records.note(
            f"checkpoints were not copied to {self._settings.remote}: {outcome.reason}. They stay in "
            f"{self._records.run_dir}, and are copied later: after the next one is saved, after {RETRY_S:g} s, or by "
            "--resume"
        )


class CopyToStore(StepHook):
    """Has checkpoints copied, and waits for the copies when the run ends or stops: its machine may vanish then."""

    def __init__(
        self, copies: RemoteCopies, writer: CheckpointWriter, patient_world: World, activity: Activity
    ) -> None:
        self._copies, self._writer = copies, writer
        self._world, self._activity = patient_world, activity
        self._newest: Path | None = None  # of the checkpoints that this hook has heard of

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        if self._writer.newest != self._newest:
            self._newest = self._writer.newest
            self._copies.look_again()
        if ctx.is_last or ctx.reduction.stop_requested:
            self._copies.look_again()  # Hugging Face folders may have come since
            finish_copies(self._copies, self._world, self._activity)
        elif self._world.is_first:
            self._copies.advance()

    def close(self) -> None:
        """See `StepHook`."""
        self._copies.close()


def finish_copies(copies: RemoteCopies, patient_world: World, activity: Activity) -> None:
    """Wait until everything is copied, or could not be. All ranks call this together."""
    finish_background(copies.wait, COPYING, patient_world, activity)
