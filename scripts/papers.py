"""Make docs/papers.md: the published tables and figures of four systems beside our plans at the papers' settings.

    python -m scripts.papers                       write docs/papers.md and docs/papers_runs.md from the record
    python -m scripts.papers run [--only omnibal]  plan what the record lacks, on two cores, few GPUs first
    python -m scripts.papers run --again           plan again what another planner than this tree's has answered
    python -m scripts.papers check                 plan everything again, and say what differs from the record
    python -m scripts.papers --texts FOLDER        find each quotation in the papers' texts

`run` saves every answer when it has it, so it may be stopped and started again. `check` saves none, and fails if a
figure differs that no clock measures. `--only` takes the beginning of names of runs, such as `omnibal` or
`omnibal/6b-20b`, or of a table, such as `mmscale_figure15`; `headlines` are the runs of the headlines with their
experiments. Data: scripts/papers.
"""

import argparse
import multiprocessing
import os
import re
import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from scripts.paper_data import DATA_FOLDER, ROOT, Papers, Published
from scripts.paper_page import papers_page, runs_page
from scripts.paper_pictures import draw_pictures
from scripts.paper_record import Entry, Record, answer, planner_tree

INTRODUCTION = DATA_FOLDER / "introduction.md"
PAGE = ROOT / "docs" / "papers.md"
RUNS_PAGE = ROOT / "docs" / "papers_runs.md"
HEADLINES = "headlines"  # of `--only`
NUM_JOBS = 2  # processes
NICENESS = 10  # of the planning processes
AS_RECORDED = "as recorded"
LEFT_OUT = " [...] "  # in a quotation: words between its parts are not quoted


