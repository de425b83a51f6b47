"""Write docs/papers.md, and docs/papers_runs.md with the commands, from the data files and the record."""

import textwrap
from collections.abc import Iterator, Sequence
from operator import itemgetter

from scripts.paper_data import PAPERS, Cell, Papers, Run, Table
from scripts.paper_figures import FIGURES
from scripts.paper_headlines import MAX_LINE, NOT_PLANNED, headline_lines, overview_lines, paper_title, short_refusal
from scripts.paper_miniatures_page import miniatures_section
from scripts.paper_pictures import picture_name
from scripts.paper_record import Entry, Record


def papers_page(papers: Papers, record: Record, introduction: str) -> str:
    """Return docs/papers.md."""
    lines = [introduction.rstrip(), "", *_summary(papers, record), "## Headlines", "", *_headlines(papers, record)]
    lines += miniatures_section()
    for paper, source in PAPERS.items():
        lines += ["", f"## {paper_title(paper)}: tables", "", f"{source}."]
        for table in papers.tables:
            if table.paper == paper:
                lines += ["", *_table(table, papers, record)]
    return "\n".join(lines) + "\n"


def runs_page(papers: Papers, record: Record) -> str:
    """Return docs/papers_runs.md: by run the command, the settings that are ours, and the recorded answer."""
    lines = [
        "# Plans beside the papers' tables",
        "",
        "Made by `python -m scripts.papers` from [scripts/papers](../scripts/papers) and its record. Each run of",
        "[the tables](papers.md) has its command, the settings in it that the paper does not state, and the answer.",
    ]
    for paper in PAPERS:
        lines += ["", f"## {paper_title(paper)}"]
        for name, run in papers.runs.items():
            if name.startswith(f"{paper}/"):
                command = run.command if run.has_command else f"python -m scripts.papers run --only {name}"
                lines += ["", f"### {name}", "", f"    {command}", "", *_run_lines(run, record.entry(name, run))]
    return "\n".join(lines) + "\n"


def _run_lines(run: Run, entry: Entry | None) -> Iterator[str]:
    for setting, reason in run.ours.items():
        yield f"* `{setting}` is ours: {reason}"
    if entry is None:
        yield f"* {NOT_PLANNED}"
    elif entry.refused is not None:
        yield f"* {entry.date}, {entry.tree}: refused. {entry.refused}"
    else:
        text = FIGURES["step"]([entry.figures], "") if "step_s" in entry.figures else "counted"
        yield f"* {entry.date}, {entry.tree}, in {entry.seconds:.0f} s: {text}"


def _summary(papers: Papers, record: Record) -> Iterator[str]:
    """Yield how much is recorded, when and where."""
    entries = {name: record.entry(name, run) for name, run in papers.runs.items()}
    made = [entry for entry in entries.values() if entry is not None]
    if made:
        dates = sorted({entry.date for entry in made})
        period = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        seconds = sum(entry.seconds for entry in made)
        longest, most_s = max(((name, entry.seconds) for name, entry in entries.items() if entry), key=itemgetter(1))
        num_planners = len({entry.tree for entry in made})
        text = (
            f"**Recorded:** {len(made)} of {len(entries)} runs, {period}, by {num_planners} states of the planner "
            f"([by run](papers_runs.md)), on {made[-1].machine.partition(',')[0]}. They took {seconds:,.0f} processor "
            f"seconds, of which `{longest}` took {most_s:.0f}. `python -m scripts.papers check` plans them all again "
            "and compares. Cells of runs without an answer say so."
        )
        yield from textwrap.wrap(text, MAX_LINE, break_on_hyphens=False)
        yield ""


def _headlines(papers: Papers, record: Record) -> Iterator[str]:
    yield from overview_lines(papers, record)
    for headline in papers.headlines:
        yield from headline_lines(headline, papers, record, picture_name(headline))


def _table(table: Table, papers: Papers, record: Record) -> Iterator[str]:
    yield f"### {table.item[0].upper()}{table.item[1:]}: {table.title}"
    yield ""
    if table.note:
        yield table.note
        yield ""
    yield "| | paper | ours | why they differ | runs |"
    yield "|---|---|---|---|---|"
    for cell in table.cells:
        names = ", ".join(f"`{name}`" for name in cell.runs)
        ours = cell_answer(cell, [_entry_of(table.paper, name, papers, record) for name in cell.runs])
        yield f"| {cell.what} | {cell.published} | {ours} | {cell.why} | {names} |"


def _entry_of(paper: str, name: str, papers: Papers, record: Record) -> Entry | None:
    full = f"{paper}/{name}"
    return record.entry(full, papers.runs[full])


def cell_answer(cell: Cell, entries: Sequence[Entry | None]) -> str:
    """Return our figure, or that a plan was refused, or that none has been made yet."""
    if cell.measured is not None:
        return cell.measured
    if cell.not_here is not None:
        return f"not here: {cell.not_here}"
    refusals = [
        f"`{name}` refused: {short_refusal(entry.refused)}"
        for name, entry in zip(cell.runs, entries, strict=True)
        if entry is not None and entry.refused is not None
    ]
    if refusals:
        return "; ".join(refusals)
    made = [entry.figures for entry in entries if entry is not None]
    if len(made) < len(entries):
        return NOT_PLANNED
    assert cell.figure is not None, "cells with runs have a figure"
    return FIGURES[cell.figure](made, cell.argument)
