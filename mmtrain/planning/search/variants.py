"""Variants of a planning problem: the same model with activations kept in another way, which leaves more memory.

Layers are recomputed one by one, as memory demands. What is varied here holds for all layers of a unit alike, so each
variant has costs of its own and is searched as a whole.
"""

from collections.abc import Iterator
from dataclasses import replace

from mmtrain.models.shapes.model_shape import OffloadMode, unit_offload, with_offload, with_recomputed_activations
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.sampled_loads import SampledLoads
from mmtrain.planning.layer_costs.token_splits import with_token_splits
from mmtrain.planning.search.strategies import StrategySearches
from mmtrain.planning.space.budget import QUICK_BUDGET, SearchBudget
from mmtrain.planning.space.problem import PlanningProblem, PlanRequest

OFFLOAD_MODES: tuple[OffloadMode, ...] = ("inputs", "all")


def variants_of(
    problem: PlanningProblem, budget: SearchBudget, loads: SampledLoads | None = None
) -> Iterator[Evaluator]:
    """Yield an evaluator of the problem as it is, then of its variants, from the cheapest way to make room on.

    There are at most 12: activations stay on the device, or in host memory by one of two modes, where the recipe leaves
    that open; activation functions keep their outputs or run again; and sequence parallelism is used where it costs no
    time, or wherever it may be. Each is made when the one before has been searched. All have the same loads.

    loads: of the problem's batches, if they are known already.
    """
    loads = loads or SampledLoads(problem, budget)
    for variant in (problem, *_with_activations_on_host(problem)):
        again = with_activations_again(variant)
        for varied in (variant,) if again is None else (variant, again):
            if varied is not problem:
                problem.request.say("nothing fits; trying other ways to keep activations")
            layer_costs = with_token_splits(varied, LayerCosts(varied, budget=budget, loads=loads))
            yield Evaluator(varied, budget, layer_costs)
            sharded_costs = with_token_splits(varied, layer_costs, sp_at_any_cost=True)
            if sharded_costs.sp != layer_costs.sp:
                yield Evaluator(varied, budget, sharded_costs)


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


def has_faster_plan(problem: PlanningProblem, loads: SampledLoads, step_s: float) -> bool:
    """Return whether a search with little effort finds a plan whose step takes less than `step_s`.

    loads: of the problem's batches.
    """
    limited = replace(problem, request=PlanRequest(num_alternatives=0, max_step_s=step_s))
    layer_costs = with_token_splits(limited, LayerCosts(limited, budget=QUICK_BUDGET, loads=loads))
    best = StrategySearches(Evaluator(limited, QUICK_BUDGET, layer_costs)).results.best
    return best is not None and best.step_time_s < step_s
