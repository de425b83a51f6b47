"""What a whole run says of its time: traces, traffic by edge, slow ranks."""

import json
import statistics
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mmtrain.costs import CostTable
from mmtrain.costs.recorded_costs import RECORDED_COSTS_FILE
from mmtrain.data import build_index
from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning import Plan
from mmtrain.planning.artifact.plan_files import load_plan
from mmtrain.planning.artifact.plan_graph import planned_shape, stage_graph
from mmtrain.program import Compute, Partial, build_program, chrome_trace
from mmtrain.program.ir.segments import expand_all
from mmtrain.program.trace.measured_timeline import measured_timeline
from mmtrain.program.trace.step_record import StepRecord
from mmtrain.report import read_metrics
from mmtrain.report.plan_view import plan_table
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.resilience.stragglers import STRAGGLER_WINDOW_STEPS
from mmtrain.runtime.run_folder import PLAN_FILE, TRACE_FILE
from mmtrain.runtime.training.cost_drift import MEDIAN_STEPS
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.faults import WATCHDOG_S, AllOf, FailAt
from tests.flow.cases import Mesh, plan, recipe, step_data
from tests.flow.orders import PIPELINE
from tests.flow.runs import launch, request_for, run_all
from tests.plans import plan_recipe
from tests.program.trace_format import require_trace

GUESTS = {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1))}
TWO_REPLICAS = ("parallel.placement=unified", "parallel.llm.dp=2", "train.checkpoint.every=0")


def test_a_run_writes_the_timelines_it_was_asked_for(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, "train.trace_steps=[2,4]", "parallel.placement=disaggregated")
    assert run_all(request, request) == ["", ""]
    trace = json.loads((tmp_path / TRACE_FILE).read_text())
    require_trace(trace)
    other = trace["otherData"]
    assert (other["simulated"], other["plan_sha256"]) == (False, load_plan(tmp_path / PLAN_FILE).sha256)
    assert [s["step"] for s in other["steps"]] == [2, 4]
    assert other["step_time_us"] == pytest.approx(sum(s["dur"] for s in other["steps"]) / 2)
    metrics = read_metrics(tmp_path)
    plan = load_plan(tmp_path / PLAN_FILE)
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    for step in other["steps"]:
        own = [e for e in spans if step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] + 1e-3]
        computed = {
            (e["pid"], e["args"]["unit"], e["args"]["kind"], e["args"]["microbatch"]) for e in own if e["tid"] == 0
        }
        assert computed == {
            (unit.ranks[0], name, kind, mb)
            for name, unit in plan.units.items()
            for kind in "FB"
            for mb in range(plan.schedule.num_microbatches[name])
        }
        sent = sum(e["args"]["bytes"] for e in own if e["args"]["kind"] == "p2p")
        [edge] = metrics[step["step"] - 1]["edges"].values()
        assert sent == edge["bytes"] > 0
        assert edge["wait_s"] > 0
    assert len(spans) == sum(1 for e in spans for s in other["steps"] if s["ts"] <= e["ts"] <= s["ts"] + s["dur"])


@pytest.mark.slow  # `tests/runtime/test_stragglers.py` finds slow ranks in recorded steps
def test_a_slow_rank_is_named_in_the_metrics_and_in_the_report_of_a_failure(data: Path, tmp_path: Path) -> None:
    request = request_for(
        data, tmp_path, *TWO_REPLICAS, f"train.steps={STRAGGLER_WINDOW_STEPS + 1}", f"train.watchdog_s={WATCHDOG_S}"
    )
    code, message = launch(
        request, AllOf(FailAt(1, range(STRAGGLER_WINDOW_STEPS), "slow"), FailAt(0, STRAGGLER_WINDOW_STEPS, "hang"))
    )
    assert code == 1
    metrics = read_metrics(tmp_path)
    assert [step["step"] for step in metrics if step["slow_ranks"]] == [STRAGGLER_WINDOW_STEPS]
    named = [text for text in metrics[-1]["slow_ranks"] if text.startswith("rank 1 takes")]
    assert "the time of its peers for F vision.0" in named[0]
    lead, *rest = message.splitlines()
    assert lead.startswith(f"rank 0, step {STRAGGLER_WINDOW_STEPS + 1}, in `F vision.0 vision:0.0`: made no progress")
    assert rest[-1].startswith("  before that: ")
    assert named[0] in rest[-1]


