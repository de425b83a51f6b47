"""Sources of samples in logged steps, in the texts and pages of a report."""

from dataclasses import replace

from mmtrain.planning import Plan
from mmtrain.program import Timeline
from mmtrain.report.html import html_page
from mmtrain.report.logged_totals import source_sentences, sum_sources
from mmtrain.report.metrics_record import SourceMetrics
from mmtrain.report.report_contents import report_json
from mmtrain.report.terminal import report_text
from tests.report.conftest import contents_of, metrics

STEPS = [
    metrics(1, sources={"a.json": SourceMetrics(10, 3000, 2.5), "b&c.json": SourceMetrics(0, 0, None)}),
    metrics(2, sources={"a.json": SourceMetrics(5, 1000, float("nan")), "b&c.json": SourceMetrics(4, 4000, 1.5)}),
    metrics(3, sources={"a.json": SourceMetrics(5, 2000, 2.0), "b&c.json": SourceMetrics(1, 2000, None)}),
]


def test_steps_are_summed_by_source() -> None:
    first, second = sum_sources([step.to_json() for step in STEPS])
    assert (first.name, first.samples, first.tokens, first.token_share) == ("a.json", 20, 6000, 0.5)
    assert (first.first_loss, first.last_loss, second.first_loss, second.last_loss) == (2.5, 2.0, 1.5, 1.5)
    assert next(source_sentences([first])).startswith("source a.json: 50.00% of the tokens (6.00k), 20 samples, loss")
    assert not sum_sources([metrics(1).to_json()])
    assert "sources" not in metrics(1).to_json()


def test_reports_have_a_row_for_each_source(simulated_plan: tuple[Plan, Timeline]) -> None:
    contents = replace(contents_of(*simulated_plan), metrics=[step.to_json() for step in STEPS])
    (line,) = (line for line in report_text(contents).splitlines() if "a.json" in line)
    assert [cell.strip() for cell in line.split("│")[2:-1]] == ["20", "6.00k", "50.00%", "2.5000", "2.0000"]
    assert "<td>b&amp;c.json</td>" in html_page(contents)
    assert [source["tokens"] for source in report_json(contents)["training"]["sources"]] == [6000, 6000]
