"""Write checkpoints as Hugging Face folders beside the training, in a process of its own (`train.checkpoint.hf_every`).

root/hf/step-00000100/          what `mmtrain export` makes of the checkpoint of that name; appears by rename
root/hf/.step-00000200.*.draft/ what a crash left; the next start removes it

Which checkpoints are still to be written is read from the disk: those that are due and newer than the newest folder. So
a run that was killed goes on with them, and a checkpoint stays until its folder is complete.
"""

import shutil
from functools import partial
from pathlib import Path

from mmtrain.checkpoint import find
from mmtrain.checkpoint.folders import age, step_of
from mmtrain.checkpoint.verify_files import best_step_of
from mmtrain.recipe.settings.train_settings import CheckpointSettings, ExportedPart
from mmtrain.runtime.execution.activity import EXPORTING, Activity
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, HUGGING_FACE_FOLDER
from mmtrain.runtime.training.background_call import CALL_NICENESS, BackgroundCall, CallOutcome, finish_background
from mmtrain.runtime.training.export_checkpoint import export_checkpoint
from mmtrain.runtime.training.go_back import new_abandoned_folder, set_aside_newer_folders
from mmtrain.runtime.training.hooks.checkpoints import CheckpointWriter
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook
from mmtrain.runtime.world import World
from mmtrain.weights.write_tensors import DRAFT_SUFFIX

WAIT_SLICE_S = 1.0  # after which the ranks that wait for the last folder show that they are alive


