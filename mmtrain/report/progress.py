"""Progress of a training run: a live display on a terminal, one plain line per step elsewhere."""

import time
from collections.abc import Callable
from typing import Protocol, Self

from rich.console import Console

from mmtrain.report.metrics_record import StepMetrics
from mmtrain.report.step_text import ProgressClock, step_line


class TrainingProgress(Protocol):
    """A context manager that shows finished steps and notes."""

    def step(self, metrics: StepMetrics) -> None:
        """Show a finished step."""
        ...

    def note(self, text: str) -> None:
        """Show a sentence that stays, such as that a checkpoint was saved."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


def open_progress(
    console: Console,
    title: str,
    num_steps: int,
    first_step: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> TrainingProgress:
    """Return the display that suits `console`, for steps [first_step, num_steps] of a run called `title`.

    `clock` gives seconds; the remaining time is estimated from the steps that this process has finished.
    """
    progress_clock = ProgressClock(num_steps, first_step, clock)
    # FORCE_COLOR, which CI systems set, makes a terminal of every file; frames would fill a log with cursor movements.
    if not console.file.isatty() or not console.is_terminal or console.is_dumb_terminal:
        return LineProgress(console, progress_clock)
    from mmtrain.report.live_display import LiveProgress

    return LiveProgress(console, title, progress_clock)


class LineProgress:
    """One line per step, for logs and pipes."""

    def __init__(self, console: Console, clock: ProgressClock) -> None:
        self._console = console
        self._clock = clock

    def step(self, metrics: StepMetrics) -> None:
        """Print the step's line."""
        self._clock.finish_step(metrics.step)
        self.note(step_line(metrics, self._clock.num_steps, self._clock.remaining_s))

    def note(self, text: str) -> None:
        """Print `text` unchanged: a log has no width to wrap at, and file names may look like markup."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None