def recorded_step() -> StepRecord:
    """Take one step of the encoder in parts between and inside the stages of an LLM pipeline."""
    settings, world = recipe(), World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    job = build_rank_context(settings, plan(settings, "explicit", PIPELINE, **GUESTS), world)
    return job.train(step_data(job, 0), lr=0.01).record


def test_parts_of_stages_are_drawn_where_they_ran() -> None:
    records = dict(enumerate(run_ranks(2, recorded_step)))
    settings = recipe()
    graph = stage_graph(plan(settings, "explicit", PIPELINE, **GUESTS), build_model_shape(settings))
    program = build_program(graph, kind="explicit", order=PIPELINE)
    timeline = measured_timeline(graph, records, lambda rank, action: 0)
    require_trace(chrome_trace(timeline, ""))
    for rank in records:
        todo = [a for a in expand_all(graph, program.for_rank(rank)) if isinstance(a, Compute)]
        assert any(isinstance(a, Partial) for a in todo)
        assert [s.action for s in timeline.spans if s.rank == rank and isinstance(s.action, Compute)] == todo


@pytest.mark.slow  # 20 s
def test_loads_of_experts_that_a_run_recorded_are_those_of_later_plans(data: Path, tmp_path: Path) -> None:
    settings = (
        "parallel.placement=unified", "parallel.llm.dp=2", "parallel.llm.ep=2", "train.checkpoint.every=0",
        "model.llm.moe={experts: 8, top_k: 2, ffn: 32}", "train.global_batch=8",
    )  # fmt: skip
    run = tmp_path / "run"
    request = request_for(data, run, f"train.steps={MEDIAN_STEPS}", *settings)
    assert run_all(request, request) == ["", ""]
    spreads = [step["experts"]["spread"] for step in read_metrics(run)]
    recorded = CostTable.load(run / RECORDED_COSTS_FILE).expert_spread
    assert recorded == statistics.median(spreads)
    assert "expert_spread 0.3, the default;" in _plan_text(load_plan(run / PLAN_FILE))
    for changes, spread, source in (
        ((), recorded, "as the run in `cluster.costs` recorded"),
        (("parallel.llm.expert_spread=0.25",), 0.25, "from the recipe"),
    ):
        recipe = request_for(data, tmp_path / "next", *settings, f"cluster.costs={run}", *changes).recipe
        lengths = build_index(recipe).lengths
        later = plan_recipe(recipe, lengths, world_size=2, hardware="cpu-core", recipe_sha256="x")
        assert later.predicted.experts is not None
        assert later.predicted.experts.spread == spread
        assert f"expert_spread {spread:.3g}, {source})" in _plan_text(later)
        mixture = planned_shape(later, build_model_shape(recipe)).unit("llm").layers[1].mlp
        assert mixture.load_spread == spread  # type: ignore[union-attr]


def _plan_text(plan: Plan) -> str:
    return " ".join(plan_table(plan).split())


@pytest.mark.slow
def test_records_of_a_run_that_is_done_are_costs_of_later_plans(data: Path, tmp_path: Path) -> None:
    """Its steps are the fewest that make a median. Another run has one less, and a third records nothing."""
    settings = ("parallel.placement=unified", "train.checkpoint.every=0")
    steps = {"done": (MEDIAN_STEPS, "tell"), "short": (MEDIAN_STEPS - 1, "tell"), "off": (MEDIAN_STEPS, "off")}
    for name, (num_steps, replan) in steps.items():
        changes = (f"train.steps={num_steps}", f"train.replan={replan}", *settings)
        request = request_for(data, tmp_path / name, *changes)
        assert run_all(request, request) == ["", ""]
        assert (tmp_path / name / RECORDED_COSTS_FILE).exists() == (name == "done")
    run = tmp_path / "done"
    table = CostTable.load(run / RECORDED_COSTS_FILE)
    assert table.run == str(run)
    assert all(scale.forward != 1.0 for scale in table.layer_scales)  # seconds are never as modelled to the last digit
    recipe = request_for(data, tmp_path / "next", *settings, f"cluster.costs={run}").recipe
    lengths = build_index(recipe).lengths
    later = plan_recipe(recipe, lengths, world_size=2, hardware="cpu-core", recipe_sha256="x")
    assert f"corrected by what the run {run} recorded" in later.predicted.cost_source
    other = request_for(data, tmp_path / "next", *settings, "model.llm.hidden=96", f"cluster.costs={run}").recipe
    with pytest.raises(PlanError, match="trained another model, and recorded nothing of these layers"):
        plan_recipe(other, lengths, world_size=2, hardware="cpu-core", recipe_sha256="x")