class HuggingFaceFolders:
    """The Hugging Face folders of a run, and the process that writes the next one; for rank 0."""

    def __init__(self, settings: CheckpointSettings, records: RunRecords) -> None:
        self._settings, self._records = settings, records
        self._root = records.run_dir / HUGGING_FACE_FOLDER
        self._checkpoints = records.run_dir / CHECKPOINTS_FOLDER
        self._last_step: int | None = None  # of the run, whose checkpoint is due too
        self._niceness = CALL_NICENESS  # of the process that writes
        self._may_owe = True  # whether anything may be due since the last look at the disk
        self._failed: set[str] = set()  # names of checkpoints that could not be written
        self._writing: tuple[Path, BackgroundCall] | None = None

    def open(self, first_step: int) -> None:
        """Remove what a crash left, and set aside folders of later steps than the one that the run resumes after.

        Those are of checkpoints that were damaged; the run comes to their steps again. Raises OSError.
        """
        self._remove_drafts()
        run_dir = self._records.run_dir
        aside = new_abandoned_folder(run_dir, first_step) / HUGGING_FACE_FOLDER
        for folder in set_aside_newer_folders(run_dir, first_step, aside):
            self._records.note(f"{folder.name} in {self._root} is of a checkpoint that is gone: now in {aside}")

    def is_owed(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint is due and its folder is not complete; asked by the thread that saves, too."""
        step, newest = step_of(checkpoint), next(iter(find(self._root)), None)
        is_due = step is not None and (step % self._settings.hf_every == 0 or step == self._last_step)
        return is_due and checkpoint.name not in self._failed and (newest is None or _is_newer(checkpoint, newest))

    def look_again(self, last_step: int | None) -> None:
        """Take note that a checkpoint was saved; `last_step`: that of the run, once it has ended."""
        self._may_owe, self._last_step = True, last_step

    def advance(self) -> bool:
        """Take in what has been written, and start the next; return whether all is done. A failure becomes a note."""
        if self._writing is not None:
            checkpoint, call = self._writing
            outcome = call.poll()
            if outcome is None:
                if self._may_owe and self._niceness and len(self._owed()) > 1:
                    self._hurry(checkpoint)
                return False
            self.close()
            self._take(checkpoint, outcome)
        if self._may_owe:
            owed = self._owed()
            self._may_owe = len(owed) > 1
            if owed:
                self._start(owed[-1])
        return self._writing is None

    def wait(self) -> bool:
        """Wait a while for what is being written; return whether all is done."""
        if self.advance():
            return True
        assert self._writing is not None
        self._writing[1].wait(WAIT_SLICE_S)
        return False

    def close(self) -> None:
        """End what is being written."""
        if self._writing is not None:
            self._writing[1].close()
            self._writing = None

    def _owed(self) -> list[Path]:
        return [folder for folder in find(self._checkpoints) if self.is_owed(folder)]

    def _hurry(self, checkpoint: Path) -> None:
        """Start anew, with a rank's share of the processor, what is not ready when the next is due.

        A niced process gets next to nothing where ranks and workers use all cores, and no process can raise its own
        share. So a folder is late at most by the time that it takes with a rank's share.
        """
        self.close()
        self._remove_drafts()
        self._niceness = 0
        self._records.note(
            f"{self._root / checkpoint.name} was not ready when the next checkpoint was due: from now on, writing "
            "these folders takes as much of the processors as a rank does, which may slow steps; a larger "
            "train.checkpoint.hf_every leaves more time"
        )
        self._start(checkpoint)

    def _remove_drafts(self) -> None:
        for draft in self._root.glob(f".*{DRAFT_SUFFIX}"):
            shutil.rmtree(draft)

    def _start(self, checkpoint: Path) -> None:
        """Start to write the oldest checkpoint that is due."""
        self._root.mkdir(exist_ok=True)
        step, out = step_of(checkpoint), self._root / checkpoint.name
        assert step is not None, "a checkpoint has a step"
        call = partial(write_hugging_face_folder, self._records.run_dir, step, out, self._settings.hf_part)
        self._writing = checkpoint, BackgroundCall(call, self._niceness)

    def _take(self, checkpoint: Path, outcome: CallOutcome) -> None:
        if outcome.reason is not None:
            self._failed.add(checkpoint.name)
            part = "" if self._settings.hf_part == "model" else f" --{self._settings.hf_part}"
            self._records.note(
                f"{self._root / checkpoint.name} was not written: {outcome.reason}. While its checkpoint is kept, "
                f"`mmtrain export {self._records.run_dir} --checkpoint {step_of(checkpoint)}{part} --out DIR` writes it"
            )
            return
        self._records.note(f"wrote {self._root / checkpoint.name} in {outcome.seconds:.1f} s")
        self._records.try_write(f"{self._root}: a smaller number of folders", self.retire)

    def retire(self) -> None:
        """Remove all but the newest folders, and that of the best step. Raises OSError."""
        if self._settings.hf_keep is None:
            return
        newest_checkpoint = next(iter(find(self._checkpoints)), None)
        best_step = None if newest_checkpoint is None else best_step_of(newest_checkpoint)
        for folder in find(self._root)[self._settings.hf_keep :]:
            if step_of(folder) != best_step:
                # Rename first: a folder that a crash left half removed would look complete.
                draft = folder.with_name(f".{folder.name}.removed{DRAFT_SUFFIX}")
                folder.rename(draft)
                shutil.rmtree(draft)


class HuggingFaceExport(StepHook):
    """Has due checkpoints written as Hugging Face folders, and waits for them after the last step; on all ranks."""

    def __init__(
        self, folders: HuggingFaceFolders, writer: CheckpointWriter, patient_world: World, activity: Activity
    ) -> None:
        self._folders, self._writer = folders, writer
        self._world, self._activity = patient_world, activity
        self._newest: Path | None = None  # of the checkpoints that this hook has heard of

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. A run that stops leaves the rest to the one that resumes it."""
        if self._writer.newest != self._newest:
            self._newest = self._writer.newest
            self._folders.look_again(ctx.step_number if ctx.is_last else None)
        if ctx.is_last and not ctx.reduction.stop_requested:
            finish_folders(self._folders, self._world, self._activity)
        elif self._world.is_first:
            self._folders.advance()

    def close(self) -> None:
        """See `StepHook`."""
        self._folders.close()


def finish_folders(folders: HuggingFaceFolders, patient_world: World, activity: Activity) -> None:
    """Wait until everything due is written. All ranks call this together."""
    finish_background(folders.wait, EXPORTING, patient_world, activity)


def write_hugging_face_folder(run: Path, step: int, out: Path, part: ExportedPart) -> None:
    """Write part of the newest good checkpoint of a step; called in the process that writes."""
    export_checkpoint(run, step, out, part=part)


def _is_newer(folder: Path, other: Path) -> bool:
    ages = age(folder), age(other)
    return ages[0] is not None and ages[1] is not None and ages[0] > ages[1]
