"""The report as text shows the numbers of the page, and a step in letters."""

import re
from dataclasses import replace

import pytest

from mmtrain.planning import Plan
from mmtrain.program import Timeline
from mmtrain.report.comparison import critical_path_rows
from mmtrain.report.html import html_page
from mmtrain.report.report_contents import ReportContents, key_figures, report_json
from mmtrain.report.terminal import report_text, timeline_letters
from mmtrain.report.timeline_picture import DrawnStep
from tests.report.conftest import contents_of, metrics, run_of


def test_a_run_shows_predicted_and_measured_times(simulated_plan: tuple[Plan, Timeline]) -> None:
    run = run_of(contents_of(*simulated_plan))
    text = report_text(run)
    for row in run.comparison:
        assert row.measured_s is not None
        assert f"{row.predicted_s * 1e3:.2f} ms" in text
        assert f"{row.measured_s * 1e3:.2f} ms" in text
    assert text.count("-50.0%") == len(run.comparison)
    assert "Step 4, simulated" in text
    for path in critical_path_rows(run.simulated)[:3]:
        assert re.search(rf"{re.escape(path.what)} +│ +{path.seconds * 1e3:.3g} ms │ +[\d.]+%", text), path
    assert "Step 4, measured" in text
    assert "Loss          1 to 0.25 over 4 steps" in text
    assert max(map(len, text.splitlines())) <= 120
    assert max(map(len, report_text(run, 72).splitlines())) <= 72


def test_an_elastic_run_shows_when_it_had_how_many_ranks(simulated_plan: tuple[Plan, Timeline]) -> None:
    logged = [metrics(1, ranks=3), metrics(2, ranks=2, resume_s=12.54), metrics(3, ranks=2), metrics(4, ranks=3)]
    run = replace(contents_of(*simulated_plan), metrics=[step.to_json() for step in logged])
    sentences = [
        "2 ranks instead of 3 since step 2, 12.5 s after the last step before the restart",
        "3 ranks instead of 2 since step 4",
    ]
    assert report_json(run)["training"]["rank_changes"] == sentences
    for sentence in sentences:
        assert f"Ranks         {sentence}" in report_text(run)
        assert f"<p>{sentence}.</p>" in html_page(run)


def test_a_plan_by_itself_shows_no_steps(simulated_plan: tuple[Plan, Timeline]) -> None:
    text = report_text(ReportContents("bare", simulated_plan[0], 4.0))
    assert "unified" in text
    assert "limit 4 GiB" in text
    assert "measured  " not in text
    assert "dots: idle" not in text


def test_each_letter_is_what_the_rank_computed_longest() -> None:
    def span(name: str, unit: str, start: float, length: float) -> dict[str, object]:
        return {"ph": "X", "name": name, "pid": 0, "tid": 0, "ts": start, "dur": length, "args": {"unit": unit}}

    events = [span("F vision.0", "vision", 0, 37), span("F llm.0", "llm", 37, 37), span("B llm.0", "llm", 74, 18.5)]
    [line] = timeline_letters(DrawnStep("s", events, 0.0, 111.0), [0], 111.0)
    assert line == "rank 0   " + "V" * 37 + "L" * 37 + "l" * 18 + "l" + "." * 18


def test_json_holds_the_same_figures(simulated_plan: tuple[Plan, Timeline]) -> None:
    run = run_of(contents_of(*simulated_plan))
    output = report_json(run)
    assert [f["what"] for f in output["figures"]] == [f.what for f in key_figures(run)]
    assert output["figures"][0]["measured"] == pytest.approx(0.5)
    assert output["figures"][1]["predicted"] == pytest.approx(100 * run.plan.predicted.mfu)
    training = {
        "steps": 4,
        "first_loss": 1.0,
        "last_loss": 0.25,
        "last_val_loss": None,
        "experts": None,
        "rank_changes": [],
        "sources": [],
    }
    assert output["training"] == training
    measured, predicted = output["idle"]["measured"], output["idle"]["predicted"]
    assert predicted == pytest.approx(run.simulated[0].bubble_shares())
    assert measured.keys() == predicted.keys() - {"tp_layers"}
    assert sum(row["seconds"] for row in output["critical"]) == pytest.approx(run.simulated[0].step_time_s)
    assert [row["error"] for row in output["seconds"]] == pytest.approx([-0.5] * len(run.comparison))
