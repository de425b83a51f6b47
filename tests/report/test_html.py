"""The report page: well formed, loads nothing, and shows the numbers of its artefacts."""

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from mmtrain.plan import Plan
from mmtrain.program import Timeline
from mmtrain.program.measured import MeasuredStep, run_trace
from mmtrain.report.comparison import Trace, compare
from mmtrain.report.html import Contents, page
from mmtrain.report.html_svg import curve, timeline
from tests.report.conftest import metrics

VOID = {"meta"}


class Page(HTMLParser):
    """Collects text; fails where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def contents(rehearsed: tuple[Plan, Timeline]) -> Contents:
    chosen, step = rehearsed
    return Contents("try", chosen, [step], compare([step], None), 4.0)


def _run(contents: Contents) -> Contents:
    step = contents.simulated[0]
    spans = tuple(s._replace(start_s=2 * s.start_s, duration_s=2 * s.duration_s) for s in step.spans)
    slower = replace(step, spans=spans, step_time_s=2 * step.step_time_s, simulated=False)
    trace = Trace(json.loads(json.dumps(run_trace([MeasuredStep(4, 10.0, slower)], contents.plan.sha256, 1e-6))))
    logged = [metrics(i, loss=float("nan") if i == 2 else 1 / i).to_json() for i in (1, 2, 3, 4)]
    return replace(contents, trace=trace, rows=compare([step], trace), metrics=logged)


def test_every_number_is_that_of_its_artefact(contents: Contents) -> None:
    run = _run(contents)
    words = " ".join(Page(page(run)).words)
    for row in run.rows:
        assert row.measured_s is not None
        assert f"{row.predicted_s * 1e3:.2f} ms {row.measured_s * 1e3:.2f} ms -50.0%" in words
    for share in run.simulated[0].bubble_shares().values():
        assert f"{100 * share:.4g} %" in words
    for ranks, gib in run.plan.predicted.peak_memory_gib.items():
        assert f"rank {ranks} {gib:.4g} GiB" in words
    assert "last 0.25" in words
    assert "Measured, step 4" in words


def test_it_loads_nothing(contents: Contents) -> None:
    text = page(_run(contents))
    found = Page(text)
    assert "://" not in text
    assert not found.tags & {"script", "link", "img", "iframe"}
    assert not found.attributes & {"src", "href"}


def test_a_plan_alone_has_no_training_and_nothing_measured(contents: Contents) -> None:
    words = " ".join(Page(page(contents)).words)
    assert "Training" not in words
    assert "Measured" not in words


def test_a_run_that_logged_nothing_says_so(contents: Contents) -> None:
    assert "No step was logged." in Page(page(replace(contents, metrics=[]))).words


def test_names_are_escaped(contents: Contents) -> None:
    hostile = '<script>alert("&")</script>'
    found = Page(page(replace(contents, name=hostile)))
    assert "script" not in found.tags
    assert hostile in found.words


def test_a_loss_that_is_not_finite_is_a_gap() -> None:
    assert curve([(1, 1.0), (2, 2.0), (3, None), (4, 1.0), (5, 3.0)], "nats").split('"line" d="')[1].count("M") == 2
    assert "Fewer than two" in curve([(1, None), (2, 1.0)], "nats")


def test_spans_below_a_pixel_are_merged_and_ranks_capped() -> None:
    args = {"unit": "llm", "stage": 0}
    short = [{"ph": "X", "name": "F", "pid": 0, "tid": 0, "ts": i, "dur": 1, "args": args} for i in range(100_000)]
    drawn = timeline(short, 0.0, 100_000.0, ["llm"])
    assert drawn.count("<rect") == 1
    assert "100000 short spans" in drawn
    wide = [{**short[0], "pid": rank, "dur": 10_000} for rank in range(40)]
    assert "The first 32 of 40 ranks." in timeline(wide, 0.0, 100_000.0, ["llm"])
