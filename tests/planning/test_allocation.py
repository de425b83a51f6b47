"""The allocation of ranks to units is the best of all, and no better than the continuous one."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mmtrain.data import build_index
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.search.mesh_enumeration import bounded_mesh_assignments
from mmtrain.planning.search.strategies import allocate_ranks, relaxed_step_s
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.constraints import UnitChoices
from mmtrain.planning.space.problem import Allocation, AllocationWatch, PlanningProblem, PlanRequest
from tests.planning.exhaustive import Instance, all_candidates, fastest_found, least_step
from tests.planning.factory import UNET, evaluator_for, heard, problem_for, recipe, speech, with_generator, with_memory

MIB = 2**20

MODELS: dict[str, dict[str, Any]] = {
    "alike": {},
    "heavy encoder": {"vision": {"layers": 8, "hidden": 256, "heads": 4, "ffn": 1024, "patch": 8, "max_side": 8}},
    "heavy LLM": {"llm": {"layers": 6, "hidden": 256}, "global_batch": 32},
}


def allocated(problem: PlanningProblem, enumerates_all: bool = False) -> Allocation:
    """Allocate ranks by the clock of a stopped watch that shows 1 s more each time it is read."""
    reports: list[Allocation] = []
    times = iter((1.0, 2.0))
    meshes = replace(DEFAULT_BUDGET.meshes, max_ranks_to_enumerate_all=10_000 if enumerates_all else 0)
    budget = replace(DEFAULT_BUDGET, meshes=meshes)
    watch = AllocationWatch(times.__next__, reports.append)
    allocate_ranks(Evaluator(problem, budget), budget, watch)
    [allocation] = reports
    assert allocation.seconds == 1.0
    return allocation


def best_bound_s(evaluator: Evaluator, num_ranks: int) -> float:
    """Try every mesh of the LLM with every division of the other ranks among the other units; return the least bound.

    The bound of an allocation is that of its slowest unit. At most three units.
    """
    choices, bound = evaluator.problem.choices, evaluator.time_lower_bound
    llm = choices["llm"]
    others = [unit for unit in choices.values() if unit.name != "llm"]

    @cache
    def least_s(unit: UnitChoices, ranks: int, num_llm: int) -> float:
        merged = [size for size in DEFAULT_BUDGET.meshes.merged_microbatches if num_llm % size == 0]
        pairs = product(unit.meshes(ranks), merged)
        return min((bound(unit.name, mesh, num_llm // size) for mesh, size in pairs), default=float("inf"))

    best_s = float("inf")
    for tp, dp, pp, vpp in product(llm.tp, llm.dp, llm.pp, llm.vpp):
        num_llm = llm.global_batch // dp
        is_useful = vpp == 1 or (1 < pp <= num_llm and pp * vpp <= llm.num_layers)
        rest = num_ranks - tp * dp * pp
        if rest < len(others) or not is_useful:
            continue
        llm_s = bound("llm", MeshSize(tp, pp, dp, vpp), num_llm)
        if llm_s >= best_s:
            continue
        for of_first in range(1, rest + 1) if len(others) == 2 else [rest]:
            shares = [of_first, rest - of_first][: len(others)]
            of_others = (least_s(unit, ranks, num_llm) for unit, ranks in zip(others, shares, strict=True))
            best_s = min(best_s, max(llm_s, *of_others))
    return best_s


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [3, 12, 64])
def test_allocation_is_the_best_of_all_and_no_better_than_a_continuous_one(model: str, num_ranks: int) -> None:
    problem = problem_for(recipe(**MODELS[model]), world_size=num_ranks)
    evaluator = Evaluator(problem)
    allocation = allocated(problem)
    assert allocation.bound_s == pytest.approx(best_bound_s(evaluator, num_ranks), rel=1e-12)
    assert allocated(problem, enumerates_all=True).bound_s == allocation.bound_s
    assert sum(allocation.ranks.values()) == num_ranks
    assert allocation.relaxed_s <= allocation.bound_s


@pytest.mark.parametrize("num_ranks", [3, 12, 64])
@pytest.mark.parametrize("third", ["audio", "generator"])
def test_three_units_are_allocated_as_well_as_by_exhaustive_search(tmp_path: Path, third: str, num_ranks: int) -> None:
    settings = speech() if third == "audio" else with_generator(recipe(), tmp_path / "lengths.csv", UNET)
    samples = heard(settings) if third == "audio" else build_index(settings).lengths
    problem = formulate_problem(settings, samples, world_size=num_ranks, hardware="cpu-core", recipe_sha256="f" * 64)
    allocation = allocated(problem)
    assert len(allocation.ranks) == 3
    assert sum(allocation.ranks.values()) == num_ranks
    assert allocation.bound_s == pytest.approx(best_bound_s(Evaluator(problem), num_ranks), rel=1e-12)
    assert allocated(problem, enumerates_all=True).bound_s == allocation.bound_s
    assert allocation.relaxed_s <= allocation.bound_s


@pytest.mark.parametrize("memory_mib", [20, 14])  # the fastest plan of all on these ranks needs 27 MiB
def test_two_assignments_that_are_kept_hold_the_best_of_all_where_memory_is_tight(memory_mib: int) -> None:
    """By their bounds, which know of no recomputation, the two that are kept fit only with much of it, or not at all.

    The best is that of a simulation of every partition of every assignment.
    """
    vision = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "patch": 8, "max_side": 8}
    settings = recipe(vision=vision, llm={"layers": 4}, parallel={"placement": "disaggregated"})
    evaluator = with_memory(evaluator_for(settings), memory_mib * MIB)
    candidates = [c for c in all_candidates(evaluator, 4) if c.placement == "disaggregated"]
    best_s = least_step(Instance(evaluator, candidates))
    meshes = replace(DEFAULT_BUDGET.meshes, max_ranks_to_enumerate_all=0, max_assignments_per_rank_count=2)
    estimate = evaluator.mesh_time_estimate_within(1.0)
    choices, bound = evaluator.problem.choices, evaluator.time_lower_bound
    kept_by_bound, kept_by_estimate = (
        [
            evaluator.enumerated(assignment).bounded(bound_s)
            for bound_s, assignment in bounded_mesh_assignments(choices, 4, bound, meshes, estimate=seconds)
            if assignment.placement == "disaggregated"
        ]
        for seconds in (None, estimate)
    )
    assert fastest_found(Instance(evaluator, kept_by_bound)) > 1.1 * best_s
    assert fastest_found(Instance(evaluator, kept_by_estimate)) == pytest.approx(best_s)


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
    assert allocate_ranks(Evaluator(problem), DEFAULT_BUDGET, watch)
    assert not reports