def main() -> int:
    """Write the pages, plan, or look for quotations; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["page", "run", "check"], default="page")
    parser.add_argument(
        "--only", default="", help="with `run` and `check`: the beginning of runs' names, or of a table's file name"
    )
    parser.add_argument("--again", action="store_true", help="with `run`: also what another planner answered")
    parser.add_argument("--jobs", type=int, default=NUM_JOBS, help="processes side by side, of `run` and `check`")
    parser.add_argument("--nice", type=int, default=NICENESS, help="how far these give way to others")
    parser.add_argument("--texts", type=Path, help="folder of the papers' texts (*.txt)")
    options = parser.parse_args()
    papers = Papers()
    if options.texts is not None:
        return report_quotations(papers, options.texts)
    if options.action == "check":
        names = fewest_ranks_first(papers, chosen_runs(papers, options.only))
        return check_runs(papers, Record(), names, options.jobs, options.nice)
    if options.action == "run":
        names = unanswered_runs(papers, Record(), options.only, again=options.again)
        answer_runs(papers, Record(), names, options.jobs, options.nice)
    write_pages(papers, Record())
    return 0


def write_pages(papers: Papers, record: Record) -> None:
    """Write docs/papers.md with its pictures, and docs/papers_runs.md."""
    PAGE.write_text(papers_page(papers, record, INTRODUCTION.read_text(encoding="utf-8")), encoding="utf-8")
    RUNS_PAGE.write_text(runs_page(papers, record), encoding="utf-8")
    draw_pictures(papers, record, PAGE.parent)


def chosen_runs(papers: Papers, only: str) -> list[str]:
    """Return the names of the runs that begin with `only`, or of the tables whose files do."""
    of_tables = [
        name
        for table in papers.tables
        if f"{table.paper}_{table.item.replace(' ', '')}".startswith(only)
        for name in papers.run_names(table)
    ]
    if only == HEADLINES:
        return list(dict.fromkeys(name for headline in papers.headlines for name in headline.run_names))
    by_name = [name for name in papers.runs if name.startswith(only)]
    chosen = list(dict.fromkeys(by_name or of_tables))
    if not chosen:
        sys.exit(f"--only {only}: no run's name and no table's file begins so; see scripts/papers")
    return chosen


def unanswered_runs(papers: Papers, record: Record, only: str, *, again: bool = False) -> list[str]:
    """Return the chosen runs that have no answer yet, and with `again` those of another planner, few GPUs first."""
    tree = planner_tree()
    answered = {name: record.entry(name, papers.runs[name]) for name in chosen_runs(papers, only)}
    names = [name for name, entry in answered.items() if entry is None or (again and entry.tree != tree)]
    return fewest_ranks_first(papers, names)


def fewest_ranks_first(papers: Papers, names: Sequence[str]) -> list[str]:
    """Sort runs by the GPUs that they are planned for."""
    return sorted(names, key=lambda name: papers.runs[name].num_ranks)


def answer_runs(papers: Papers, record: Record, names: Sequence[str], num_jobs: int, niceness: int) -> None:
    """Answer the runs and save each answer at once, saying which of them are as recorded before."""
    for name, entry in answers(papers, names, num_jobs, niceness):
        print(f"    {compared(record.entry(name, papers.runs[name]), entry)}", flush=True)
        record.add(name, entry)


def check_runs(papers: Papers, record: Record, names: Sequence[str], num_jobs: int, niceness: int) -> int:
    """Answer the runs again and compare with the record, which stays as it is; return 1 if any answer differs."""
    differing, seconds = [], 0.0
    for name, entry in answers(papers, names, num_jobs, niceness):
        seconds += entry.seconds
        if compared(record.entry(name, papers.runs[name]), entry) != AS_RECORDED:
            differing.append(name)
    for name in differing:
        print(f"not as recorded: {name}")
    print(f"{len(names) - len(differing)} of {len(names)} runs are as recorded; {seconds:,.0f} processor seconds")
    return 1 if differing else 0


def compared(recorded: Entry | None, entry: Entry) -> str:
    """Say whether an answer is the recorded one, but for what a clock measures."""
    if recorded is None:
        return "for the first time"
    return AS_RECORDED if recorded.lasting == entry.lasting else "changed"


def answers(papers: Papers, names: Sequence[str], num_jobs: int, niceness: int) -> Iterator[tuple[str, Entry]]:
    """Answer the runs in processes that give way to others; yield name and answer of each when it has ended.

    Raises SystemExit after the last run if any of them failed otherwise than by a refusal, with their errors.
    """
    failed = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, context, os.nice, (niceness,)) as pool:
        futures = {pool.submit(answer, papers.runs[name]): name for name in names}
        for number, future in enumerate(as_completed(futures), start=1):
            name = futures[future]
            error = future.exception()
            if error is not None:
                failed.append(f"{name}: {type(error).__name__}: {error}")
                continue
            entry = future.result()
            print(f"{time.strftime('%H:%M:%S')} {number} of {len(names)}: {name}, {entry.seconds:.0f} s", flush=True)
            yield name, entry
    if failed:
        sys.exit("\n".join(["these runs failed:", *failed]))


def quotations(papers: Papers) -> Iterator[tuple[str, Published]]:
    """Yield where each quotation stands in the data files, and the quotation."""
    for table in papers.tables:
        for cell in table.cells:
            yield f"{table.paper} {table.item}: {cell.what}", cell
    for headline in papers.headlines:
        yield f"{headline.paper}: {headline.what}", headline


def plain(text: str) -> str:
    """Return text without ligatures, Markdown emphasis, soft hyphens and differences of white space."""
    text = unicodedata.normalize("NFKC", text).replace("\u00ad", "").replace("**", "")
    return re.sub(r"\s+", " ", text).strip()


def report_quotations(papers: Papers, folder: Path) -> int:
    """Print the quotations that no text of the folder holds; return 1 if there are any."""
    texts = [plain(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.txt"))]
    found = missing = 0
    for where, published in quotations(papers):
        parts = [plain(part) for part in published.quote.split(LEFT_OUT)]
        if any(all(part in text for part in parts) for text in texts):
            found += 1
        else:
            missing += 1
            print(f"not found: {where}: {published.quote}")
    print(f"{found} of {found + missing} quotations stand in the {len(texts)} texts")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
