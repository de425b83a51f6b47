"""A report as plain text, with a step drawn in letters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from mmtrain.report.comparison import COMPUTE_TID, comparison_cells, comparison_head
from mmtrain.report.expert_loads import ExpertLoads
from mmtrain.report.live_display import sparkline
from mmtrain.report.logged_totals import PHASE_HEAD, PHASE_TITLE, SOURCE_HEAD, phase_rows, sum_sources
from mmtrain.report.plain_text import DEFAULT_WIDTH, exact_time_text, memory_text, render_text, time_spread_text
from mmtrain.report.plan_view import plan_table
from mmtrain.report.recorded_spread import recorded_spread
from mmtrain.report.report_contents import (
    ReportContents,
    drawn_steps,
    idle_shares,
    key_figures,
    rank_changes,
    run_costs,
)
from mmtrain.report.report_tables import MIN_FULL_BAR_SHARE, balance_rows, critical_path_cells, figure_text, memory_rows
from mmtrain.report.stage_spread import STAGE_SPREAD_HEAD, STAGE_SPREAD_NOTE, STAGE_SPREAD_TITLE, stage_spreads
from mmtrain.report.timeline_picture import DrawnStep

_LABEL_COLUMNS = 9  # `rank 123 `
_CURVE_COLUMNS = 60
_COLUMNS_WITHOUT_BARS = 70  # of a table that ends in bars; the bars get the other columns


def report_text(contents: ReportContents, width: int = DEFAULT_WIDTH) -> str:
    """Write the whole report as text `width` columns wide."""
    bar = partial(_bar, max_columns=max(width - _COLUMNS_WITHOUT_BARS, 0))
    parts: list[RenderableType] = [_key_figures(contents)]
    parts += [f"Cost, {what}: {cost.to_text()}" for what, cost in run_costs(contents).items()]
    parts += _timelines(contents, width)
    path = critical_path_cells(contents)
    if path:
        largest = max(share for _, share in path)
        rows = [[*cells, bar(share / largest)] for cells, share in path]
        parts.append(_table("Critical path of the simulated step", ("work", "time", "share"), rows, last_left=True))
    parts += [_idle_time(contents, bar), _memory(contents, bar)]
    if phases := phase_rows(contents.plan, contents.metrics):
        parts.append(_table(PHASE_TITLE, PHASE_HEAD, phases))
    if contents.comparison:
        is_measured = contents.trace is not None
        title = "Time per step, predicted and measured" if is_measured else "Predicted time per step"
        rows = [comparison_cells(row, is_measured) for row in contents.comparison]
        parts.append(_table(title, ("stage", *comparison_head(is_measured)), rows))
    if spreads := stage_spreads(contents.trace, contents.simulated):
        cells = [spread.cells() for spread in spreads]
        parts += [_table(STAGE_SPREAD_TITLE, STAGE_SPREAD_HEAD, cells), STAGE_SPREAD_NOTE]
    if spread := recorded_spread(contents.trace, contents.simulated, contents.plan):
        parts.append(f"Recorded {time_spread_text(spread.ranks, spread.layers)}.")
    if loads := ExpertLoads.of_logged(contents.metrics):
        parts += loads.sentences()
    if contents.grouping_scores:
        head, rows, note = balance_rows(contents.grouping_scores, contents.grouping_method)
        parts += [_table("Load balance by grouping method", head, rows), note]
    parts += _training(contents.metrics)
    spaced: list[RenderableType] = []
    for part in parts:
        spaced += ["", part]
    return plan_table(contents.plan, width) + render_text(*spaced, width=width)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], last_left: bool = False) -> Table:
    """Write a table; `last_left` adds a left-aligned last column without a heading, for bars and notes."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(head):
        table.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
    if last_left:
        table.add_column("", justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _key_figures(contents: ReportContents) -> Table:
    is_measured = contents.metrics is not None
    rows = []
    for figure in key_figures(contents):
        cells = [figure.what, figure_text(figure, measured=False)]
        if is_measured:
            cells.append(figure_text(figure, measured=True))
        rows.append([*cells, figure.meaning])
    head = ("figure", "predicted", "measured") if is_measured else ("figure", "predicted")
    return _table(contents.name, head, rows, last_left=True)


def _timelines(contents: ReportContents, width: int) -> Iterator[str]:
    steps, ranks = drawn_steps(contents)
    if not steps:
        return
    longest_us = max(step.length_us for step in steps)
    for step in steps:
        lines = [
            f"{step.name}: {exact_time_text(step.length_us / 1e6)}",
            *timeline_letters(step, ranks, longest_us, width),
        ]
        yield "\n".join(lines)
    units = ", ".join(f"{unit[0].upper()} {unit}" for unit in contents.plan.units)
    world_size = contents.plan.world_size
    shown = "" if len(ranks) == world_size else f"; {len(ranks)} of {world_size} ranks are shown"
    yield f"{units}; capital letters: forward, small letters: backward, dots: idle{shown}"


def timeline_letters(
    step: DrawnStep, ranks: Sequence[int], length_us: float, columns: int = DEFAULT_WIDTH
) -> Iterator[str]:
    """Write a line for each rank: each column shows the letter of what the rank computed longest there, or a dot."""
    columns -= _LABEL_COLUMNS
    column_us = max(length_us, 1e-9) / columns
    shares: dict[int, list[dict[str, float]]] = {rank: [{} for _ in range(columns)] for rank in ranks}
    for event in step.events:
        if event["ph"] != "X" or event["tid"] != COMPUTE_TID or event["pid"] not in shares:
            continue
        start = (event["ts"] - step.start_us) / column_us
        end = start + event["dur"] / column_us
        if not 0 <= start < columns:
            continue
        initial = event["args"]["unit"][0]
        letter = initial.upper() if event["name"].startswith("F") else initial.lower()
        for column in range(int(start), min(int(end) + 1, columns)):
            share = min(end, column + 1) - max(start, column)
            cell = shares[event["pid"]][column]
            cell[letter] = cell.get(letter, 0.0) + share
    num_columns = min(columns, round(step.length_us / column_us))
    for rank in ranks:
        letters = "".join(_longest(cell) for cell in shares[rank][:num_columns])
        yield f"{f'rank {rank}':<{_LABEL_COLUMNS}}{letters}"


def _longest(shares: Mapping[str, float]) -> str:
    """Return the letter with the largest share of a column; a dot if the rank is idle for most of it."""
    if sum(shares.values()) < 0.5:
        return "."
    return max(shares, key=lambda letter: shares[letter])


def _idle_time(contents: ReportContents, bar: Callable[[float], str]) -> Table:
    predicted, measured = idle_shares(contents)
    columns = [predicted] if measured is None else [predicted, measured]
    largest = max(*(share for shares in columns for share in shares.values()), MIN_FULL_BAR_SHARE)
    rows = [
        [
            kind,
            *(f"{shares[kind]:.1%}" if kind in shares else "-" for shares in columns),
            bar(columns[-1].get(kind, 0.0) / largest),
        ]
        for kind in predicted
    ]
    rows.append(["all", *(f"{sum(shares.values()):.1%}" for shares in columns), ""])
    head = ("kind", "predicted") if measured is None else ("kind", "predicted", "measured")
    return _table("Idle time as a share of the step", head, rows, last_left=True)


def _memory(contents: ReportContents, bar: Callable[[float], str]) -> Table:
    limit_gib = contents.memory_limit_gib
    memory = memory_rows(contents)
    full_gib = max([limit_gib, *(row.gib for row in memory)])
    rows = [(row.what, memory_text(row.gib), row.largest_part, bar(row.gib / full_gib)) for row in memory]
    title = f"Peak memory, limit {limit_gib:.4g} GiB"
    return _table(title, ("ranks", "peak", "largest part"), rows, last_left=True)


def _bar(share: float, max_columns: int) -> str:
    columns = round(share * max_columns)
    if columns:
        return "█" * columns
    return "▏" if share > 0 and max_columns else ""


def _training(metrics: Sequence[Mapping[str, Any]] | None) -> Iterator[RenderableType]:
    if metrics is None:
        return
    if not metrics:
        yield "No step was logged."
        return
    for key, title in (("loss", "Loss"), ("val_loss", "Held-out loss"), ("tokens_per_s", "LLM tokens/s")):
        values = [step[key] for step in metrics if step.get(key) is not None]
        if values:
            change = f"{values[0]:.5g} to {values[-1]:.5g} over {metrics[-1]['step']} steps"
            yield f"{title:<14}{change}  {sparkline(values, _CURVE_COLUMNS)}"
    yield from (f"{'Ranks':<14}{sentence}" for sentence in rank_changes(metrics))
    if sources := sum_sources(metrics):
        yield _table("Sources of the samples", SOURCE_HEAD, [source.cells() for source in sources])
