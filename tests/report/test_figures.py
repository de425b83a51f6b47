"""Drawings show their plans and steps, stay small for large plans, and can be saved as figures."""

import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from mmtrain.errors import UserError
from mmtrain.planning import Plan, SchedulePlan, StagePlan, UnitPlan
from mmtrain.program import Compute, Forward, Microbatch, Span, StageId, Timeline
from mmtrain.program.ir.program import ranges_text
from mmtrain.report.drawing import Box, Drawing, Label, Polyline, svg
from mmtrain.report.figure_files import report_drawings, save_drawings
from mmtrain.report.html import html_page
from mmtrain.report.plan_picture import CARD_GAP_PX, CARD_WIDTH_PX, plan_drawing
from mmtrain.report.rank_groups import ReplicaRanks, rank_groups, ranks_to_draw, stage_ranks, unit_edges
from mmtrain.report.report_contents import ReportContents, drawn_steps
from mmtrain.report.terminal import report_text
from mmtrain.report.timeline_picture import (
    MAX_TIMELINE_BOXES,
    TIMELINE_MARGIN_PX,
    TIMELINE_WIDTH_PX,
    DrawnStep,
    curve_drawing,
    timeline_drawing,
)
from tests.report.conftest import contents_of, run_of
from tests.report.test_plan_view import plan as two_units


