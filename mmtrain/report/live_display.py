"""The live display of a training run on a terminal."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mmtrain.report.metrics_record import StepMetrics, compact_number
from mmtrain.report.progress_clock import ProgressClock, clock_text
from mmtrain.report.step_text import TIME_LABELS, held_out_text

_TIME_COLORS = {"compute": "green", "wait": "yellow", "communication": "cyan", "data": "magenta"}


class LiveProgress:
    """A panel of five lines that is redrawn in place; notes scroll away above it."""

    def __init__(self, console: Console, title: str, pace: ProgressClock) -> None:
        self._console = console
        self._title = title
        self._pace = pace
        self._losses: list[float] = []
        self._last: StepMetrics | None = None
        self._val_loss: float | None = None
        self._val_exact: float | None = None
        # The clock goes on between steps: a display that stands still for a minute looks like a hang.
        self._live = Live(self, console=console, refresh_per_second=4)

    def step(self, metrics: StepMetrics) -> None:
        """Take the step into the next redraw."""
        self._pace.finish_step(metrics.step)
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
        """The panel as of now."""
        width = min(options.max_width, 120)
        last, inner = self._last, width - 4
        done = 0 if last is None else last.step
        lines: list[RenderableType] = [_bar(self._pace, done)]
        if last is None:
            lines.append(Text("waiting for the first step", style="dim"))
        else:
            lines += [
                _loss(self._losses, held_out_text(self._val_loss, self._val_exact), inner, options.ascii_only),
                _figures(last),
                _time(last, inner, options.ascii_only),
            ]
        title = Text.assemble((self._title, "bold"), "  step ", f"{done}/{self._pace.num_steps}")
        yield Panel(Group(*lines), title=title, title_align="left", width=width, border_style="blue")


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """Values as a line of at most `width` blocks, each the mean of its share of them; what is not finite is left out.

    >>> sparkline([4, 3, 2, 1], 4)
    '█▆▃▁'
    """
    levels = "_.-=+*#@" if ascii_only else "▁▂▃▄▅▆▇█"
    finite = [value for value in values if math.isfinite(value)]
    num = min(width, len(finite))
    cuts = [index * len(finite) // num for index in range(num + 1)] if num else []
    means = [sum(finite[lo:hi]) / (hi - lo) for lo, hi in pairwise(cuts)]
    low, spread = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(levels[round((mean - low) / spread * 7) if spread > 0 else 0] for mean in means)


def _bar(pace: ProgressClock, done: int) -> Table:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    times = f"{done / pace.num_steps:4.0%}  {clock_text(pace.elapsed_s)} passed, {clock_text(pace.remaining_s)} left"
    row.add_row(ProgressBar(total=pace.num_steps, completed=done, complete_style="blue", finished_style="green"), times)
    return row


def _loss(losses: Sequence[float], held_out: str, width: int, ascii_only: bool) -> Text:
    label = f"loss {losses[-1]:.4f}  "
    curve = sparkline(losses, max(8, width - len(label) - len(held_out)), ascii_only)
    return Text.assemble((label, "bold"), (curve, "blue"), held_out, no_wrap=True)


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
    """A bar of one step's time and its legend in the same colours."""
    shares = last.time_s.shares()
    legend = [(f"  {TIME_LABELS[name]} {share:.0%}", _TIME_COLORS[name]) for name, share in shares.items()]
    length = max(8, width - len("time ") - sum(len(text) for text, _ in legend))
    edges = [round(edge * length) for edge in accumulate(shares.values(), initial=0.0)]
    blocks = [(("=#~-" if ascii_only else "█▓▒░")[index]) * (hi - lo) for index, (lo, hi) in enumerate(pairwise(edges))]
    bar = [(block, colour) for block, colour in zip(blocks, _TIME_COLORS.values(), strict=True)]
    return Text.assemble("time ", *bar, *legend, no_wrap=True, overflow="ellipsis")
