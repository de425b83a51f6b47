"""What a user watches while training: a live display on a terminal, one plain line a step elsewhere."""

import time
from collections.abc import Callable
from typing import Protocol, Self

from rich.console import Console

from mmtrain.report.metrics_record import StepMetrics
from mmtrain.report.progress_clock import ProgressClock
from mmtrain.report.step_text import step_line


class TrainingProgress(Protocol):
    """A context manager that is told of each step."""

    def step(self, metrics: StepMetrics) -> None:
        """Show a finished step."""
        ...

    def note(self, text: str) -> None:
        """Show a sentence, such as that a checkpoint was saved, and leave it there."""
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
    """The display that suits `console`, for steps [first_step, num_steps] of a run called `title`.

    `clock` gives seconds; the time left is estimated from the steps that this process has seen.
    """
    pace = ProgressClock(num_steps, first_step, clock)
    if not console.is_terminal or console.is_dumb_terminal:
        return LineProgress(console, pace)
    from mmtrain.report.live_display import LiveProgress

    return LiveProgress(console, title, pace)


class LineProgress:
    """One line a step, for logs and pipes."""

    def __init__(self, console: Console, pace: ProgressClock) -> None:
        self._console = console
        self._pace = pace

    def step(self, metrics: StepMetrics) -> None:
        """Print the step's line."""
        self._pace.finish_step(metrics.step)
        self.note(step_line(metrics, self._pace.num_steps, self._pace.remaining_s))

    def note(self, text: str) -> None:
        """Print `text` as it is: no wrapping at a width that a log does not have, no markup read into file names."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None
