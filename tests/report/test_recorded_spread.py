"""The spread of the ranks' times that a report finds in a trace is the one that the trace was made with."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from mmtrain.planning import Plan
from mmtrain.planning.evaluate.simulate_plan import simulate_plan
from mmtrain.program import Timeline
from mmtrain.program.ir.actions import Compute
from mmtrain.program.trace.measured_timeline import MeasuredStep, run_trace
from mmtrain.report.comparison import RunTrace
from mmtrain.report.recorded_spread import recorded_spread
from mmtrain.report.report_contents import report_json
from mmtrain.report.terminal import report_text
from tests.planning import factory
from tests.plans import plan_recipe
from tests.report.conftest import contents_of


@pytest.fixture(scope="module")
def replicated_step() -> tuple[Plan, Timeline]:
    """Plan eight replicas of an LLM and simulate a step of eight microbatches each."""
    settings = factory.recipe(vision=None, parallel={"placement": "unified", "llm": {"dp": 8}}, global_batch=64)
    plan = plan_recipe(settings, factory.text_lengths(), world_size=8, hardware="cpu-core", recipe_sha256="x")
    layer_costs, _ = factory.layer_costs_for(settings)
    [batch, *_] = layer_costs.batches.lay_out({"llm": 8}, plan.schedule.num_microbatches)
    return plan, simulate_plan(settings, plan, batch)


def recorded(plan: Plan, timeline: Timeline, ranks: float, layers: float) -> RunTrace:
    """Return the trace of a step in which ranks and layers differ so much."""
    rng = np.random.default_rng(3)
    drawn = rng.standard_normal(8)
    pace = 1.5 + 1.5 * ranks * (drawn - drawn.mean()) / drawn.std(ddof=1)
    num_layers = plan.units["llm"].stages[0].layers[1]

    def changed(duration_s: float, rank: int) -> float:
        return duration_s * pace[rank] * (1 + layers / math.sqrt(num_layers) * rng.standard_normal())

    spans = tuple(
        span._replace(duration_s=changed(span.duration_s, span.rank)) if isinstance(span.action, Compute) else span
        for span in timeline.spans
    )
    measured = replace(timeline, spans=spans, simulated=False)
    return RunTrace(json.loads(json.dumps(run_trace([MeasuredStep(4, 10.0, measured)], plan.sha256, 1e-6))))


@pytest.mark.parametrize(("ranks", "layers"), [(0.03, 0.02), (0.0, 0.1), (0.1, 0.0)])
def test_the_spread_of_a_trace_is_found(replicated_step: tuple[Plan, Timeline], ranks: float, layers: float) -> None:
    plan, timeline = replicated_step
    spread = recorded_spread(recorded(plan, timeline, ranks, layers), [timeline], plan)
    assert spread is not None
    assert spread.ranks == pytest.approx(ranks, abs=0.01)
    assert spread.layers == pytest.approx(layers, rel=0.2, abs=1e-3)


def test_the_report_states_it_with_its_settings(replicated_step: tuple[Plan, Timeline]) -> None:
    plan, timeline = replicated_step
    planned = contents_of(plan, timeline)
    assert recorded_spread(None, [timeline], plan) is None
    assert report_json(planned)["time_spread"] is None
    run = replace(planned, trace=recorded(plan, timeline, 0.1, 0.0))
    assert report_json(run)["time_spread"]["ranks"] == pytest.approx(0.1, rel=0.01)
    assert "ranks 10.0% (cluster.time_spread.ranks)" in report_text(run, 160)
