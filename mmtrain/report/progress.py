"""What a user watches while training: a live display on a terminal, one plain line a step elsewhere."""

import math
import time
from collections.abc import Callable
from typing import Protocol, Self

from rich.console import Console

from mmtrain.report.metrics_record import StepMetrics, compact

SHORT_NAMES = {"compute": "compute", "wait": "wait", "communication": "comm", "data": "data"}


class Progress(Protocol):
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
) -> Progress:
    """The display that suits `console`, for steps [first_step, num_steps] of a run called `title`.

    `clock` gives seconds; the time left is estimated from the steps that this process has seen.
    """
    pace = Pace(num_steps, first_step, clock)
    if not console.is_terminal or console.is_dumb_terminal:
        return LineProgress(console, pace)
    from mmtrain.report.live_display import LiveProgress

    return LiveProgress(console, title, pace)


class Pace:
    """Time passed, and time left at the mean pace so far."""

    def __init__(self, num_steps: int, first_step: int, clock: Callable[[], float]) -> None:
        self.num_steps = num_steps
        self._done_before = first_step - 1
        self._clock = clock
        self._started = clock()
        self._last: tuple[int, float] | None = None  # step and when it was done

    def done(self, step: int) -> None:
        """Step `step` is done now."""
        self._last = (step, self._clock())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step is done; None before the first."""
        if self._last is None:
            return None
        step, at = self._last
        pace = (at - self._started) / (step - self._done_before)
        return max(0.0, (self.num_steps - step) * pace - (self._clock() - at))


class LineProgress:
    """One line a step, for logs and pipes."""

    def __init__(self, console: Console, pace: Pace) -> None:
        self._console = console
        self._pace = pace

    def step(self, metrics: StepMetrics) -> None:
        """Print the step's line."""
        self._pace.done(metrics.step)
        self.note(step_line(metrics, self._pace.num_steps, self._pace.left_s))

    def note(self, text: str) -> None:
        """Print `text` as it is: no wrapping at a width that a log does not have, no markup read into file names."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def step_line(metrics: StepMetrics, num_steps: int, left_s: float | None) -> str:
    """A step in one line.

    `step  120/400  loss 1.2345  lr 3.0e-04  gnorm 0.81  tok/s 12.3k  mfu 3.1%  left 1:38  | compute 71% ...`
    """
    validation = held_out_text(metrics.val_loss, metrics.val_exact)
    return (
        f"step {metrics.step:>{len(str(num_steps)) + 1}}/{num_steps}  loss {metrics.loss:.4f}{validation}  "
        f"lr {metrics.lr:.1e}  gnorm {metrics.grad_norm:.2f}  tok/s {compact(metrics.tokens_per_s)}  "
        f"mfu {metrics.mfu:.1%}  left {clock_text(left_s)}  | {shares_text(metrics)}"
    )


def held_out_text(val_loss: float | None, val_exact: float | None) -> str:
    """What was measured on held-out data: `  val 1.2345  exact 40.0%`."""
    loss = "" if val_loss is None else f"  val {val_loss:.4f}"
    return loss if val_exact is None else f"{loss}  exact {val_exact:.1%}"


def shares_text(metrics: StepMetrics) -> str:
    """Where the step's time went: `compute 71% wait 20% comm 5% data 4%`."""
    return " ".join(f"{SHORT_NAMES[name]} {share:.0%}" for name, share in metrics.time_s.shares().items())


def clock_text(seconds: float | None) -> str:
    """Hours, minutes and seconds; `-:--` when unknown.

    >>> clock_text(98.4), clock_text(7325)
    ('1:38', '2:02:05')
    """
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
