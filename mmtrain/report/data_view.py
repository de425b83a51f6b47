"""Sample lengths and grouping methods for people: histograms and tables as text, and histograms as a figure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mmtrain.balance.grouping.summary import (
    CompositionShare,
    GroupingScore,
    IsfScore,
    LengthDistribution,
    LengthSummary,
    LongSamples,
    SourceSummary,
)
from mmtrain.errors import UserError, writing
from mmtrain.report.plain_text import render_text

_LEVELS = " ▁▂▃▄▅▆▇█"  # of a bar of one character, empty only where nothing is
_BAR_COLUMNS = 50  # characters of the fullest bin
_BAR_COLOR = "#1f5a8c"
_BACKGROUND = "#ffffff"
_GRAY = "#5c6670"


def stats_text(summary: LengthSummary, quarantined: Mapping[str, int]) -> str:
    """Write a histogram for each measure, their correlation, and the number of quarantined samples by reason."""
    parts: list[RenderableType] = []
    for spread in summary.spreads:
        parts.append(Text(f"\n{_headline(spread, summary.samples)}"))
        parts += [Text(line) for line in _bars(spread)] if _varies(spread) else []
    varying = [index for index, row in enumerate(summary.correlation) if row[index] is not None]
    if len(varying) > 1:
        parts += [Text(""), _correlation(summary, varying)]
    parts.append(Text(f"\n{summary.samples} samples, {_quarantined_text(quarantined)}"))
    return render_text(*parts).strip("\n")


def long_samples_text(long_samples: Sequence[LongSamples]) -> str:
    """Write how many samples only several ranks can hold, by the number of ranks that share the longest."""
    table = Table(title="Samples longer than a rank's part of data.seq_len (parallel.llm.cp)", title_justify="left")
    for column in ("cp", "a rank's part", "longer samples", "their tokens"):
        table.add_column(column, justify="right")
    for entry in long_samples:
        table.add_row(str(entry.ranks), f"{entry.most_tokens:,}", f"{entry.samples:.2%}", f"{entry.tokens:.2%}")
    return render_text(table).strip("\n")


def composition_text(shares: Sequence[CompositionShare]) -> str:
    """Write how the composition of samples varies: a row and a line of bars for each unit and for text."""
    table = Table(title="Composition of samples: shares of their LLM tokens", title_justify="left")
    table.add_column("")
    for column in ("of all tokens", "mean", "deviation", "5%", "median", "95%", "samples without", "samples by share"):
        table.add_column(column, justify="left" if column == "samples by share" else "right")
    for share in shares:
        largest = max(share.counts)
        bars = "".join(_LEVELS[-(-count * (len(_LEVELS) - 1) // largest)] for count in share.counts)
        numbers = (share.of_all_tokens, share.mean, share.deviation, share.p5, share.median, share.p95, share.without)
        table.add_row(share.unit, *(f"{number:.1%}" for number in numbers), bars)
    note = "samples by share: from 0% on the left to 100% on the right, in steps of 5%; the fullest bin is the highest."
    return render_text(table, note).strip("\n")


def sources_text(sources: Sequence[SourceSummary], num_steps: int) -> str:
    """Write a row for each source: what it holds, its share of the tokens that steps use, and passes over it."""
    table = Table(title=f"Sources in training, {num_steps:,} steps", title_justify="left")
    table.add_column("source")
    first_steps = list(sources[0].token_shares)
    shares = [f"share from step {step:,}" if len(first_steps) > 1 else "share of tokens" for step in first_steps]
    for column in ("samples", "LLM tokens", *shares, "passes"):
        table.add_column(column, justify="right")
    for source in sources:
        of_steps = (f"{share:.2%}" for share in source.token_shares.values())
        table.add_row(source.name, f"{source.samples:,}", _number(source.tokens), *of_steps, f"{source.passes:.2f}")
    return render_text(table).strip("\n")


def grouping_text(
    scores: Sequence[GroupingScore], chosen: str, num_replicas: int, sample_name: Callable[[int], str]
) -> str:
    """Write a row for each grouping method, with the recipe's `chosen` one marked, and the imbalance that remains.

    `sample_name` writes the name of a sample number.
    """
    units = list(scores[0].dist_ratio)
    table = Table(title=f"One epoch with {num_replicas} replicas side by side", title_justify="left")
    table.add_column("method")
    dist_columns = [f"dist {unit}" for unit in units]
    for column in ("groups", "mean batch", "fill", "pad", *dist_columns, "max/mean", "seconds"):
        table.add_column(column, justify="right")
    for score in scores:
        table.add_row(
            f"{score.method} *" if score.method == chosen else score.method,
            str(score.groups),
            f"{score.mean_batch:.2f}",
            f"{score.fill:.3f}",
            "-" if score.pad_ratio is None else f"{score.pad_ratio:.3f}",
            *(f"{score.dist_ratio[unit]:.4f}" for unit in units),
            f"{score.max_over_mean:.4f}",
            f"{score.seconds:.2f}",
        )
    notes = (
        "* the recipe's method. mean batch: samples per group; fill: LLM tokens as a share of data.seq_len; pad: share "
        "of tokens that padding a mini-batch would waste (packed groups have no padding); dist: share of a step for "
        "which a unit's replicas wait for the most loaded one, if the unit has its own ranks; max/mean: largest over "
        "mean load, counting the tokens of all units."
    )
    bounds = [bound for score in scores if score.method == chosen for bound in _bound_sentences(score, sample_name)]
    return render_text(table, notes, *bounds).strip("\n")


def isf_text(rounds: Sequence[IsfScore], thresholds: Sequence[IsfScore], num_replicas: int) -> str:
    """Write ISF's grouping of an epoch after each of its rounds, and with other thresholds of a full group."""
    units = list(rounds[0].score.dist_ratio)
    figures = ("groups", "fill", "pad", *(f"dist {unit}" for unit in units), "seconds")
    title = f"ISF with {num_replicas} replicas side by side, after each round"
    by_round = Table(title=title, title_justify="left")
    for column in ("rounds", *figures):
        by_round.add_column(column, justify="right")
    for entry in rounds:
        by_round.add_row(str(entry.rounds), *_isf_cells(entry.score))
    by_threshold = Table(title="ISF, by what a full group may lack", title_justify="left")
    for column in ("of the LLM's budget", "of an encoder's", *figures):
        by_threshold.add_column(column, justify="right")
    for entry in thresholds:
        by_threshold.add_row(f"{entry.slack:.2%}", f"{entry.encoder_slack:.2%}", *_isf_cells(entry.score))
    notes = (
        "pad: share of tokens that padding the groups would waste (packed groups have no padding); dist: share of a "
        "step for which a unit's replicas wait for the most loaded one. Thresholds are those of OmniBal's table 6; in "
        "the last row an encoder may lack one item of mean size."
    )
    return render_text(by_round, "", by_threshold, notes).strip("\n")


