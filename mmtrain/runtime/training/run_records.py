"""Records of a run that must not end it: notes for the user, and files whose loss costs less than the run."""

from collections.abc import Callable
from pathlib import Path

from mmtrain.report import TrainingProgress
from mmtrain.runtime.run_folder import RUN_STATE_FILE, RunStatus, write_run_state


class RunRecords:
    """Writes notes and files of a run; `is_first` says whether this rank writes those that exist once a run."""

    def __init__(self, run_dir: Path, progress: TrainingProgress, is_first: bool) -> None:
        self.run_dir, self.is_first = run_dir, is_first
        self.progress = progress

    def note(self, text: str) -> None:
        """Show the user a sentence that stays."""
        self.progress.note(text)

    def try_write(self, what: str, write: Callable[[], None]) -> None:
        """Call `write`; report a full disk or a lost mount as a note, and go on."""
        try:
            write()
        except OSError as error:
            self.note(f"{what} could not be written: {error}")

    def write_state(self, status: RunStatus, step: int, ended_early: str | None = None) -> None:
        """Write the run's state: `step` is the last one that a resumed run would not repeat."""
        if self.is_first:
            self.try_write(RUN_STATE_FILE, lambda: write_run_state(self.run_dir, status, step, ended_early=ended_early))
