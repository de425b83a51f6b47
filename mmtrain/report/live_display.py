"""Progress of a training run: a live display on a terminal, one plain line per step elsewhere."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Protocol, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mmtrain.report.metrics_record import StepMetrics, compact_number
from mmtrain.report.step_text import (
    TIME_LABELS,
    ProgressClock,
    clock_text,
    held_out_text,
    router_losses_text,
    step_line,
)

_TIME_COLORS = {"compute": "green", "wait": "yellow", "communication": "cyan", "data": "magenta"}


class LiveProgress:
    """A panel of five lines that is redrawn in place; notes scroll above it."""

    def __init__(self, console: Console, title: str, clock: ProgressClock) -> None:
        self._console = console
        self._title = title
        self._clock = clock
        self._losses: list[float] = []
        self._last: StepMetrics | None = None
        self._val_loss: float | None = None
        self._val_exact: float | None = None
        # Redraw between steps too: a display that does not change for a minute looks like a hang.
        self._live = Live(self, console=console, refresh_per_second=4)

    def step(self, metrics: StepMetrics) -> None:
        """Show the step at the next redraw."""
        self._clock.finish_step(metrics.step)
        self._losses.append(metrics.loss)
        self._val_loss = self._val_loss if metrics.val_loss is None else metrics.val_loss
        self._val_exact = self._val_exact if metrics.val_exact is None else metrics.val_exact
        self._last = metrics

    def note(self, text: str) -> None:
        """Print `text` above the panel."""
        self._console.print(text, markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the panel."""
        width = min(options.max_width, 120)
        inner = width - 4  # without border and padding
        last = self._last
        done = 0 if last is None else last.step
        lines: list[RenderableType] = [_bar(self._clock, done)]
        if last is None:
            lines.append(Text("waiting for the first step", style="dim"))
        else:
            lines += [
                _loss(self._losses, self._beside_loss(last), inner, options.ascii_only),
                _figures(last),
                _time(last, inner, options.ascii_only),
            ]
        title = Text.assemble((self._title, "bold"), "  step ", f"{done}/{self._clock.num_steps}")
        yield Panel(Group(*lines), title=title, title_align="left", width=width, border_style="blue")

    def _beside_loss(self, last: StepMetrics) -> str:
        return held_out_text(self._val_loss, self._val_exact) + router_losses_text(last.experts)


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """Write finite values as a line of at most `width` blocks, each the mean of a run of values.

    >>> sparkline([4, 3, 2, 1], 4)
    '█▆▃▁'
    """
    levels = "_.-=+*#@" if ascii_only else "▁▂▃▄▅▆▇█"
    finite = [value for value in values if math.isfinite(value)]
    num_blocks = min(width, len(finite))
    if num_blocks == 0:
        return ""
    edges = [index * len(finite) // num_blocks for index in range(num_blocks + 1)]
    means = [sum(finite[lo:hi]) / (hi - lo) for lo, hi in pairwise(edges)]
    lowest = min(means)
    spread = max(means) - lowest
    if spread <= 0:
        return levels[0] * num_blocks
    return "".join(levels[round((mean - lowest) / spread * 7)] for mean in means)


def _bar(clock: ProgressClock, done: int) -> Table:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    times = (
        f"{done / clock.num_steps:4.0%}  {clock_text(clock.elapsed_s)} elapsed, {clock_text(clock.remaining_s)} left"
    )
    row.add_row(
        ProgressBar(total=clock.num_steps, completed=done, complete_style="blue", finished_style="green"), times
    )
    return row


def _loss(losses: Sequence[float], others: str, width: int, ascii_only: bool) -> Text:
    """Draw the curve of the loss between its last value and other losses."""
    label = f"loss {losses[-1]:.4f}  "
    curve = sparkline(losses, max(8, width - len(label) - len(others)), ascii_only)
    return Text.assemble((label, "bold"), (curve, "blue"), others, no_wrap=True)


def _figures(last: StepMetrics) -> Text:
    figures = [
        f"lr {last.lr:.1e}",
        f"grad norm {last.grad_norm:.2f}",
        f"{compact_number(last.tokens_per_s)} tok/s",
        f"{compact_number(last.samples_per_s)} samples/s",
        f"MFU {last.mfu:.1%}",
        f"{last.peak_memory_bytes / 2**30:.1f} GiB",
    ]
    return Text("  ".join(figures), no_wrap=True, overflow="ellipsis")


def _time(last: StepMetrics, width: int, ascii_only: bool) -> Text:
    """Draw the parts of one step's time as a bar, with a legend in the same colors."""
    shares = last.time_s.shares()
    legend = [(f"  {TIME_LABELS[name]} {share:.0%}", _TIME_COLORS[name]) for name, share in shares.items()]
    length = max(8, width - len("time ") - sum(len(text) for text, _ in legend))
    edges = [round(edge * length) for edge in accumulate(shares.values(), initial=0.0)]
    symbols = "=#~-" if ascii_only else "█▓▒░"
    blocks = [symbol * (hi - lo) for symbol, (lo, hi) in zip(symbols, pairwise(edges), strict=True)]
    bar = list(zip(blocks, _TIME_COLORS.values(), strict=True))
    return Text.assemble("time ", *bar, *legend, no_wrap=True, overflow="ellipsis")


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
