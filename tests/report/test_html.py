"""The report page is well formed, loads nothing, has texts for its pictures and shows the numbers of its artifacts."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from mmtrain.planning import Plan
from mmtrain.program import Timeline
from mmtrain.report.comparison import ComparisonRow, critical_path_rows
from mmtrain.report.html import html_page
from mmtrain.report.plain_text import memory_text
from mmtrain.report.report_contents import ReportContents
from tests.report.conftest import contents_of, run_of

VOID = {"meta"}


class Page(HTMLParser):
    """Collects text, and fails if tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> has an attribute twice: {attrs}"
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def contents(simulated_plan: tuple[Plan, Timeline]) -> ReportContents:
    return contents_of(*simulated_plan)


@pytest.fixture
def run(contents: ReportContents) -> ReportContents:
    return run_of(contents)


def test_every_number_is_that_of_its_artifact(run: ReportContents) -> None:
    text = Page(html_page(run)).text
    for row in run.comparison:
        assert row.measured_s is not None
        assert f"{row.predicted_s * 1e3:.2f} ms {row.measured_s * 1e3:.2f} ms -50.0%" in text
    assert run.trace is not None
    measured = run.trace.bubble_shares()
    assert measured is not None
    for kind, share in run.simulated[0].bubble_shares().items():
        assert f"({kind}) {share:.1%} {'-' if kind == 'tp_layers' else f'{measured[kind]:.1%}'}" in text
    for ranks, kinds in run.plan.predicted.memory_kinds_gib.items():
        assert " ".join(f"{gib:.4g}" for gib in kinds.values()) in text
        assert sum(kinds.values()) == pytest.approx(run.plan.predicted.peak_memory_gib[ranks], abs=3e-4)
    for ranks, gib in run.plan.predicted.peak_memory_gib.items():
        assert f" {ranks} {memory_text(gib)} {gib / 4:.1%}" in text
    assert "Step 4, measured" in text
    for path in critical_path_rows(run.simulated)[:3]:
        assert f"{path.what} {path.seconds * 1e3:.3g} ms {path.seconds / run.simulated[0].step_time_s:.1%}" in text
    assert "Loss, nats per token: last 0.25" in text


def test_the_page_loads_and_runs_nothing(run: ReportContents) -> None:
    text = html_page(run)
    page = Page(text)
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "use", "image", "base"}
    for _, attributes in page.tags:
        assert not {name for name in attributes if name in ("src", "href", "xlink:href") or name.startswith("on")}


def test_every_picture_has_a_text_and_ids_are_unique(run: ReportContents) -> None:
    page = Page(html_page(run))
    pictures = page.of("svg")
    assert len(pictures) >= 4
    for picture in pictures:
        assert picture["role"] == "img"
        assert len(picture["aria-label"] or "") > 30
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    [html] = page.of("html")
    assert html["lang"] == "en"
    assert any(a.get("name") == "viewport" for a in page.of("meta"))
    assert len(page.of("h1")) == len(page.of("main")) == 1


def test_wide_pictures_and_tables_scroll_in_their_own_box(run: ReportContents) -> None:
    text = html_page(run)
    assert ".draw,.scroll{overflow-x:auto" in text
    parents: list[str] = []

    class Boxes(Page):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag in ("svg", "table"):
                parents.append(self.classes[-1])
            super().handle_starttag(tag, attrs)
            if tag not in VOID:
                self.classes.append(dict(attrs).get("class") or "")

        def handle_endtag(self, tag: str) -> None:
            super().handle_endtag(tag)
            self.classes.pop()

        classes: list[str]

        def __init__(self, text: str) -> None:
            self.classes = []
            super().__init__(text)

    Boxes(text)
    assert set(parents) == {"draw", "scroll"}


def test_a_plan_without_a_run_shows_nothing_measured(contents: ReportContents) -> None:
    text = Page(html_page(contents)).text
    assert "Timeline of one step" in text
    assert "Training" not in text
    assert "measured" not in text.lower()


def test_a_plan_by_itself_shows_its_own_predictions(contents: ReportContents) -> None:
    text = Page(html_page(ReportContents("bare", contents.plan, 4.0))).text
    assert "Timeline" not in text
    assert "Load balance" not in text
    assert f"{contents.plan.predicted.bubbles['pp_warmup']:.1%}" in text
    assert "vision.0" in text


def test_alternatives_are_shown_with_reasons(contents: ReportContents) -> None:
    text = Page(html_page(contents)).text
    assert contents.plan.alternatives
    for other in contents.plan.alternatives:
        assert other.summary in text
        assert other.reason in text


def test_a_long_table_of_stages_is_folded_and_complete(contents: ReportContents) -> None:
    def folded(number: int) -> list[dict[str, str | None]]:
        rows = [
            *(ComparisonRow(f"llm.{i} forward", None, 1.0) for i in range(number)),
            ComparisonRow("step", None, 2.0),
        ]
        page = Page(html_page(replace(contents, comparison=rows)))
        assert all(f"llm.{i} forward" in page.words for i in range(number))
        return page.of("details")

    assert len(folded(100)) == len(folded(10)) + 1


def test_a_run_that_logged_nothing_says_so(contents: ReportContents) -> None:
    assert "No step was logged." in Page(html_page(replace(contents, metrics=[]))).words


def test_names_are_escaped(contents: ReportContents) -> None:
    hostile = '<script>alert("&")</script>'
    page = Page(html_page(replace(contents, name=hostile)))
    assert not page.of("script")
    assert hostile in page.words
