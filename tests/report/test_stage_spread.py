"""The spread of stages over microbatches and steps is that of the recorded events."""

import json
from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from mmtrain.planning import Plan
from mmtrain.program import Forward, Timeline
from mmtrain.program.trace.measured_timeline import MeasuredStep, run_trace
from mmtrain.report.comparison import RunTrace
from mmtrain.report.report_contents import report_json
from mmtrain.report.stage_spread import BETWEEN_STAGES, Spread, stage_spreads
from mmtrain.report.terminal import report_text
from tests.report.conftest import contents_of, run_of

TOKENS = [{"llm": [10, 30], "vision": [4, 4]}, {"llm": [20, 60], "vision": [8, 0]}]


def _trace(timeline: Timeline, second: Timeline, tokens: list[dict[str, list[int]]]) -> RunTrace:
    steps = [MeasuredStep(3, 5.0, timeline, tokens[0]), MeasuredStep(9, 50.0, second, tokens[1])]
    return RunTrace(json.loads(json.dumps(run_trace(steps, "abc", 1e-6))))


def test_each_stage_varies_as_its_events_do(simulated_plan: tuple[Plan, Timeline]) -> None:
    """Over two steps, the second of which takes three times as long and holds twice as much."""
    _, timeline = simulated_plan
    spans = tuple(s._replace(start_s=3 * s.start_s, duration_s=3 * s.duration_s) for s in timeline.spans)
    peaks = {rank: 2 * peak for rank, peak in timeline.peak_memory_bytes.items()}
    slower = replace(timeline, spans=spans, step_time_s=3 * timeline.step_time_s, peak_memory_bytes=peaks)
    rows = {row.stage: row for row in stage_spreads(_trace(timeline, slower, TOKENS), [timeline, slower])}

    forwards: dict[str, list[float]] = {}
    ranks: dict[str, set[int]] = {}
    for span in timeline.spans:
        if isinstance(span.action, Forward):
            forwards.setdefault(str(span.action.stage), []).append(span.duration_s)
            ranks.setdefault(str(span.action.stage), set()).add(span.rank)
    assert list(rows) == [*sorted(forwards), BETWEEN_STAGES]
    for stage, seconds in forwards.items():
        both = [factor * s for factor in (1, 3) for s in seconds]
        forward, memory, tokens = rows[stage].forward_s, rows[stage].activation_bytes, rows[stage].tokens
        assert forward is not None
        assert (forward.mean, forward.deviation) == pytest.approx((fmean(both), pstdev(both)))
        held = [factor * timeline.peak_memory_bytes[rank] for factor in (1, 2) for rank in ranks[stage]]
        assert memory == Spread(fmean(held), pstdev(held))
        of_unit = [count for step in TOKENS for count in step[stage.split(".")[0]]]
        assert tokens == Spread(fmean(of_unit), pstdev(of_unit))
    between = rows[BETWEEN_STAGES].forward_s
    means = [2 * fmean(seconds) for seconds in forwards.values()]
    assert between is not None
    assert (between.mean, between.deviation) == pytest.approx((fmean(means), pstdev(means)))


def test_the_report_shows_it_and_older_traces_name_no_tokens(simulated_plan: tuple[Plan, Timeline]) -> None:
    plan, timeline = simulated_plan
    contents = contents_of(plan, timeline)
    assert stage_spreads(None, [timeline]) == []
    assert "Spread of stages" not in report_text(contents, 160)
    run = run_of(contents)
    text = report_text(run, 160)
    assert "Spread of stages in the recorded steps" in text
    assert BETWEEN_STAGES in text
    assert all(row["tokens"] is None and row["forward_s"]["mean"] > 0 for row in report_json(run)["stages"])
    assert run.trace is not None
    for step in run.trace.content["otherData"]["steps"]:
        del step["tokens"]
    assert report_text(run, 160) == text
