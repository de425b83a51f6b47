"""Ranks are allocated to units in the order of all estimates, none of them better than the continuous allocation."""

import math
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mmtrain.data import build_index
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.search import allocation_order
from mmtrain.planning.search.allocation_order import StepEstimate, ordered_assignments
from mmtrain.planning.search.strategies import allocate_ranks, relaxed_step_s
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.problem import Allocation, AllocationWatch, PlanningProblem, PlanRequest
from tests.planning.exhaustive import Instance, all_candidates, least_step
from tests.planning.factory import UNET, evaluator_for, heard, problem_for, recipe, speech, with_generator, with_memory
from tests.plans import best_first_search, mesh_assignments

MIB = 2**20

MODELS: dict[str, dict[str, Any]] = {
    "alike": {},
    "heavy encoder": {"vision": {"layers": 8, "hidden": 256, "heads": 4, "ffn": 1024, "patch": 8, "max_side": 8}},
    "heavy LLM": {"llm": {"layers": 6, "hidden": 256}, "global_batch": 32},
}


def allocated(problem: PlanningProblem) -> Allocation:
    """Allocate ranks by the clock of a stopped watch that shows 1 s more each time it is read."""
    reports: list[Allocation] = []
    times = iter((1.0, 2.0))
    meshes = replace(DEFAULT_BUDGET.meshes, max_ranks_to_enumerate_all=0)
    budget = replace(DEFAULT_BUDGET, meshes=meshes)
    watch = AllocationWatch(times.__next__, reports.append)
    allocate_ranks(Evaluator(problem, budget), budget, watch)
    [allocation] = reports
    assert allocation.seconds == 1.0
    return allocation


def estimate_of(evaluator: Evaluator) -> StepEstimate:
    times = evaluator.mesh_times
    return StepEstimate(times.filled_seconds, evaluator.mesh_time_estimate_within(1.0), times.round_trip)


def estimates_by_brute_force(evaluator: Evaluator, num_ranks: int) -> list[float]:
    """Estimate every assignment whose encoders have one chunk; return the fastest few of each mesh of the LLM."""
    estimate = estimate_of(evaluator)
    by_llm_mesh = defaultdict(list)
    for assignment in mesh_assignments(evaluator.problem.choices, num_ranks):
        others = [mesh for unit, mesh in assignment.meshes.items() if unit != "llm"]
        seconds = estimate.step_seconds(assignment) if assignment.placement == "disaggregated" else math.inf
        if all(mesh.vpp == 1 for mesh in others) and seconds < math.inf:
            by_llm_mesh[assignment.meshes["llm"]].append(seconds)
    kept = DEFAULT_BUDGET.meshes.max_assignments_per_llm_mesh
    return sorted(seconds for of_mesh in by_llm_mesh.values() for seconds in sorted(of_mesh)[:kept])


def ordered_estimates(evaluator: Evaluator, num_ranks: int) -> list[float]:
    """Return the estimates in the order in which the allocation tries assignments."""
    choices, estimate = evaluator.problem.choices, estimate_of(evaluator)
    ordered = list(ordered_assignments(choices, num_ranks, estimate, DEFAULT_BUDGET.meshes))
    assert all(assignment.ranks == num_ranks for _, assignment in ordered)
    assert all(estimate.step_seconds(assignment) == seconds for seconds, assignment in ordered)
    return [seconds for seconds, _ in ordered]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [3, 12, 24])
def test_assignments_come_in_the_order_of_all_their_estimates(model: str, num_ranks: int) -> None:
    problem = problem_for(recipe(**MODELS[model]), world_size=num_ranks)
    evaluator = Evaluator(problem)
    estimates = ordered_estimates(evaluator, num_ranks)
    assert estimates == pytest.approx(estimates_by_brute_force(evaluator, num_ranks), rel=1e-12)
    allocation = allocated(problem)
    assert allocation.step_s == estimates[0]
    assert sum(allocation.ranks.values()) == num_ranks
    assert allocation.relaxed_s <= allocation.step_s


