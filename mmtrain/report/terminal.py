"""A report in a terminal: the same numbers as on the page, and a step drawn in letters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from mmtrain.report.live_display import sparkline
from mmtrain.report.plain_text import DEFAULT_WIDTH, memory_text, render_text
from mmtrain.report.plan_view import plan_table
from mmtrain.report.report_contents import ReportContents, drawn_steps, idle_shares, key_figures
from mmtrain.report.report_tables import balance_rows, figure_text, memory_rows, path_cells, row_cells
from mmtrain.report.timeline_picture import DrawnStep

_LABEL_COLUMNS, _CURVE_COLUMNS = 9, 60
_TEXT_COLUMNS = 70  # columns of a table that are kept for what stands beside its bars


def report_text(contents: ReportContents, width: int = DEFAULT_WIDTH) -> str:
    """The whole report as text `width` columns wide."""
    bar = partial(_bar, most=max(width - _TEXT_COLUMNS, 0))
    parts: list[RenderableType] = [_figures(contents), *_timelines(contents, width)]
    if path := path_cells(contents):
        full = max(share for _, share in path)
        waits = [(*cells, bar(share / full)) for cells, share in path]
        parts.append(_left_last(_table("Critical path of the simulated step", ("work", "seconds", "share", ""), waits)))
    parts += [_idle(contents, bar), _memory(contents, bar)]
    if contents.comparison:
        measured = contents.trace is not None
        head = ("", "predicted", *(("measured", "error") if measured else ()))
        parts.append(_table("Seconds a step", head, [row_cells(row, measured) for row in contents.comparison]))
    if contents.grouping_scores:
        names, rows, note = balance_rows(contents.grouping_scores, contents.grouping_method)
        parts += [_table("Balance of the data", names, rows), note]
    parts += _training(contents.metrics)
    spaced = [part for each in parts for part in ("", each)]
    return plan_table(contents.plan, width) + render_text(*spaced, width=width)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(head):
        table.add_column(column, justify="right" if place else "left", no_wrap=not place)
    for row in rows:
        table.add_row(*row)
    return table


def _figures(contents: ReportContents) -> Table:
    measured = contents.metrics is not None
    rows = [
        (f.what, figure_text(f, False), *((figure_text(f, True),) if measured else ()), f.meaning)
        for f in key_figures(contents)
    ]
    head = ("", "predicted", *(("measured",) if measured else ()), "")
    return _left_last(_table(contents.name, head, rows))


def _timelines(contents: ReportContents, width: int) -> Iterator[str]:
    drawn, ranks = drawn_steps(contents)
    if not drawn:
        return
    longest = max(step.length_us for step in drawn)
    for step in drawn:
        lines = [f"{step.name}: {step.length_us / 1e3:.4g} ms", *timeline_letters(step, ranks, longest, width)]
        yield "\n".join(lines)
    units = ", ".join(f"{unit[0].upper()} {unit}" for unit in contents.plan.units)
    few = "" if len(ranks) == contents.plan.world_size else f"; {len(ranks)} of {contents.plan.world_size} ranks"
    yield f"{units}; capitals forward, small letters backward, dots idle{few}"


def timeline_letters(
    step: DrawnStep, ranks: Sequence[int], length_us: float, columns: int = DEFAULT_WIDTH
) -> Iterator[str]:
    """A line for each rank: in each column the letter of what it computed longest there, or a dot."""
    columns -= _LABEL_COLUMNS
    width = max(length_us, 1e-9) / columns
    spent: dict[int, list[dict[str, float]]] = {rank: [{} for _ in range(columns)] for rank in ranks}
    for event in step.events:
        if event["ph"] != "X" or event["tid"] or event["pid"] not in spent:
            continue
        begin = (event["ts"] - step.start_us) / width
        end = begin + event["dur"] / width
        if not 0 <= begin < columns:
            continue
        letter = event["args"]["unit"][0]
        letter = letter.upper() if event["name"].startswith("F") else letter.lower()
        for column in range(int(begin), min(int(end) + 1, columns)):
            share = min(end, column + 1) - max(begin, column)
            cell = spent[event["pid"]][column]
            cell[letter] = cell.get(letter, 0.0) + share
    shown = min(columns, round(step.length_us / width))
    for rank in ranks:
        row = "".join(_most(cell) for cell in spent[rank][:shown])
        yield f"{f'rank {rank}':<{_LABEL_COLUMNS}}{row}"


def _most(cell: Mapping[str, float]) -> str:
    letter = max(cell, key=lambda name: cell[name], default=".")
    return letter if sum(cell.values()) >= 0.5 else "."


def _idle(contents: ReportContents, bar: Callable[[float], str]) -> Table:
    predicted, measured = idle_shares(contents)
    columns = [predicted] if measured is None else [predicted, measured]
    full = max(*(share for shares in columns for share in shares.values()), 0.01)
    rows = [[kind, *(f"{shares[kind]:.1%}" for shares in columns), bar(columns[-1][kind] / full)] for kind in predicted]
    rows.append(["all", *(f"{sum(shares.values()):.1%}" for shares in columns), ""])
    head = ["idle time", "predicted", *(["measured"] if measured is not None else []), ""]
    return _left_last(_table("Share of the step that ranks idle", head, rows))


def _memory(contents: ReportContents, bar: Callable[[float], str]) -> Table:
    limit, rows = contents.memory_limit_gib, memory_rows(contents)
    full = max(limit, *(row.gib for row in rows)) if rows else limit
    cells = [(row.what, memory_text(row.gib), row.most, bar(row.gib / full)) for row in rows]
    return _left_last(_table(f"Peak memory, limit {limit:.4g} GiB", ("", "peak", "most of it", ""), cells))


def _left_last(table: Table) -> Table:
    table.columns[-1].justify = "left"
    return table


def _bar(share: float, most: int) -> str:
    return "█" * round(share * most) or ("▏" if share > 0 and most else "")


def _training(metrics: Sequence[Mapping[str, Any]] | None) -> Iterator[str]:
    if metrics is None:
        return
    if not metrics:
        yield "No step was logged."
        return
    for key, words in (("loss", "Loss"), ("val_loss", "Held-out loss"), ("tokens_per_s", "LLM tokens/s")):
        values = [m[key] for m in metrics if m.get(key) is not None]
        if values:
            change = f"{values[0]:.5g} to {values[-1]:.5g} over {metrics[-1]['step']} steps"
            yield f"{words:<14}{change}  {sparkline(values, _CURVE_COLUMNS)}"