def _isf_cells(score: GroupingScore) -> tuple[str, ...]:
    waiting = (f"{ratio:.4f}" for ratio in score.dist_ratio.values())
    return str(score.groups), f"{score.fill:.3f}", f"{score.pad_ratio:.3f}", *waiting, f"{score.seconds:.2f}"


def _bound_sentences(score: GroupingScore, sample_name: Callable[[int], str]) -> Iterator[str]:
    """Write for each unit by how much single large samples limit the balance."""
    for unit, bound in score.bounds.items():
        if bound.sample is not None:
            yield (
                f"load imbalance of {unit}: in {bound.steps:.0%} of steps a single sample exceeds the mean load of a "
                f"replica (the largest is {sample_name(bound.sample)}), so dist cannot be below "
                f"{bound.dist_ratio:.4f}; raise train.global_batch or shorten such samples"
            )


def stats_picture(summary: LengthSummary, path: Path) -> None:
    """Save a histogram for each measure as PNG.

    Raises UserError without matplotlib, or if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "--png needs the `matplotlib` package, which is not installed here: pip install 'mmtrain[report]'"
        ) from None
    varying = [spread for spread in summary.spreads if _varies(spread)]
    figure = Figure(figsize=(9.0, 0.6 + 2.4 * max(len(varying), 1)), facecolor=_BACKGROUND, layout="constrained")
    for row, spread in enumerate(varying, 1):
        axes = figure.add_subplot(len(varying), 1, row)
        axes.stairs(spread.counts, spread.edges, fill=True, color=_BAR_COLOR)
        if _has_geometric_bins(spread):
            axes.set_xscale("log")
        axes.set_ylim(0, 1.15 * max(spread.counts))
        axes.axvline(spread.mean, color=_GRAY, linewidth=1)
        axes.annotate(
            f"mean {_number(spread.mean)}",
            (spread.mean, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -10),
            textcoords="offset points",
            color=_GRAY,
            fontsize=8,
        )
        axes.set_title(_headline(spread, summary.samples), fontsize=8, loc="left")
        axes.set_ylabel("samples", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    with writing("--png", path, "figure"):
        figure.savefig(path, format="png", dpi=130)


def _headline(spread: LengthDistribution, samples: int) -> str:
    if not spread.samples:
        return f"{spread.name}: none"
    if not _varies(spread):
        return f"{spread.name}: {_number(spread.mean)} in each of {spread.samples} samples"
    share = "" if spread.samples == samples else f" in {spread.samples} of {samples} samples"
    return (
        f"{spread.name}{share}: {_number(spread.total)} in total, mean {_number(spread.mean)}, median "
        f"{_number(spread.median)}, 95% below {_number(spread.p95)}, largest {_number(spread.largest)}"
    )


def _bars(spread: LengthDistribution) -> list[str]:
    largest = max(spread.counts, default=0)
    rows = []
    for count, lo, hi in zip(spread.counts, spread.edges, spread.edges[1:], strict=False):
        length = count / largest * _BAR_COLUMNS
        bar = "█" * int(length) + ("▌" if length % 1 >= 0.5 else "")
        if count and not bar:
            bar = "▏"
        rows.append(f"{_number(lo):>8} - {_number(hi):<8} {bar} {count}")
    return rows


def _correlation(summary: LengthSummary, shown: Sequence[int]) -> Table:
    table = Table(title="Correlation over samples", title_justify="left")
    table.add_column("")
    for i in shown:
        table.add_column(summary.spreads[i].name, justify="right")
    for i in shown:
        coefficients = (summary.correlation[i][j] for j in shown)
        table.add_row(summary.spreads[i].name, *("-" if c is None else f"{c:+.2f}" for c in coefficients))
    return table


def _quarantined_text(quarantined: Mapping[str, int]) -> str:
    if not quarantined:
        return "none quarantined"
    ranking = sorted(quarantined.items(), key=lambda item: (-item[1], item[0]))
    reasons = ", ".join(f"{reason} {count}" for reason, count in ranking)
    return f"{sum(quarantined.values())} others quarantined: {reasons}"


def _varies(spread: LengthDistribution) -> bool:
    """Tell whether there is more than one value, and so something to draw."""
    return len(spread.counts) > 1


def _has_geometric_bins(spread: LengthDistribution) -> bool:
    """Tell whether bins grow geometrically; a logarithmic axis then shows them with equal widths."""
    first_width = spread.edges[1] - spread.edges[0]
    last_width = spread.edges[-1] - spread.edges[-2]
    return last_width > 2 * first_width


def _number(value: float) -> str:
    """Write a number with at most four significant digits: 0.25, 3, 12.5, 840, 12.3k, 4.1M."""
    for threshold, factor, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= threshold:
            return f"{value / factor:.4g}{suffix}"
    return f"{value:.4g}"
