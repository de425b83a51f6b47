"""Trackio: a database in the run's folder, or in `TRACKIO_DIR`, or a Space that its variables name."""

import contextlib
import os
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmtrain.report.trackers.tracker import RunEnd, ShownAnswer, TrackedRun

TRACKIO_FOLDER = "trackio"
_DATABASE_TIMEOUT_S = 30.0


class TrackioTracker:
    """Shows a run in Trackio under the run's name and id.

    The database is local, so the rows of steps that a resumed run repeats are deleted. A Space cannot take rows back: a
    step that it holds is not sent again.
    """

    def __init__(self) -> None:
        self._run: Any = None
        self._trackio: Any = None
        self._answers: dict[str, Any] = {}  # of the step that is logged next: a step has one row

    def start(self, run: TrackedRun) -> int:
        """See `Tracker`."""
        import trackio

        if "TRACKIO_DIR" not in os.environ:
            _use_folder((run.run_dir / TRACKIO_FOLDER).absolute())
        for module in (trackio, trackio.run, trackio.utils):
            module.print = _print_nothing  # Trackio has no setting for it, and its lines would break the run's progress
        self._trackio = trackio
        project = os.environ.get("TRACKIO_PROJECT", "mmtrain")
        name = f"{run.name}-{run.run_id[:8]}"
        held = _last_step(trackio, project, name, run.first_step - 1)
        facts = {f"git/{key}": value for key, value in run.git.items()}
        self._run = trackio.init(
            project=project,
            name=name,
            config={**run.config, **facts, "recipe": run.recipe, "plan": run.plan_text, "plan.json": run.plan},
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return held

    def log_step(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({**self._answers, **scalars}, step=step)
        self._answers = {}

    def log_answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        """See `Tracker`."""
        rows = []
        for answer in answers:
            pictures = [self._trackio.Image(str(path)) for path in answer.pictures]
            right = "yes" if answer.is_right else "no"
            rows.append([answer.question, pictures, answer.expected, answer.answered, right])
        columns = ["question", "pictures", "expected", "answered", "right"]
        self._answers = {"answers": self._trackio.Table(columns=columns, data=rows)}

    def flush(self) -> None:
        """See `Tracker`. Trackio's own thread writes twice a second."""

    def finish(self, end: RunEnd, summary: Mapping[str, str | float]) -> None:
        """See `Tracker`."""
        if summary:
            text = "\n".join(f"{name}: {value}" for name, value in summary.items())
            self._run.log({"summary": self._trackio.Markdown(text)}, step=0)
        self._run.finish()

    def abandon(self) -> None:
        """See `Tracker`."""
        self._run = None


def _use_folder(folder: Path) -> None:
    """Let Trackio write into a folder. It reads its variable when it is imported, and a process may train two runs."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trackio":
            for constant, path in (("TRACKIO_DIR", folder), ("MEDIA_DIR", folder / "media")):
                if hasattr(module, constant):
                    setattr(module, constant, path)


def _print_nothing(*_: object, **__: object) -> None:
    """Take the place of `print` in the modules of Trackio."""


def _last_step(trackio: Any, project: str, name: str, last_step: int) -> int:
    """Delete the rows of a run after `last_step`; return the last step that remains, 0 if there is none."""
    path = trackio.sqlite_storage.SQLiteStorage.get_project_db_path(project)
    if not path.is_file():
        return 0
    with contextlib.closing(sqlite3.connect(path, timeout=_DATABASE_TIMEOUT_S)) as database, database:
        database.execute("DELETE FROM metrics WHERE run_name = ? AND step > ?", (name, last_step))
        [held] = database.execute("SELECT MAX(step) FROM metrics WHERE run_name = ?", (name,)).fetchone()
    return int(held or 0)
