"""Write docs/papers.md, and docs/papers_runs.md with the commands, from the data files and the record."""

from collections.abc import Callable, Iterator, Sequence

from scripts.paper_data import PAPERS, Cell, Headline, Papers, Run, Table
from scripts.paper_figures import FIGURES, gpu_days_of
from scripts.paper_record import Entry, Figures, Record

NOT_PLANNED = "not planned yet"
EQUAL = 1.01  # as in plans: predicted figures that differ by less are called equal
MAX_REFUSAL = 160  # characters of a refusal in a table; the page of commands has all of it

# What a headline compares, and whether more is better.
_MEASURES: dict[str, tuple[Callable[[Figures], float], str, bool]] = {
    "step": (lambda figures: float(figures["step_s"]), "{:.2f} s", False),
    "gpu_days": (lambda figures: gpu_days_of(figures, ""), "{:.1f} GPU-days", False),
    "mfu": (lambda figures: float(figures["mfu"]) * 100, "{:.1f}%", True),
    "tokens": (lambda figures: float(figures["tokens_per_s_per_gpu"]), "{:,.0f} tokens/s/GPU", True),
}


def papers_page(papers: Papers, record: Record, introduction: str) -> str:
    """Return docs/papers.md."""
    lines = [introduction.rstrip(), "", *_summary(papers, record), "## Headlines", "", *_headlines(papers, record)]
    for paper, source in PAPERS.items():
        lines += ["", f"## {paper_title(paper)}: tables", "", f"{source}."]
        for table in papers.tables:
            if table.paper == paper:
                lines += ["", *_table(table, papers, record)]
    return "\n".join(lines) + "\n"


def paper_title(paper: str) -> str:
    """Return the paper's name as the page has it, such as `OmniBal`."""
    return PAPERS[paper].partition(" ")[0]  # type: ignore[index]


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
                lines += ["", f"### {name}", "", f"    {run.command}", "", *_run_lines(run, record.entry(name, run))]
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
    entries = [record.entry(name, run) for name, run in papers.runs.items()]
    made = [entry for entry in entries if entry is not None]
    yield f"**Recorded:** {len(made)} of {len(entries)} runs."
    if made:
        dates = sorted({entry.date for entry in made})
        trees = ", ".join(sorted({entry.tree for entry in made}))
        seconds = sum(entry.seconds for entry in made)
        period = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        yield f"{period}, planner {trees}, {made[-1].machine.partition(',')[0]},"
        yield f"{seconds:,.0f} processor seconds. Cells of the other runs say so."
    yield ""


def _headlines(papers: Papers, record: Record) -> Iterator[str]:
    for headline in papers.headlines:
        names = [f"{headline.paper}/{name}" for name in (headline.slower, headline.faster)]
        ours, reason = headline_answer(headline, [record.entry(name, papers.runs[name]) for name in names])
        title = f"{paper_title(headline.paper)}: {headline.what}"
        yield f"**{title}.** Paper: {headline.published}. Ours: {ours}. {reason}".rstrip()
        yield ""


def headline_answer(headline: Headline, entries: Sequence[Entry | None]) -> tuple[str, str]:
    """Return our figures of a headline's two systems with a verdict on their order, and the reason."""
    if any(entry is None for entry in entries):
        return NOT_PLANNED, ""
    refusals = [entry.refused for entry in entries if entry is not None and entry.refused is not None]
    if refusals:
        return f"refused ({_short(refusals[0])})", ""
    value, form, more_is_better = _MEASURES[headline.figure]
    slower, faster = (value(entry.figures) for entry in entries if entry is not None)
    if headline.slower == headline.faster:
        return form.format(faster), headline.kept
    gain = faster / slower if more_is_better else slower / faster
    figures = f"{form.format(slower)} -> {form.format(faster)}, {gain:.2f}x"
    if gain > EQUAL:
        return f"{figures}, the paper's order", headline.kept
    verdict = "the order is reversed" if gain < 1 / EQUAL else "equal within 1%"
    return f"{figures}, {verdict}", headline.reversed


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
        f"`{name}` refused: {_short(entry.refused)}"
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


def _short(text: str) -> str:
    """Cut a refusal for a table's cell."""
    text = text.replace("|", "/")
    return text if len(text) <= MAX_REFUSAL else f"{text[: MAX_REFUSAL - 4]} ..."
