"""Lengths and groupings for reading: histograms and tables in the terminal, and the same as a picture."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mmtrain.balance.summary import GroupingScore, LengthDistribution, LengthSummary
from mmtrain.errors import UserError, writing
from mmtrain.report.plain_text import render_text

_BAR_COLUMNS = 50  # characters of the fullest bin
_INK, _GROUND, _GREY = "#1f5a8c", "#ffffff", "#5c6670"


def stats_text(summary: LengthSummary, quarantined: Mapping[str, int]) -> str:
    """A histogram for each measure, their correlation, and how many samples were set aside, by kind."""
    parts: list[RenderableType] = []
    for spread in summary.spreads:
        parts.append(Text(f"\n{_headline(spread, summary.samples)}"))
        parts += [Text(line) for line in _bars(spread)] if _varies(spread) else []
    present = [spread.samples > 0 for spread in summary.spreads]
    if sum(present) > 1:
        parts += [Text(""), _correlation(summary, present)]
    parts.append(Text(f"\n{summary.samples} samples, {_set_aside(quarantined)}"))
    return render_text(*parts).strip("\n")


def grouping_text(scores: Sequence[GroupingScore], chosen: str, num_replicas: int, name: Callable[[int], str]) -> str:
    """A row for each method of grouping; `chosen` is the recipe's. `name` names a sample by its number."""
    table = Table(title=f"One epoch, {num_replicas} replicas side by side", title_justify="left")
    table.add_column("method")
    units = list(scores[0].dist_ratio)
    waits = [f"dist {unit}" for unit in units]
    for column in ("groups", "mean batch", "fill", "pad", *waits, "max/mean", "seconds"):
        table.add_column(column, justify="right")
    for row in scores:
        padding = "-" if row.pad_ratio is None else f"{row.pad_ratio:.3f}"
        table.add_row(
            f"{row.method} *" if row.method == chosen else row.method,
            str(row.groups),
            f"{row.mean_batch:.2f}",
            f"{row.fill:.3f}",
            padding,
            *(f"{row.dist_ratio[unit]:.4f}" for unit in units),
            f"{row.max_over_mean:.4f}",
            f"{row.seconds:.2f}",
        )
    notes = (
        "* what the recipe trains with. fill: LLM tokens over data.seq_len; pad: what padding the mini-batches would "
        "waste (groups are packed, none is padded); dist: share of a step that replicas of a unit wait for the most "
        "loaded one, each unit on ranks of its own; max/mean: of the tokens of all units together."
    )
    reached = [
        f"bound reached, {unit}: in {found.steps:.0%} of steps one sample alone exceeds the mean load, most of all "
        f"{name(found.sample)}; no rearrangement gets dist below {found.dist_ratio:.4f}, only splitting it would"
        for row in scores
        if row.method == chosen
        for unit, found in row.bounds.items()
        if found.sample is not None
    ]
    return render_text(table, notes, *reached).strip("\n")


def stats_picture(summary: LengthSummary, path: Path) -> None:
    """Draw a histogram for each measure as PNG. Raises UserError without matplotlib, or where it cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "--png needs the `matplotlib` package, which is not installed here: pip install 'mmtrain[report]'"
        ) from None
    spreads = [spread for spread in summary.spreads if _varies(spread)]
    figure = Figure(figsize=(9.0, 0.6 + 2.4 * max(len(spreads), 1)), facecolor=_GROUND, layout="constrained")
    for place, spread in enumerate(spreads, 1):
        axes = figure.add_subplot(len(spreads), 1, place)
        axes.stairs(spread.counts, spread.edges, fill=True, color=_INK)
        if _geometric(spread):
            axes.set_xscale("log")
        axes.set_ylim(0, 1.15 * max(spread.counts))
        axes.axvline(spread.mean, color=_GREY, linewidth=1)
        axes.annotate(
            f"mean {_short(spread.mean)}",
            (spread.mean, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -10),
            textcoords="offset points",
            color=_GREY,
            fontsize=8,
        )
        axes.set_title(_headline(spread, summary.samples), fontsize=8, loc="left")
        axes.set_ylabel("samples", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    with writing("--png", path, "picture"):
        figure.savefig(path, format="png", dpi=130)


def _headline(spread: LengthDistribution, samples: int) -> str:
    if not spread.samples:
        return f"{spread.name}: none"
    if not _varies(spread):
        return f"{spread.name}: {_short(spread.mean)} in each of {spread.samples} samples"
    share = "" if spread.samples == samples else f" in {spread.samples} of {samples} samples"
    return (
        f"{spread.name}{share}: {_short(spread.total)} in all, mean {_short(spread.mean)}, median "
        f"{_short(spread.median)}, 95% below {_short(spread.p95)}, largest {_short(spread.largest)}"
    )


def _bars(spread: LengthDistribution) -> list[str]:
    most = max(spread.counts, default=0)
    rows = []
    for count, lo, hi in zip(spread.counts, spread.edges, spread.edges[1:], strict=False):
        length = count / most * _BAR_COLUMNS
        bar = "█" * int(length) + ("▌" if length % 1 >= 0.5 else "") or ("▏" if count else "")
        rows.append(f"{_short(lo):>8} - {_short(hi):<8} {bar} {count}")
    return rows


def _correlation(summary: LengthSummary, present: Sequence[bool]) -> Table:
    table = Table(title="Correlation over samples", title_justify="left")
    table.add_column("")
    shown = [i for i, there in enumerate(present) if there]
    for i in shown:
        table.add_column(summary.spreads[i].name, justify="right")
    for i in shown:
        found = (summary.correlation[i][j] for j in shown)
        table.add_row(summary.spreads[i].name, *("-" if c is None else f"{c:+.2f}" for c in found))
    return table


def _set_aside(quarantined: Mapping[str, int]) -> str:
    if not quarantined:
        return "none set aside"
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(quarantined.items(), key=lambda kv: (-kv[1], kv[0])))
    return f"{sum(quarantined.values())} set aside besides: {kinds}"


def _varies(spread: LengthDistribution) -> bool:
    """Whether there is more than one value, and so something to draw."""
    return len(spread.counts) > 1


def _geometric(spread: LengthDistribution) -> bool:
    """Whether the bins grow; then an axis that does too shows them alike."""
    first, last = spread.edges[1] - spread.edges[0], spread.edges[-1] - spread.edges[-2]
    return last > 2 * first


def _short(value: float) -> str:
    """At most four digits that count: 0.25, 3, 12.5, 840, 12.3k, 4.1M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"
