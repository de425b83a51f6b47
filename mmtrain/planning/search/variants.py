"""Variants of a planning problem: the same model with activations kept in another way, which leaves more memory.

Layers are recomputed one by one, as memory demands. What is varied here holds for all layers of a unit alike, so each
variant has costs of its own and is searched as a whole.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from mmtrain.models.shapes.layer_shape import shard_holds_experts
from mmtrain.models.shapes.model_shape import (
    OffloadMode,
    unit_offload,
    with_expert_parallelism,
    with_offload,
    with_recomputed_activations,
)
from mmtrain.planning.artifact.plan import AS_FAST_RATIO
from mmtrain.planning.evaluate.evaluator import Evaluator, KnownSchedules
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.sampled_loads import SampledLoads
from mmtrain.planning.layer_costs.token_splits import with_token_splits
from mmtrain.planning.search.strategies import StrategySearches, has_meshes
from mmtrain.planning.space.budget import QUICK_BUDGET, SearchBudget
from mmtrain.planning.space.candidate import SearchResults
from mmtrain.planning.space.problem import PlanningProblem, PlanRequest
from mmtrain.program.ir.graph import LLM

OFFLOAD_MODES: tuple[OffloadMode, ...] = ("inputs", "all")


def variants_of(
    problem: PlanningProblem,
    budget: SearchBudget,
    loads: SampledLoads | None = None,
    known_schedules: KnownSchedules | None = None,
    first: Evaluator | None = None,
) -> Iterator[Evaluator]:
    """Yield an evaluator of the problem as it is, then of its variants, from the cheapest way to make room on.

    There are at most 12: activations stay on the device, or in host memory by one of two modes, where the recipe leaves
    that open; activation functions keep their outputs or run again; and sequence parallelism is used where it costs no
    time, or wherever it may be. Each is made when the one before has been searched. All have the same loads, orders and
    programs.

    loads: of the problem's batches, if they are known already. known_schedules: of its stages, likewise. first: the
    evaluator of the problem as it is, if there is one; it then knows loads and schedules.
    """
    loads = first.layer_costs.loads if first else loads or SampledLoads(problem, budget)
    known_schedules = first.known_schedules if first else known_schedules or KnownSchedules.none(budget)
    for variant in (problem, *_with_activations_on_host(problem)):
        again = with_activations_again(variant)
        for varied in (variant,) if again is None else (variant, again):
            if varied is not problem:
                problem.request.say("nothing fits; trying other ways to keep activations")
            if varied is problem and first is not None:
                layer_costs = first.layer_costs
                yield first
            else:
                layer_costs = with_token_splits(varied, LayerCosts(varied, budget=budget, loads=loads))
                yield Evaluator(varied, budget, layer_costs, known_schedules)
            sharded_costs = with_token_splits(varied, layer_costs, sp_at_any_cost=True)
            if sharded_costs.sp != layer_costs.sp:
                yield Evaluator(varied, budget, sharded_costs, known_schedules)


def with_expert_ranks(problem: PlanningProblem, budget: SearchBudget) -> tuple[PlanningProblem, Evaluator | None]:
    """Return the problem with a number of ranks that hold the experts of a mixture together, where that is open.

    With it comes the evaluator of the search that found the number, if there was one.

    A search with little effort finds the fastest plan for each power of two that divides experts and replicas, in the
    first placement that is allowed: what ranks hold and exchange of experts hardly depends on where other units are.
    Where none of these plans fits, we take the number with the plan that is nearest to fitting: the more replicas hold
    experts together, the fewer stages are left, and each holds more of what lies beside the experts.
    """
    sizes = _expert_parallel_sizes(problem)
    if len(sizes) <= 1:
        return problem, None
    loads, known_schedules = SampledLoads(problem, budget), KnownSchedules.none(budget)
    fastest_s = least_gib = math.inf
    best: Evaluator | None = None
    steps_s: dict[int, float] = {}
    for ep in sizes:
        problem.request.say(f"trying experts on {ep} ranks")
        varied = with_experts_on(problem, ep)
        evaluator = next(variants_of(varied, budget, loads, known_schedules))
        first_placement = replace(varied.constraints, placements=varied.constraints.placements[:1])
        in_one_placement = evaluator.with_problem(replace(varied, constraints=first_placement))
        results = _quick_searches(in_one_placement, fastest_s).search()
        steps_s[ep] = step_s = results.fastest_s if results.fastest_s < fastest_s else math.inf
        if step_s * AS_FAST_RATIO < fastest_s:
            best, fastest_s = evaluator, step_s
        elif math.isinf(fastest_s) and results.least_need_gib < least_gib:
            best, least_gib = evaluator, results.least_need_gib
    if best is None:
        return replace(problem, expert_steps_s=steps_s), None
    best = best.with_problem(replace(best.problem, expert_steps_s=steps_s))
    return best.problem, best


def with_experts_on(problem: PlanningProblem, ep: int) -> PlanningProblem:
    """Return the problem whose LLM has the experts of each mixture on `ep` ranks."""
    constraints, choices = problem.constraints, problem.choices
    llm = replace(choices[LLM], ep=ep)
    return replace(
        problem,
        shape=with_expert_parallelism(problem.shape, ep),
        constraints=replace(constraints, choices={**choices, LLM: llm}),
    )


def _expert_parallel_sizes(problem: PlanningProblem) -> list[int]:
    """Return the degrees of expert parallelism to try; none where the recipe fixes it or there are no experts."""
    recipe, llm = problem.recipe, problem.choices[LLM]
    moe, shard = recipe.model.llm.moe, recipe.parallel.shard
    if moe is None or recipe.parallel.llm.ep is not None:
        return []
    most_replicas = max(dp * cp for dp, cp in product(llm.dp, llm.cp))
    sizes = [2**i for i in range(most_replicas.bit_length()) if moe.experts % 2**i == 0]
    if isinstance(shard, int):
        sizes = [ep for ep in sizes if shard_holds_experts(shard, ep)]
    return [ep for ep in sizes if _has_meshes_with(problem, ep)]


def _has_meshes_with(problem: PlanningProblem, ep: int) -> bool:
    """Return whether the first placement has meshes whose replicas hold the experts on `ep` ranks."""
    choices = {**problem.choices, LLM: replace(problem.choices[LLM], ep=ep)}
    placement = problem.constraints.placements[0]
    return any(has_meshes(choices, count, placement) for count in problem.cluster.rank_counts)


def with_faster_activations(evaluator: Evaluator, found: SearchResults) -> Evaluator | None:
    """Return an evaluator with activation functions that run again, if a quick search finds that over 1% faster.

    found: with the activations of `evaluator`. Only where its best plan recomputes layers can others be faster.
    """
    again = with_activations_again(evaluator.problem)
    if again is None or found.best is None:
        return None
    if not any(unit.num_recomputed for unit in found.best.layout.units.values()):
        return None
    again.request.say("trying activation functions that run again")
    evaluator.layer_costs.forget_times()  # two searches would keep as many, of which this one now needs few
    loads, known_schedules = evaluator.layer_costs.loads, evaluator.known_schedules
    running_again = next(variants_of(again, evaluator.budget, loads, known_schedules))
    limit_s = found.fastest_s / AS_FAST_RATIO
    return running_again if _quick_searches(running_again, limit_s).find_faster_than(limit_s) else None


def with_activations_again(problem: PlanningProblem) -> PlanningProblem | None:
    """Return the problem with activation functions that run again in all units for which the recipe allows it.

    None where that changes nothing.
    """
    settings = {
        unit.name: problem.recipe.parallel.of(unit.name).runs_activations_again
        for unit in problem.shape.units
        if unit.kind != "generator"
    }
    if "auto" not in settings.values():
        return None
    units = [name for name, setting in settings.items() if setting]
    shape = with_recomputed_activations(problem.shape, units)
    return None if shape == problem.shape else replace(problem, shape=shape)


def _with_activations_on_host(problem: PlanningProblem) -> Iterator[PlanningProblem]:
    """Yield the problem with each way to keep activations in host memory, in all units with `offload: auto`.

    None on hardware whose memory is the host's.
    """
    if problem.hardware.host_bytes_per_s is None:
        return
    units = [unit for unit in problem.shape.units if unit.kind != "generator"]
    open_units = [unit.name for unit in units if problem.recipe.parallel.of(unit.name).offload == "auto"]
    fixed = {unit.name: unit_offload(unit) for unit in units}
    for mode in OFFLOAD_MODES if open_units else ():
        yield replace(problem, shape=with_offload(problem.shape, {**fixed, **dict.fromkeys(open_units, mode)}))


def _quick_searches(evaluator: Evaluator, max_step_s: float) -> StrategySearches:
    """Return searches with little effort for plans whose step takes less than `max_step_s`."""
    request = PlanRequest(num_alternatives=0, max_step_s=max_step_s)
    return StrategySearches(evaluator.with_budget(QUICK_BUDGET, request))
