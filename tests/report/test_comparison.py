"""Simulated and recorded steps are compared per stage, in total and in one timeline."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.errors import UserError
from mmtrain.planning import Plan
from mmtrain.program import Timeline
from mmtrain.program.trace.measured_timeline import MeasuredStep, run_trace
from mmtrain.report.comparison import (
    CriticalPathRow,
    RunTrace,
    comparison_rows,
    comparison_text,
    critical_path_rows,
    kind_seconds,
    overlay_trace,
    stage_seconds,
)

SHA = "ab" * 32


@pytest.fixture
def timeline(simulated_plan: tuple[Plan, Timeline]) -> Timeline:
    return simulated_plan[1]


def _slower(timeline: Timeline, factor: float) -> Timeline:
    """Return what a machine would record that takes `factor` times as long."""
    spans = tuple(s._replace(start_s=s.start_s * factor, duration_s=s.duration_s * factor) for s in timeline.spans)
    return replace(timeline, spans=spans, step_time_s=timeline.step_time_s * factor, simulated=False)


def _recorded(*timelines: Timeline) -> RunTrace:
    steps = [MeasuredStep(4 + i, 10.0 + i, t) for i, t in enumerate(timelines)]
    return RunTrace(json.loads(json.dumps(run_trace(steps, SHA, 1e-6))))


def test_every_stage_kind_of_action_and_the_step_are_compared(timeline: Timeline) -> None:
    rows = comparison_rows([timeline, timeline], _recorded(_slower(timeline, 2.0), _slower(timeline, 3.0)))
    assert [row.what for row in rows] == [
        *("llm.0 backward", "llm.0 forward", "vision.0 backward", "vision.0 forward"),
        *("all backwards", "all forwards", "gradient reductions", "optimizer and gradient norm"),
        *("parameter gathering", "step"),
    ]
    seconds = {row.what: row.predicted_s for row in rows}
    for direction in ("forward", "backward"):
        assert seconds[f"all {direction}s"] == pytest.approx(
            sum(seconds[f"{u}.0 {direction}"] for u in ("llm", "vision"))
        )
    for row in rows:
        assert row.measured_s == pytest.approx(2.5 * row.predicted_s)
        assert row.error == pytest.approx(1 / 2.5 - 1)
    assert rows[-1].predicted_s == timeline.step_time_s
    text = comparison_text(rows, timeline.bubble_shares(), critical_path_rows([timeline]))
    assert "-60.0%" in text
    assert "Simulated ranks are idle for" in text


def test_communication_is_summed_by_kind() -> None:
    kinds = {"p2p": 1.0, "broadcast": 2.0, "reduce_scatter": 3.0, "all_reduce": 4.0, "all_gather": 5.0}
    events = [{"ph": "X", "tid": 1, "name": "x", "dur": s * 1e6, "args": {"kind": k}} for k, s in kinds.items()]
    events += [{"ph": "X", "tid": 1, "name": "step", "dur": 6e6, "args": {"kind": "all_reduce"}}, {"ph": "M", "tid": 1}]
    assert kind_seconds(events) == {
        "messages": 1.0,
        "messages shared in TP groups": 2.0,
        "gradient reductions": 7.0,
        "parameter gathering": 5.0,
        "optimizer and gradient norm": 6.0,
    }


def test_the_critical_path_is_grouped_by_kind_of_work(timeline: Timeline) -> None:
    """The demo has its encoder on one rank and its LLM on another; the parts add up to the step."""
    rows = critical_path_rows([timeline, timeline])
    assert sum(row.seconds for row in rows) == pytest.approx(timeline.step_time_s)
    assert sum(row.count for row in rows) == len(timeline.critical_path)
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    kinds = {"llm.0 forward", "llm.0 backward", "vision.0 forward", "vision.0 backward", "optimizer", "reduce vision"}
    kinds |= {"vision.0>llm.0 activation", "vision.0>llm.0 gradient", "reduce llm", "gather llm", "gather vision"}
    assert {row.what for row in rows} <= kinds
    text = comparison_text(comparison_rows([timeline], None), timeline.bubble_shares(), rows)
    assert rows[0].what in text.split("Critical path")[1]
    assert {row.part for row in rows} <= {"llm", "vision", "messages", "collectives"}
    assert all(f"{part} " in text.split("adds up to the step time: ")[1] for part in ("llm", "vision"))


def test_a_long_critical_path_is_shortened() -> None:
    rows = [CriticalPathRow(f"llm.{i} forward", "llm", 1.0, 2) for i in range(20)]
    text = comparison_text([], {}, rows)
    assert "8 others" in text
    assert "40.0%" in text
    assert "llm 100.0%." in text


def test_stage_seconds_add_up_to_the_compute_of_the_step(timeline: Timeline) -> None:
    busy = sum(stage_seconds(_recorded(timeline).content["traceEvents"]).values())
    idle = sum(sum(kinds.values()) for kinds in timeline.bubbles.values())
    assert busy + idle <= timeline.step_time_s * len(timeline.bubbles) * (1 + 1e-9)
    assert busy > 0


def test_without_a_run_there_are_only_predictions(timeline: Timeline) -> None:
    rows = comparison_rows([timeline], None)
    assert {row.error for row in rows} == {None}
    assert "measured" not in comparison_text(rows, timeline.bubble_shares(), [])
    assert overlay_trace([timeline], None, SHA)["otherData"]["simulated"] is True


def test_the_overlay_shows_simulated_ranks_below_those_of_the_run(timeline: Timeline) -> None:
    trace = _recorded(_slower(timeline, 2.0), timeline)
    overlay = overlay_trace([timeline, timeline], trace, SHA)
    names = {e["pid"]: e["args"]["name"] for e in overlay["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 0, simulated", 3: "rank 1, simulated"}
    recorded = [e for e in overlay["traceEvents"] if e["ph"] == "X" and e["pid"] < 2]
    simulated = [e for e in overlay["traceEvents"] if e["ph"] == "X" and e["pid"] >= 2]
    assert len(recorded) == len(simulated) == 2 * len(timeline.spans)
    second = trace.content["otherData"]["steps"][1]["ts"]
    assert min(e["ts"] for e in simulated[len(simulated) // 2 :]) == pytest.approx(second)


def test_idle_time_of_a_run_is_the_mean_of_its_steps(timeline: Timeline) -> None:
    twice = replace(timeline, bubbles={r: {k: 2 * s for k, s in b.items()} for r, b in timeline.bubbles.items()})
    assert _recorded(timeline, twice).bubble_shares() == pytest.approx(
        {kind: 1.5 * share for kind, share in timeline.bubble_shares().items()}
    )
    without = {"otherData": {"steps": [{"step": 1, "ts": 0.0, "dur": 1.0}]}}
    assert RunTrace(without).bubble_shares() is None


def test_a_file_that_is_not_the_trace_of_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the trace .*train\.trace"):
        RunTrace.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("no")
    with pytest.raises(UserError, match="it is not JSON"):
        RunTrace.load(tmp_path / "text.json")
    for content in ('{"otherData": {"simulated": true}}', '{"otherData": {"steps": []}}', '{"otherData": 1}', "[1]"):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(UserError, match="not the trace of a run"):
            RunTrace.load(tmp_path / "other.json")
