"""What layers of encoder and LLM keep is estimated apart from two runs, and used where the count is wrong."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.costs import AnalyticCosts, MeasuredCosts, preset
from mmtrain.costs.hardware import GIB
from mmtrain.costs.recorded_costs import with_activation_ratios
from mmtrain.errors import PlanError
from mmtrain.models import build_model_shape
from mmtrain.planning import Plan, load_plan
from mmtrain.planning.advise.unit_memory import activation_ratios, corrected_evaluator, counted_memory_of
from mmtrain.planning.artifact.graph_memory import schedule_in_flight
from mmtrain.planning.artifact.plan import StepMeasurement
from mmtrain.planning.artifact.plan_memory import DeviceMemory, plan_memory, prove_memory
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.planner import plan, search_placements
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.candidate import Candidate
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.recipe.settings.schema import Recipe
from tests.planning.factory import VISION, problem_for, recipe

MEMORY_GIB = 0.034
TRUTH = {"vision": 0.3, "llm": 0.95}  # of the bytes that are counted for activations
PARALLEL = {"placement": "unified", "llm": {"tp": 1, "pp": 2}}


def refitted(candidate: Candidate, evaluator: Evaluator, memory_gib: float) -> Candidate:
    """Return the candidate with the recomputation that so much memory asks for."""
    assert candidate.partition is not None
    in_flight = schedule_in_flight(candidate.fitted_graph, candidate.schedule)
    start = Candidate(candidate.id, candidate.assignment).partitioned(candidate.partition)
    fitted = evaluator.fit(start, in_flight, memory_gib * GIB)
    assert isinstance(fitted, Candidate)
    return evaluator.simulate(fitted)


def as_run(candidate: Candidate, evaluator: Evaluator, truth: Mapping[str, float]) -> Candidate:
    """Return the candidate as if ranks had held what `truth` says of activations, and the rest as counted."""
    held = counted_memory_of(candidate, corrected_evaluator(evaluator, truth))
    ratios = tuple(held[rank].total / candidate.memory[rank].total for rank in sorted(held))
    return candidate.measured(StepMeasurement(1.0, max(ratios), ratios))


def test_two_runs_that_recompute_differently_tell_encoder_and_llm_apart() -> None:
    """The first pipeline rank holds the encoder and a part of the LLM, the second one the rest of the LLM."""
    settings = recipe(parallel=PARALLEL, cluster={"memory_gib": 0.02})
    evaluator, results = search_placements(problem_for(settings, world_size=2), DEFAULT_BUDGET)
    [fitted, larger] = [refitted(results.candidates[0], evaluator, gib) for gib in (0.02, 0.024)]
    for unit in ("vision", "llm"):
        assert fitted.layout.units[unit].num_recomputed != larger.layout.units[unit].num_recomputed
    runs = [as_run(candidate, evaluator, TRUTH) for candidate in (fitted, larger)]
    assert activation_ratios(*runs, evaluator) == pytest.approx(TRUTH, rel=0.01)
    assert activation_ratios(runs[0], runs[0], evaluator) is None, "nothing was recomputed otherwise"
    unknown = larger.measured(StepMeasurement(1.0, 0.9))
    assert activation_ratios(runs[0], unknown, evaluator) is None, "what each rank held is not known"


def num_recomputed(planned: Plan) -> int:
    return sum(len(stage.recompute) for unit in planned.units.values() for stage in unit.stages)


def planned_by_runs(settings: Recipe, folder: Path, *, tells_ranks: bool) -> Plan:
    """Plan where activations of each unit take what `TRUTH` says, and runs end without memory if that is too much."""
    shape, machine = build_model_shape(settings), preset("cpu-core")
    truth = with_activation_ratios(AnalyticCosts(machine, "fp32"), machine, "fp32", shape, TRUTH)
    assert isinstance(truth, MeasuredCosts)
    truth.table.save(folder / "truth.json")
    cluster = settings.cluster.model_copy(update={"costs": folder / "truth.json"})
    true_settings = settings.model_copy(update={"cluster": cluster})

    def measure(plans: Sequence[Plan]) -> list[StepMeasurement]:
        steps = []
        for candidate in plans:
            counted = plan_memory(settings, candidate, shape)
            held = plan_memory(true_settings, candidate, shape)
            ratios = tuple(held[rank].total / counted[rank].total for rank in sorted(held))
            if max(of_rank.total for of_rank in held.values()) > MEMORY_GIB * GIB:
                steps.append(StepMeasurement(math.inf, max(ratios), is_out_of_memory=True))
            else:
                by_rank = ratios if tells_ranks else ()
                steps.append(StepMeasurement(1.0 + num_recomputed(candidate), max(ratios), by_rank))
        return steps

    request = PlanRequest(num_alternatives=1, num_measured=1, measure=measure)
    return plan(replace(problem_for(settings, world_size=2), request=request))


def test_fewer_layers_are_recomputed_than_one_factor_for_all_allows(tmp_path: Path) -> None:
    """The LLM's rank holds nearly what is counted, so one factor for all takes nothing back from the encoder."""
    settings = recipe(
        vision={**VISION, "layers": 8}, llm={"layers": 6}, parallel=PARALLEL, cluster={"memory_gib": MEMORY_GIB}
    )
    by_one_factor = planned_by_runs(settings, tmp_path, tells_ranks=False)
    by_unit = planned_by_runs(settings, tmp_path, tells_ranks=True)
    assert num_recomputed(by_unit) < num_recomputed(by_one_factor) / 2
    assert by_unit.measured is not None
    first, second = by_unit.measured.ratio_by_rank.values()
    assert first < second < 1
    assert max(by_unit.predicted.peak_memory_gib.values()) > MEMORY_GIB, "it fits only as run"
    shape, device = build_model_shape(settings), DeviceMemory(MEMORY_GIB * GIB, "a rank")
    prove_memory(settings, by_unit, shape, device)
    of_all = by_unit.measured.model_copy(update={"ratio_by_rank": {}})
    with pytest.raises(PlanError, match="does not fit this device"):
        prove_memory(settings, by_unit.model_copy(update={"measured": of_all}), shape, device)
    assert load_plan_text(by_unit, tmp_path) == by_unit


def load_plan_text(saved: Plan, folder: Path) -> Plan:
    """Return a plan as it is read from its file."""
    saved.save(folder / "plan.json")
    return load_plan(folder / "plan.json")
