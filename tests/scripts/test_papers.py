"""What docs/papers.md states of the papers stands in them, and what it states of our plans was asked for."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import yaml
from _pytest.mark import ParameterSet
from PIL import Image
from pydantic import ValidationError

from mmtrain.recipe import load_recipe
from scripts.paper_data import NUMBER, Cell, Change, Headline, Papers, Published, Run
from scripts.paper_figures import FIGURES
from scripts.paper_headlines import EQUAL, NOT_PLANNED, headline_answer, headline_gains
from scripts.paper_page import cell_answer, papers_page, runs_page
from scripts.paper_pictures import VALUES_KEY, picture_name, picture_values
from scripts.paper_record import Entry, Figures, Record, answer
from scripts.papers import (
    AS_RECORDED,
    INTRODUCTION,
    PAGE,
    RUNS_PAGE,
    answer_runs,
    check_runs,
    chosen_runs,
    compared,
    plain,
    quotations,
    report_quotations,
    unanswered_runs,
)

PAPERS, RECORD = Papers(), Record()
RECIPES = Path(__file__).parents[2] / "recipes" / "whatif" / "papers"
ITEMS = {
    "omnibal": [
        *(f"table {number}" for number in range(1, 17)),
        "figure 4",
        *(f"appendix table {number}" for number in range(1, 10)),
    ],
    "mmscale": ["table 2", "table 3", *(f"figure {number}" for number in range(15, 21))],
    "optimus": [*(f"table {number}" for number in (1, 3, 4, 5, 6, 7, 10)), "figure 15", "figure 16", "figure 17"],
    "orchmllm": ["table 1", "table 2", *(f"figure {number}" for number in (3, 8, 9, 10, 11, 12, 13))],
}
COMPARISONS: dict[str, Callable[[Figures], float]] = {  # of figures that compare runs: what more of is better
    "steps": lambda figures: 1 / figures["step_s"],
    "mfu": lambda figures: figures["mfu"],
    "memory": lambda figures: figures["mfu"],
    "tokens": lambda figures: figures["tokens_per_s_per_gpu"],
    "gpu_days": lambda figures: 1 / figures["gpu_days_per_million_samples"],
    "layers": lambda figures: 1 / figures["gpu_days_per_million_samples"],
}
MAX_SLOW_S = 240.0  # of planning one row a table again, as recorded
FIGURES_OF_A_PLAN: Figures = {"step_s": 2.0, "mfu": 0.4, "tokens_per_s_per_gpu": 100.0, "gpus": 8}


def entry(refused: str | None = None, **figures: Any) -> Entry:
    return Entry("", "2026-01-01", "tree", "machine", 1.0, figures, refused)


def cell(**fields: Any) -> Cell:
    return Cell(what="a figure", published="1.2x", quote="by 1.2x", **fields)


def values_of(picture: Path) -> str:
    with Image.open(picture) as image:
        return str(image.info[VALUES_KEY])


def test_every_published_number_stands_in_its_quotation() -> None:
    missing = {where: published.missing_numbers for where, published in quotations(PAPERS) if published.missing_numbers}
    assert missing == {}


def test_a_number_that_the_quotation_lacks_is_found_in_whatever_form_it_stands() -> None:
    assert Published(published="1,920 and 4.6", quote="a batch of 1920, (4.6)").missing_numbers == []
    assert Published(published="4.6 and 46", quote="14.6, 4.61, 46x").missing_numbers == ["4.6"]


def test_long_quotations_and_cells_with_two_answers_are_refused() -> None:
    with pytest.raises(ValidationError, match="at most 100 characters"):
        Published(published="1", quote="1" * 101)
    with pytest.raises(ValidationError, match="only one of the three"):
        cell(runs=("a",), figure="step", measured="1.3x")
    with pytest.raises(ValidationError, match="only one of the three"):
        cell()


def test_every_table_and_figure_with_numbers_is_there() -> None:
    found = {paper: [table.item for table in PAPERS.tables if table.paper == paper] for paper in ITEMS}
    assert {paper: sorted(items) for paper, items in found.items()} == {p: sorted(items) for p, items in ITEMS.items()}


def test_every_run_has_a_recipe_that_loads_and_a_cluster() -> None:
    for name, run in PAPERS.runs.items():
        assert load_recipe(run.path, run.all_settings).recipe.cluster.ranks is not None, name
        assert all(reason for reason in run.ours.values()), name
        # Without it every placement is searched before the rule is planned.
        assert run.baseline is None or any("parallel.placement=" in setting for setting in run.all_settings), name


def test_cells_and_headlines_use_every_run_and_every_recipe_of_the_papers() -> None:
    used = {name for table in PAPERS.tables for name in PAPERS.run_names(table)}
    used |= {name for headline in PAPERS.headlines for name in headline.run_names}
    assert used == set(PAPERS.runs)
    bases = {"omnibal", "optimus"}
    recipes = {run.path.stem for run in PAPERS.runs.values()}
    assert {path.stem for path in RECIPES.glob("*.yaml")} - bases <= recipes
    assert {c.figure for table in PAPERS.tables for c in table.cells} - {None} == set(FIGURES)


def test_the_command_of_a_run_asks_what_was_asked() -> None:
    run = Run(recipe="papers/x", settings=("a.b=1",), ours={"c={d: 1}": "why"}, baseline="fsdp")
    assert run.command == "mmtrain plan recipes/whatif/papers/x.yaml --set a.b=1 --set 'c={d: 1}' --baseline fsdp"


def test_only_a_recorded_refusal_makes_a_cell_say_that_nothing_was_possible() -> None:
    asked = cell(runs=("a", "b"), figure="steps")
    refused, planned = entry("rank 0 needs 90 GiB"), entry(**FIGURES_OF_A_PLAN)
    assert cell_answer(asked, [refused, planned]) == "`a` refused: rank 0 needs 90 GiB"
    assert cell_answer(asked, [planned, None]) == NOT_PLANNED
    written = [c.model_dump_json() for table in PAPERS.tables for c in table.cells]
    assert [text for text in written if "not fit" in text or "refused" in text] == []


def test_a_cell_whose_order_is_not_the_papers_says_why() -> None:
    """The last run of a comparison is the one that is fastest in the paper."""
    silent = []
    for table in PAPERS.tables:
        for c in table.cells:
            entries = [RECORD.entry(f"{table.paper}/{name}", PAPERS.runs[f"{table.paper}/{name}"]) for name in c.runs]
            if (
                c.figure in COMPARISONS
                and c.argument != "alone"
                and all(e is not None and e.refused is None for e in entries)
            ):
                worth = [COMPARISONS[c.figure](e.figures) for e in entries if e is not None]
                if max(worth) > EQUAL * worth[-1] and not c.why:
                    silent.append(f"{table.paper} {table.item}: {c.what}")
    assert silent == []


@pytest.mark.parametrize(
    ("slower_s", "verdict", "reason"),
    [(4.0, "the paper's order", "kept"), (1.0, "the order is reversed", "swap"), (2.01, "equal within 1%", "swap")],
)
def test_a_headline_says_whether_the_order_is_kept(slower_s: float, verdict: str, reason: str) -> None:
    headline = Headline(
        published="2",
        quote="2",
        paper="omnibal",
        name="x",
        what="x",
        slower="a",
        faster="b",
        figure="step",
        kept="kept",
        reversed="swap",
    )
    entries = [entry(**FIGURES_OF_A_PLAN | {"step_s": slower_s}), entry(**FIGURES_OF_A_PLAN)]
    text, why = headline_answer(headline, entries)
    assert verdict in text
    assert why == reason
    assert headline_answer(headline, [None, entries[1]]) == (NOT_PLANNED, "")


def test_the_gain_of_a_headline_follows_from_what_is_published() -> None:
    for headline in PAPERS.headlines:
        numbers = [float(number.replace(",", "")) for number in NUMBER.findall(headline.published)]
        if not numbers:
            assert headline.gain is None, headline.name
            continue
        if "less" in headline.published:
            numbers = [1 / (1 - numbers[0] / 100)]
        elif "->" in headline.published:
            numbers = [numbers[0] / numbers[-1]]
        assert headline.gain == pytest.approx((numbers[0], numbers[-1]), rel=0.005), headline.name


def test_a_change_takes_the_place_of_a_runs_own_setting() -> None:
    run = Run(recipe="x", settings=("a.b=1", "c=2"), ours={"d=3": "why"})
    changed = Change(what="x", settings=("a.b=5", "d=4")).changed(run)
    assert changed.all_settings == ["c=2", "a.b=5", "d=4"]
    assert changed.ours == {"a.b=5": "an experiment", "d=4": "an experiment"}


def test_experiments_are_of_the_headlines_two_systems_unless_they_name_others() -> None:
    [headline] = [h for h in PAPERS.headlines if h.name == "balanced"]
    one_chunk, by_need, no_spread = headline.experiments[:3]
    assert (one_chunk.slower, one_chunk.faster) == (f"{headline.slower}+one-chunk", headline.faster)
    assert (by_need.slower, by_need.faster) == ("3072-balanced", "3072-colocated")
    assert (no_spread.slower, no_spread.faster) == (f"{headline.slower}+no-spread", f"{headline.faster}+no-spread")
    assert "parallel.llm.vpp=1" in PAPERS.runs[f"optimus/{one_chunk.slower}"].all_settings


def test_pictures_show_what_the_record_says() -> None:
    """Run `python -m scripts.papers` if this fails: data files or the record changed."""
    gains = {picture_name(h): headline_gains(h, PAPERS, RECORD) for h in PAPERS.headlines}
    expected = {name: picture_values(rows) for name, rows in gains.items() if rows is not None}
    drawn = {path.name: values_of(path) for path in PAGE.parent.glob("papers_*.png")}
    assert drawn == expected


def test_random_mini_batches_wait_for_lengths_alone_and_less_the_more_samples_they_have(tmp_path: Path) -> None:
    equal = tmp_path / "equal.csv"
    equal.write_text("count,text,vision,audio\n4,100,1024,200\n", encoding="utf-8")
    run = PAPERS.runs["orchmllm/batches-84b"]
    of_equal = run.model_copy(update={"settings": (*run.settings, f"data.sources=[{{path: {equal}}}]")})
    waits = answer(of_equal).figures["over_mean"]
    assert waits == pytest.approx(dict.fromkeys(waits, 1.0))
    few, many = answer(run).figures, answer(PAPERS.runs["orchmllm/batches-10b"]).figures
    assert few["samples"] < many["samples"]
    assert few["together"] > many["together"] > 1.0


def test_the_pages_are_made_from_the_data_and_the_record() -> None:
    """Run `python -m scripts.papers` if this fails: data files or the record changed."""
    introduction = INTRODUCTION.read_text(encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == papers_page(PAPERS, RECORD, introduction)
    assert RUNS_PAGE.read_text(encoding="utf-8") == runs_page(PAPERS, RECORD)


def test_a_stopped_run_goes_on_where_it_was_and_a_changed_question_is_asked_again(tmp_path: Path) -> None:
    name = "omnibal/groups-pixels-224"
    record = Record(tmp_path / "record.json")
    answer_runs(PAPERS, record, unanswered_runs(PAPERS, record, name), 1, 0)
    first = Record(tmp_path / "record.json").entry(name, PAPERS.runs[name])
    assert first is not None
    again = Record(tmp_path / "record.json")
    again.add(name, replace(first, machine="the same"))
    assert unanswered_runs(PAPERS, again, name) == []
    assert again.entries[name].machine == "the same"
    again.add(name, replace(first, machine="the same", tree="another planner"))
    answer_runs(PAPERS, again, unanswered_runs(PAPERS, again, name, again=True), 1, 0)
    assert again.entries[name].tree == first.tree
    assert again.entries[name].lasting == first.lasting
    late = Record(tmp_path / "record.json")
    record.add("another", first)  # by a process that began earlier
    assert list(Record(tmp_path / "record.json").entries) == ["another", name]
    late.add("third", first)
    assert list(Record(tmp_path / "record.json").entries) == ["another", name, "third"]
    changed = PAPERS.runs[name].model_copy(update={"settings": ("parallel.llm.dp=8",)})
    assert again.entry(name, changed) is None


def test_check_finds_what_has_changed_and_saves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "omnibal/groups-pixels-224"
    recorded = RECORD.entries[name]
    other = {"batches": {"mean_batch": 1.0, "seconds": 2.0}}
    record = Record(tmp_path / "record.json")
    record.add(name, replace(recorded, figures=recorded.figures | other))
    assert check_runs(PAPERS, record, [name], 1, 0) == 1
    assert f"not as recorded: {name}\n0 of 1 runs are as recorded" in capsys.readouterr().out
    assert Record(tmp_path / "record.json").entries[name].figures["batches"] == other["batches"]
    assert compared(entry(seconds=1.0, mfu=0.4), entry(seconds=2.0, mfu=0.4)) == AS_RECORDED
    assert compared(entry(mfu=0.4), entry(mfu=0.5)) == "changed"
    assert compared(None, entry()) == "for the first time"


def test_only_names_runs_or_tables() -> None:
    assert chosen_runs(PAPERS, "omnibal/isf-") == ["omnibal/isf-llava", "omnibal/isf-lcs"]
    assert chosen_runs(PAPERS, "omnibal_figure4") == ["omnibal/isf-llava", "omnibal/isf", "omnibal/isf-lcs"]


def test_quotations_are_found_whatever_the_white_space_and_the_ligatures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [
        {"what": "a", "published": "2", "quote": "efficient [...] 2 times", "not_here": "x"},
        {"what": "b", "published": "3", "quote": "3 times", "not_here": "x"},
    ]
    table = {"paper": "omnibal", "item": "table 1", "title": "x", "cells": cells}
    (tmp_path / "omnibal_table01.yaml").write_text(yaml.safe_dump(table), encoding="utf-8")
    (tmp_path / "headlines.yaml").write_text("[]", encoding="utf-8")
    (tmp_path / "paper.txt").write_text("e\ufb03cient,\nas **2**\n times", encoding="utf-8")
    assert plain("e\ufb03cient \n **x**") == "efficient x"
    assert report_quotations(Papers(tmp_path), tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["not found: omnibal table 1: b: 3 times", "1 of 2 quotations stand in the 1 texts"]


def recorded_rows() -> list[list[str]]:
    """Return of each table the runs of the row that was recorded in least time, the quickest row first."""
    quickest = []
    for table in PAPERS.tables:
        rows = [[f"{table.paper}/{name}" for name in c.runs] for c in table.cells if c.runs]
        made = [row for row in rows if all(RECORD.entry(name, PAPERS.runs[name]) for name in row)]
        if made:
            quickest.append(min(made, key=seconds_of))
    return sorted(quickest, key=seconds_of)


def seconds_of(names: Iterable[str]) -> float:
    return sum(RECORD.entries[name].seconds for name in set(names))


def in_tiers() -> list[ParameterSet]:
    """Mark runs `slow` until they take four minutes together, and those that remain `long`."""
    names = list(dict.fromkeys(name for row in recorded_rows() for name in row))
    totals_s = accumulate(RECORD.entries[name].seconds for name in names)
    marks = (pytest.mark.slow if total_s <= MAX_SLOW_S else pytest.mark.long for total_s in totals_s)
    return [pytest.param(name, marks=mark) for name, mark in zip(names, marks, strict=True)]


@pytest.mark.parametrize("name", in_tiers())
def test_one_row_a_table_is_still_planned_as_recorded(name: str) -> None:
    """Run `python -m scripts.papers run --again` if this fails: the plans behind the page have changed."""
    assert answer(PAPERS.runs[name]).lasting == RECORD.entries[name].lasting