def unit(tp: int, pp: int, dp: int, first: int, layers: int, vpp: int = 1, redone: int = 0) -> UnitPlan:
    cuts = [layers * s // (pp * vpp) for s in range(pp * vpp + 1)]
    stages = tuple(
        StagePlan(stage=s, chunk=s // pp, layers=(lo, hi), recompute=tuple(range(lo, min(lo + redone, hi))))
        for s, (lo, hi) in enumerate(pairwise(cuts))
    )
    return UnitPlan(tp=tp, pp=pp, dp=dp, vpp=vpp, ranks=tuple(range(first, first + tp * pp * dp)), stages=stages)


def planned(**units: UnitPlan) -> Plan:
    ranks = {rank for unit in units.values() for rank in unit.ranks}
    counts = SchedulePlan(num_microbatches=dict.fromkeys(units, 8))
    return two_units().model_copy(update={"units": units, "world_size": len(ranks), "schedule": counts})


def labels(drawing: Drawing) -> list[str]:
    return [mark.text for mark in drawing.marks if isinstance(mark, Label)]


def bars(drawing: Drawing) -> list[Box]:
    return [mark for mark in drawing.marks if isinstance(mark, Box) and " layers " in mark.tooltip]


def test_every_rank_and_layer_is_drawn_once() -> None:
    plan = planned(vision=unit(1, 1, 2, 0, 5), llm=unit(2, 2, 2, 2, 12, redone=3))
    drawing = plan_drawing(plan)
    ranks = [
        int(word)
        for mark in drawing.marks
        if isinstance(mark, Box)
        for word in re.findall(r"^rank (\d+):", mark.tooltip)
    ]
    assert sorted(ranks) == list(range(10))
    covered = [re.findall(r"^(\w+) layers (\d+) to (\d+): (\w+)", bar.tooltip)[0] for bar in bars(drawing)]
    for name, number in (("vision", 5), ("llm", 12)):
        layers = [k for unit_name, lo, hi, _ in covered if unit_name == name for k in range(int(lo), int(hi) + 1)]
        assert sorted(layers) == list(range(number))
    redone = [lo for name, lo, _, how in covered if how == "recomputed"]
    assert sorted(map(int, redone)) == [0, 1, 2, 6, 7, 8]
    assert all(bar.outlined == ("recomputed" in bar.tooltip) for bar in bars(drawing))


def test_the_plan_says_where_activation_functions_run_again() -> None:
    llm = unit(1, 2, 1, 2, 12, redone=3)
    kept = plan_drawing(planned(vision=unit(1, 1, 2, 0, 5), llm=llm))
    again = planned(vision=unit(1, 1, 2, 0, 5), llm=llm.model_copy(update={"recompute_activation_function": True}))
    drawing = plan_drawing(again)
    sentence = "Blocks of llm that are not recomputed compute their activation functions again."
    assert labels(drawing).count(sentence) == 1
    assert drawing.description.endswith(sentence)
    assert drawing.height > kept.height
    assert sentence not in [*labels(kept), kept.description]


def test_edges_between_units_name_their_transport() -> None:
    def transport(vision: UnitPlan, llm: UnitPlan) -> str:
        [edge] = unit_edges(planned(vision=vision, llm=llm))
        return edge.transport

    assert transport(unit(1, 1, 3, 0, 5), unit(2, 2, 2, 3, 12)) == "broker 3:2"
    assert transport(unit(1, 1, 2, 0, 5), unit(2, 2, 2, 2, 12)) == "send 2:2"
    assert transport(unit(2, 1, 2, 0, 5), unit(2, 2, 2, 0, 12)) == "local"
    three = planned(vision=unit(1, 1, 2, 0, 5), llm=unit(1, 1, 1, 2, 5), generator=unit(1, 1, 2, 3, 5))
    assert [(e.src, e.dst, e.transport) for e in unit_edges(three)] == [
        ("vision", "llm", "broker 2:1"),
        ("llm", "generator", "broker 1:2"),
    ]
    assert "vision.0 → llm: broker 2:1" in labels(plan_drawing(three))
    assert "llm.0 → generator: broker 1:2" in labels(plan_drawing(three))


def test_ranks_that_hold_the_same_stages_are_one_group() -> None:
    shared = planned(vision=unit(2, 1, 4, 0, 4), llm=unit(2, 4, 1, 0, 16))
    groups = rank_groups(shared)
    assert [group.ranks for group in groups] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [(held.unit, held.replicas) for held in groups[1].units] == [
        ("vision", (ReplicaRanks(1, (2, 3)),)),
        ("llm", (ReplicaRanks(0, (2, 3)),)),
    ]


def test_model_chunks_are_assigned_round_robin() -> None:
    plan = planned(llm=unit(2, 2, 2, 0, 16, vpp=2))
    assert [stage_ranks(plan.units["llm"], s) for s in range(4)] == [(0, 1, 2, 3), (4, 5, 6, 7)] * 2
    first, second = rank_groups(plan)
    assert [s.stage for s in first.units[0].stages] == [0, 2]
    assert [s.stage for s in second.units[0].stages] == [1, 3]


def test_drawn_ranks_represent_the_others() -> None:
    plan = planned(vision=unit(2, 1, 32, 0, 8), llm=unit(8, 4, 16, 64, 32))
    assert ranks_to_draw(plan, 2000) == list(range(576))
    assert ranks_to_draw(plan, 24) == [0, 2, 64, 192, 320, 448]
    assert ranks_to_draw(plan, 24, group=3) == [12, 14, 64 + 24, 192 + 24, 320 + 24, 448 + 24]
    odd = planned(vision=unit(1, 1, 31, 0, 8), llm=unit(1, 2, 32, 31, 32))
    assert ranks_to_draw(odd, 24) == [0, 31, 63]
    assert len(ranks_to_draw(planned(llm=unit(1, 64, 4, 0, 64)), 24)) == 24


def test_the_replica_group_with_most_of_the_critical_path_is_drawn(simulated_plan: tuple[Plan, Timeline]) -> None:
    plan = planned(vision=unit(2, 1, 32, 0, 8), llm=unit(8, 4, 16, 64, 32))
    path = [
        Span(0, 0.0, 2.0, Forward(StageId("vision", 0), Microbatch("vision", 0, 0))),
        Span(12, 2.0, 1.5, Forward(StageId("vision", 0), Microbatch("vision", 7, 0))),
        Span(88, 3.5, 1.0, Forward(StageId("llm", 0), Microbatch("llm", 3, 0))),
    ]
    step = replace(simulated_plan[1], critical_path=path)
    _, ranks = drawn_steps(ReportContents("big", plan, 4.0, [step]))
    assert ranks == ranks_to_draw(plan, 24, group=3)


@pytest.mark.parametrize("vpp", [1, 3, 6])
def test_labels_of_a_stage_do_not_overlap(vpp: int) -> None:
    """For an interleaved plan with many layers, all recomputed; letters have the mean width of a browser's."""
    plan = planned(vision=unit(1, 6, 2, 0, 108, vpp, redone=2), llm=unit(1, 6, 2, 0, 216, vpp, redone=99))
    lines: dict[tuple[float, float], list[tuple[float, float]]] = {}
    for mark in plan_drawing(plan).marks:
        if isinstance(mark, Label) and mark.anchor in ("start", "end"):
            length = len(mark.text) * mark.size * (0.66 if mark.bold else 0.64)
            left = mark.x - length if mark.anchor == "end" else mark.x
            lines.setdefault((mark.y, mark.x // (CARD_WIDTH_PX + CARD_GAP_PX)), []).append((left, left + length))
    for spans_of_line in lines.values():
        for (_, end), (start, _) in pairwise(sorted(spans_of_line)):
            assert end <= start


def test_the_drawing_of_thousands_of_ranks_stays_small() -> None:
    plan = planned(vision=unit(8, 8, 48, 0, 48), llm=unit(8, 8, 48, 0, 96, vpp=12))
    drawing = plan_drawing(plan)
    assert len(drawing.marks) < 3000
    assert drawing.width < 1100
    assert "and 45 more replicas" in labels(drawing)
    assert len(svg(drawing)) < 500_000


@pytest.mark.parametrize(
    "plan",
    [
        planned(vision=unit(1, 1, 2, 0, 5), llm=unit(2, 2, 2, 2, 12, redone=3)),
        planned(llm=unit(4, 3, 100, 0, 7, vpp=2)),
        planned(vision=unit(2, 1, 4, 0, 4), llm=unit(2, 4, 1, 0, 16)),
        planned(vision=unit(1, 1, 1, 0, 400), audio=unit(1, 1, 1, 1, 3), llm=unit(1, 9, 1, 2, 400)),
    ],
)
def test_marks_lie_on_the_sheet_and_cards_do_not_overlap(plan: Plan) -> None:
    drawing = plan_drawing(plan)
    for mark in drawing.marks:
        if isinstance(mark, Box):
            assert 0 <= mark.x <= mark.x + mark.width <= drawing.width
            assert 0 <= mark.y <= mark.y + mark.height <= drawing.height
        if isinstance(mark, Label):
            assert 0 <= mark.x <= drawing.width
            assert 0 < mark.y <= drawing.height
    cards = [m for m in drawing.marks if isinstance(m, Box) and m.width == CARD_WIDTH_PX]
    corners = [(c.x, c.y, c.x + c.width, c.y + c.height) for c in cards]
    for i, (x0, y0, x1, y1) in enumerate(corners):
        assert all(x1 <= u0 or u1 <= x0 or y1 <= v0 or v1 <= y0 for u0, v0, u1, v1 in corners[:i])


def test_a_step_shows_each_computation_with_its_microbatch(simulated_plan: tuple[Plan, Timeline]) -> None:
    plan, timeline = simulated_plan
    step = DrawnStep.simulated("Simulated step", timeline, [0, 1])
    drawing = timeline_drawing(step, tuple(plan.units), [0, 1], step.length_us)
    computed = [e for e in step.events if e["ph"] == "X" and e["tid"] == 0 and e["dur"] >= step.length_us / 900]
    words = [mark.tooltip for mark in drawing.marks if isinstance(mark, Box)]
    for event in computed:
        assert any(word.startswith(f"{event['name']}:") for word in words)
    assert "rank 1 computes" in drawing.description
    half = timeline_drawing(step, tuple(plan.units), [0, 1], 2 * step.length_us)
    assert max(m.x + m.width for m in half.marks if isinstance(m, Box)) < TIMELINE_WIDTH_PX * 0.55


@pytest.mark.parametrize(
    ("seconds", "heading", "ticks"),
    [
        (16.42369, "Simulated step: 16.42 s", ["0 s", "5", "10", "15"]),
        (0.80647, "Simulated step: 806.47 ms", ["0 ms", "200", "400", "600", "800"]),
    ],
)
def test_a_step_of_seconds_is_written_in_seconds(
    simulated_plan: tuple[Plan, Timeline], seconds: float, heading: str, ticks: list[str]
) -> None:
    """In the heading, on the axis, in the table, and in what is said of a box."""
    plan, timeline = simulated_plan
    factor = seconds / timeline.step_time_s
    spans = tuple(
        span._replace(start_s=span.start_s * factor, duration_s=span.duration_s * factor) for span in timeline.spans
    )
    longer = replace(timeline, spans=spans, step_time_s=seconds)
    contents = contents_of(plan, longer)
    [step], ranks = drawn_steps(contents)
    drawing = timeline_drawing(step, tuple(plan.units), ranks, step.length_us)
    assert drawing.description.startswith(f"{heading} on 2 ranks")
    texts = labels(drawing)
    assert [text for text in texts if text in ticks] == ticks
    written = heading.partition(": ")[2]
    assert f"<h3>{heading}</h3>" in html_page(contents)
    assert f"<td>{written}</td>" in html_page(contents)
    assert f"{heading}\n" in report_text(contents)
    widest = max((mark for mark in drawing.marks if isinstance(mark, Box)), key=lambda box: box.width)
    assert widest.tooltip.endswith(written.partition(" ")[2])


def test_lines_of_the_critical_path_do_not_overlap(simulated_plan: tuple[Plan, Timeline]) -> None:
    plan, timeline = simulated_plan
    step = DrawnStep.simulated("Simulated step", timeline, [0, 1])
    drawing = timeline_drawing(step, tuple(plan.units), [0, 1], step.length_us)
    lines = sorted(m.points for m in drawing.marks if isinstance(m, Polyline) and m.color == "ink")
    width = TIMELINE_WIDTH_PX - TIMELINE_MARGIN_PX
    first = next(span for span in timeline.critical_path if isinstance(span.action, Compute))
    assert lines[0][0][0] == pytest.approx(TIMELINE_MARGIN_PX + width * first.start_s / timeline.step_time_s)
    for (_, (end, _)), ((start, _), _) in pairwise(lines):
        assert end <= start + 1
    computed = sum(s.duration_s for s in timeline.critical_path if isinstance(s.action, Compute))
    underlined = sum(end[0] - start[0] for start, end in lines) / width
    assert underlined == pytest.approx(computed / timeline.step_time_s, rel=0.02)


def test_spans_narrower_than_a_pixel_are_merged() -> None:
    args = {"unit": "llm", "stage": 0, "microbatch": 0}
    short = [{"ph": "X", "name": "F", "pid": 0, "tid": 0, "ts": i, "dur": 1, "args": args} for i in range(100_000)]
    drawing = timeline_drawing(DrawnStep("s", short, 0.0, 100_000.0), ("llm",), [0], 100_000.0)
    assert [m.tooltip for m in drawing.marks if isinstance(m, Box)] == ["100000 short spans"]
    many = [{**short[0], "pid": rank, "ts": 100 * i, "dur": 99} for rank in range(24) for i in range(1000)]
    drawing = timeline_drawing(DrawnStep("s", many, 0.0, 100_000.0), ("llm",), list(range(24)), 100_000.0)
    assert 0 < sum(isinstance(m, Box) for m in drawing.marks) <= MAX_TIMELINE_BOXES


def test_a_loss_that_is_not_finite_is_a_gap() -> None:
    drawing = curve_drawing([(1, 1.0), (2, 2.0), (3, None), (4, 1.0), (5, 3.0), (6, None), (7, 2.0)], "Loss", "nats")
    assert drawing is not None
    lines = [m for m in drawing.marks if isinstance(m, Polyline) and m.color == "u0"]
    assert [len(line.points) for line in lines] == [2, 2]
    assert sum(isinstance(m, Box) for m in drawing.marks) == 1  # a value between two gaps
    assert "1 at first, 2 at last, between 1 and 3" in drawing.description
    assert curve_drawing([(1, None), (2, 1.0)], "Loss", "nats") is None


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_a_figure_file_shows_the_plan_and_both_steps(
    simulated_plan: tuple[Plan, Timeline], tmp_path: Path, ending: str, magic: bytes
) -> None:
    drawn = report_drawings(run_of(contents_of(*simulated_plan)))
    assert [caption.split(":")[0] for caption, _ in drawn] == ["try", "Step 4, simulated", "Step 4, measured"]
    save_drawings(drawn, tmp_path / f"a.{ending}")
    assert (tmp_path / f"a.{ending}").read_bytes().startswith(magic)


def test_a_figure_that_cannot_be_saved_is_an_error(
    simulated_plan: tuple[Plan, Timeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = report_drawings(contents_of(*simulated_plan))
    with pytest.raises(UserError, match=r"found suffix `\.jpg`, allowed: \.png, \.pdf, \.svg"):
        save_drawings(drawn, tmp_path / "a.jpg")
    with pytest.raises(UserError, match="cannot write the figure"):
        save_drawings(drawn, tmp_path / "none" / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'mmtrain\[report\]'"):
        save_drawings(drawn, tmp_path / "a.png")


def test_ranges_text() -> None:
    assert ranges_text((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert ranges_text(()) == ""


def test_text_in_drawings_is_escaped() -> None:
    text = svg(Drawing(10, 10, '<">', (Label(0, 0, "<b>"), Box(0, 0, 1, 1, "u0", tooltip="a<b"))))
    assert "<b>" not in text
    assert "a&lt;b" in text
    assert 'aria-label="&lt;&quot;&gt;"' in text


def test_without_a_trace_only_the_simulated_step_is_drawn(simulated_plan: tuple[Plan, Timeline]) -> None:
    contents = run_of(contents_of(*simulated_plan))
    captions = [caption for caption, _ in report_drawings(replace(contents, trace=None))]
    assert len(captions) == 2
    assert captions[1].startswith("Simulated step: ")
