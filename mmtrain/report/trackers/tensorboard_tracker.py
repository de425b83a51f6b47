"""TensorBoard events in the run's folder."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmtrain.durable_files import write_whole
from mmtrain.report.trackers.tracker import RunEnd, ShownAnswer, TrackedRun

TENSORBOARD_FOLDER = "tensorboard"
_HELD_FILE = "last_step.json"  # which step is certainly in the events
_SECONDS_BETWEEN_FLUSHES = 5.0


class TensorBoardTracker:
    """Writes events. A later file says from which step on those of earlier files are void.

    A kill loses the events that were not flushed; `last_step.json` says how far they reach, so that they are written
    again.
    """

    def __init__(self) -> None:
        self._writer: Any = None
        self._folder = Path()
        self._last_step = 0
        self._flushed_s = 0.0

    def start(self, run: TrackedRun) -> int:
        """See `Tracker`."""
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import, and imports torch

        self._folder = run.run_dir / TENSORBOARD_FOLDER
        held = min(self._held_step(), run.first_step - 1)
        # With a first file, too: TensorBoard takes the first mark of a folder for its beginning, and voids nothing.
        self._writer = SummaryWriter(str(self._folder), purge_step=held + 1)
        if held == 0:
            for name, text in (("recipe", run.recipe), ("plan", run.plan_text), ("plan.json", run.plan)):
                self._writer.add_text(name, _as_code(text), 0)
            self._writer.add_text("config", _as_table(("setting", "value"), list(run.config.items())), 0)
            self._writer.add_text("git", _as_table(("git", "value"), list(run.git.items())), 0)
        self._last_step = held
        return held

    def log_step(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._last_step = step

    def log_answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        """See `Tracker`."""
        rows = [(a.question, a.expected, a.answered, "yes" if a.is_right else "no") for a in answers]
        self._writer.add_text("answers", _as_table(("question", "expected", "answered", "right"), rows), step)
        for number, answer in enumerate(answers, 1):
            for picture in answer.pictures:
                self._writer.add_image(f"answers/{number}", _pixels(picture), step, dataformats="HWC")

    def flush(self) -> None:
        """See `Tracker`."""
        if time.monotonic() - self._flushed_s >= _SECONDS_BETWEEN_FLUSHES:
            self._flush()

    def finish(self, end: RunEnd, summary: Mapping[str, str | float]) -> None:
        """See `Tracker`."""
        if summary:
            table = _as_table(("summary", "value"), list(summary.items()))
            self._writer.add_text("summary", table, self._last_step)
        self._flush()
        self._writer.close()

    def abandon(self) -> None:
        """See `Tracker`. The writer's thread is left to end by itself: after a full disk, closing raises again."""
        self._writer = None

    def _flush(self) -> None:
        self._writer.flush()
        write_whole(self._folder / _HELD_FILE, json.dumps({"step": self._last_step}) + "\n")
        self._flushed_s = time.monotonic()

    def _held_step(self) -> int:
        try:
            held = json.loads((self._folder / _HELD_FILE).read_bytes())["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        return held if type(held) is int else 0


def _as_code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _as_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of Markdown; line ends and bars would break its rows."""
    lines = [header, ["---"] * len(header), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _pixels(picture: Path) -> Any:
    import numpy as np
    from PIL import Image

    with Image.open(picture) as image:
        return np.asarray(image.convert("RGB"))