def test_choices_that_were_left_out_come_when_their_turn_does(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = Evaluator(problem_for(recipe(**MODELS["heavy encoder"]), world_size=24))
    estimates = ordered_estimates(evaluator, 24)
    monkeypatch.setattr(allocation_order, "NUM_FIRST_CHOICES", 2)
    monkeypatch.setattr(allocation_order, "MAX_KEPT_CHOICES", 1)
    assert ordered_estimates(evaluator, 24) == estimates


@pytest.mark.parametrize("num_ranks", [3, 12])
@pytest.mark.parametrize("third", ["audio", "generator"])
def test_three_units_come_in_that_order_too(tmp_path: Path, third: str, num_ranks: int) -> None:
    settings = speech() if third == "audio" else with_generator(recipe(), tmp_path / "lengths.csv", UNET)
    samples = heard(settings) if third == "audio" else build_index(settings).lengths
    problem = formulate_problem(settings, samples, world_size=num_ranks, hardware="cpu-core", recipe_sha256="f" * 64)
    evaluator = Evaluator(problem)
    estimates = ordered_estimates(evaluator, num_ranks)
    assert estimates == pytest.approx(estimates_by_brute_force(evaluator, num_ranks), rel=1e-12)
    allocation = allocated(problem)
    assert len(allocation.ranks) == 3
    assert allocation.relaxed_s <= allocation.step_s == estimates[0]


@pytest.mark.parametrize("memory_mib", [20, 14])  # the fastest plan of all on these ranks needs 27 MiB
def test_the_best_of_all_is_found_where_memory_is_tight_without_looking_at_all(memory_mib: int) -> None:
    """The best is that of a simulation of every partition of every assignment."""
    vision = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "patch": 8, "max_side": 8}
    settings = recipe(vision=vision, llm={"layers": 4}, parallel={"placement": "disaggregated"})
    evaluator = with_memory(evaluator_for(settings), memory_mib * MIB)
    candidates = [c for c in all_candidates(evaluator, 4) if c.placement == "disaggregated"]
    best_s = least_step(Instance(evaluator, candidates))
    meshes = replace(DEFAULT_BUDGET.meshes, max_ranks_to_enumerate_all=0, num_first_assignments=1)
    budget = replace(DEFAULT_BUDGET, meshes=meshes)
    problem = replace(evaluator.problem, cluster=replace(evaluator.problem.cluster, num_ranks=4, rank_counts=(4,)))
    searching = Evaluator(problem, budget)
    results = best_first_search(allocate_ranks(searching, budget), searching, num_simulated=1)
    assert results.fastest_s == pytest.approx(best_s)
    assert len(results.enumerated) < len(candidates) / 2, len(candidates)


def test_the_continuous_allocation_is_shared_in_proportion_to_work() -> None:
    """Solve the relaxation by bisection over the step time instead: each unit takes as many ranks as it then needs."""
    evaluator = evaluator_for(recipe())
    choices, bound = evaluator.problem.choices, evaluator.time_lower_bound
    least_rank_s = {
        name: min(
            bound(name, MeshSize(tp, pp, dp), None) * tp * pp * dp
            for tp, pp, dp in product(unit.tp, unit.pp, unit.dp)
            if tp * pp * dp <= 16
        )
        for name, unit in choices.items()
    }
    low_s, high_s = 0.0, sum(least_rank_s.values())
    for _ in range(200):
        step_s = (low_s + high_s) / 2
        is_enough = sum(rank_s / step_s for rank_s in least_rank_s.values()) <= 16
        low_s, high_s = (low_s, step_s) if is_enough else (step_s, high_s)
    assert relaxed_step_s(choices, 16, bound) == pytest.approx(high_s)


def test_nothing_is_reported_where_units_share_all_ranks() -> None:
    problem = problem_for(recipe(parallel={"placement": "unified"}), world_size=2)
    reports: list[Allocation] = []
    watch = AllocationWatch(lambda: 0.0, reports.append)
    problem = replace(problem, request=PlanRequest(allocation_watch=watch))
    assert allocate_ranks(Evaluator(problem), DEFAULT_BUDGET, watch).listed
    assert not reports


def test_what_cannot_fit_is_left_out_where_ranks_are_allocated_again() -> None:
    evaluator = with_memory(Evaluator(problem_for(recipe(), world_size=12)), 1e4)
    allocated = allocate_ranks(evaluator, DEFAULT_BUDGET)
    assert allocated.first, "those that split units most say why nothing fits"
    assert all(math.isinf(candidate.time_lower_bound_s) for _, candidate in allocated.first)
    assert allocated.only("disaggregated")[:2] == ([], [])
