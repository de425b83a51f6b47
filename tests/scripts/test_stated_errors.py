"""README and docs state the errors of published runs as the package's file holds them."""

import statistics

import pytest

from mmtrain.costs import preset
from mmtrain.costs.published_errors import (
    HIGH_SHARE,
    PublishedError,
    PublishedErrors,
    RunKind,
    bound_of_share,
    error_of,
    expected_error,
    published_errors,
)
from scripts.known_runs import known_runs, mixture_runs
from scripts.stated_errors import ROOT, STATED_PLANS, TABLE_START, StatedPlan, stated

PLAN = StatedPlan("page.md", RunKind("h100-80g", "pipeline", is_multimodal=False))
PAGE = f"""before

    Predicted step (modelled: h100-80g, within 1%): 4.43 s, MFU 39.8%, 1,806 LLM tokens/s per rank (116k in
    total), peak memory 74.5 GiB.
    That is all.

{TABLE_START}
|---|---|---|
| `h100-80g` | pipeline | old |

after
"""


@pytest.mark.parametrize("plan", STATED_PLANS, ids=lambda plan: plan.page)
def test_the_page_states_what_the_file_holds(plan: StatedPlan) -> None:
    page = (ROOT / plan.page).read_text(encoding="utf-8")
    errors = published_errors()
    assert f"(modelled: {plan.kind.hardware}, {errors.text(plan.kind)})" in " ".join(page.split())
    assert stated(plan, page, errors) == page, "run `python -m scripts.bench_known --half judge --write`"


def test_the_page_of_figures_states_all_runs_that_only_judge() -> None:
    errors = [error_of(run.ratio) for run in published_errors().runs if not run.has_experts]
    figures = statistics.median(errors), bound_of_share(errors, HIGH_SHARE), max(errors)
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    [row] = [line for line in page.splitlines() if "published runs that only judge, their kernels" in line]
    assert row.startswith(f"| {len(errors)} published runs")
    assert f" | {' / '.join(f'{100 * figure:.0f}' for figure in figures)}% | " in row


def test_the_tutorial_states_our_own_runs_on_a_core() -> None:
    source = f"(modelled: cpu-core, {expected_error(preset('cpu-core'), 'tp x dp', is_multimodal=True)})"
    assert " ".join((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8").split()).count(source) == 2


def test_one_page_has_the_table() -> None:
    assert [plan.page for plan in STATED_PLANS if TABLE_START in (ROOT / plan.page).read_text(encoding="utf-8")] == [
        "docs/planning.md"
    ]


def test_the_file_holds_the_runs_that_only_judge() -> None:
    judging = [run for run in known_runs() if run.held_out] + list(mixture_runs())
    assert {run.name for run in published_errors().runs} == {run.name for run in judging}


def test_a_page_is_stated_anew() -> None:
    errors = PublishedErrors(
        runs=tuple(
            PublishedError(name=str(ratio), hardware="h100-80g", layout="pipeline", is_multimodal=False, ratio=ratio)
            for ratio in (1.1, 1.2, 1.3)
        )
    )
    page = stated(PLAN, PAGE, errors)
    assert "old" not in page
    assert "within 1%" not in page
    text = "within 20% in the median and 30% at worst of 3 published runs like this one with their kernels"
    assert f"| `h100-80g` | pipeline | {text} |\n" in page
    assert f"Predicted step (modelled: h100-80g, {text}): 4.43 s, MFU 39.8%" in " ".join(page.split())
    assert page.startswith("before\n")
    assert page.endswith("\n\nafter\n")
    assert "GiB.\n    That is all.\n" in page
    assert stated(PLAN, page, errors) == page
