"""Plans, steps, metrics and clocks for the tests of reports."""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from mmtrain.planning import Plan
from mmtrain.planning.evaluate.simulate_plan import simulate_plan
from mmtrain.program import Timeline
from mmtrain.program.trace.measured_timeline import MeasuredStep, run_trace
from mmtrain.report import StepMetrics, TimeSplit
from mmtrain.report.comparison import RunTrace, comparison_rows
from mmtrain.report.report_contents import ReportContents
from tests.planning import factory
from tests.plans import plan_recipe


@pytest.fixture(scope="package")
def simulated_plan() -> tuple[Plan, Timeline]:
    """Make a plan on two ranks, and simulate a step."""
    settings = factory.recipe(parallel={"placement": "unified"})
    chosen = plan_recipe(settings, factory.lengths(), world_size=2, hardware="cpu-core", recipe_sha256="x")
    layer_costs, _ = factory.layer_costs_for(settings)
    dp = {name: unit.dp for name, unit in chosen.units.items()}
    [batch, *_] = layer_costs.batches.lay_out(dp, chosen.schedule.num_microbatches)
    return chosen, simulate_plan(settings, chosen, batch)


def metrics(step: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step,
        "loss": 4 * math.exp(-step / 100) + 0.0345,
        "grad_norm": 0.81,
        "lr": 3e-4,
        "step_time_s": 0.5,
        "samples": 22,
        "tokens": 6150,
        "epoch": 0.3,
        "mfu": 0.031,
        "peak_flops": 2e12,
        "time_s": TimeSplit(compute=0.355, wait=0.1, communication=0.025, data=0.02),
        "peak_memory_bytes": 3 * 2**29,
    }
    return StepMetrics(**{**values, **changes})


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def contents_of(plan: Plan, step: Timeline) -> ReportContents:
    """Return the contents of a plan that was simulated and not run."""
    return ReportContents("try", plan, 4.0, [step], comparison_rows([step], None))


def run_of(contents: ReportContents) -> ReportContents:
    """Return the contents after a run on a machine half as fast, whose second step has a loss that is not finite."""
    step = contents.simulated[0]
    spans = tuple(s._replace(start_s=2 * s.start_s, duration_s=2 * s.duration_s) for s in step.spans)
    slower = replace(step, spans=spans, step_time_s=2 * step.step_time_s, simulated=False)
    trace = RunTrace(json.loads(json.dumps(run_trace([MeasuredStep(4, 10.0, slower)], contents.plan.sha256, 1e-6))))
    logged = [metrics(i, loss=math.nan if i == 2 else 1 / i).to_json() for i in (1, 2, 3, 4)]
    return replace(contents, trace=trace, comparison=comparison_rows([step], trace), metrics=logged)
