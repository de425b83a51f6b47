"""Find out whether sharded replicas would fit after a change, and which settings of theirs leave no room."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from mmtrain.planning.artifact.plan import Placement
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.search.replicated import enumerate_replicated, fit_replicated, shard_sizes
from mmtrain.planning.space.candidate import Candidate
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.recipe.settings.modalities import dotted_unit

PLACEMENT: Placement = "replicated"


def replicated_fits(evaluator: Evaluator) -> bool:
    """Return whether a candidate of `replicated` fits, if the problem has any; the largest shards are tried."""
    if PLACEMENT not in evaluator.problem.constraints.placements:
        return False
    alternatives = enumerate_replicated(evaluator.problem, evaluator)
    candidates = [candidate for numbers in alternatives for candidate in numbers]
    largest_first = sorted(candidates, key=lambda candidate: candidate.assignment.shard or 0, reverse=True)
    to_try = islice(largest_first, evaluator.budget.explanations.max_meshes_per_suggestion)
    return any(isinstance(fit_replicated(candidate, evaluator), Candidate) for candidate in to_try)


def replicated_fits_on(evaluator: Evaluator, num_ranks: int) -> bool:
    """Return whether a candidate of `replicated` would fit on so many ranks."""
    cluster = replace(evaluator.problem.cluster, num_ranks=num_ranks, rank_counts=(num_ranks,))
    larger = replace(evaluator.problem, cluster=cluster)
    return replicated_fits(Evaluator(larger, evaluator.budget, evaluator.layer_costs))


def suggest_replicated_settings(evaluator: Evaluator) -> Iterator[str]:
    """Suggest other values of settings that only `replicated` has, where the recipe fixes them.

    For each setting it is the first value with which a plan fits: the smallest larger shard, the fewest more
    mini-batches of an encoder, the exchange that holds less, and the other schedule.
    """
    problem = evaluator.problem
    if PLACEMENT not in problem.constraints.placements:
        return
    parallel = problem.recipe.parallel
    values: dict[str, list[object]] = {}
    if isinstance(parallel.shard, int):
        num_ranks = max(problem.cluster.rank_counts)
        sizes = shard_sizes(num_ranks, problem.hardware.ranks_per_node)
        values["shard"] = [size for size in sizes if size > parallel.shard]
    if parallel.zero == 1:
        values["zero"] = [3]
    if parallel.exchange == "all_gather":
        values["exchange"] = ["all_to_all"]
    if parallel.schedule != "auto":
        values["schedule"] = ["1f1b" if parallel.schedule == "encoder_first" else "encoder_first"]
    for setting, candidates in values.items():
        for value in candidates:
            if replicated_fits(evaluator_of_changed(_with_parallel(problem, **{setting: value}), evaluator)):
                yield f"parallel.{setting}: {value} (the recipe fixes {getattr(parallel, setting)})"
                break
    yield from _suggest_mini_batches(evaluator)


def _suggest_mini_batches(evaluator: Evaluator) -> Iterator[str]:
    """Suggest more, and so smaller, mini-batches of encoders whose number the recipe fixes."""
    problem = evaluator.problem
    fixed = problem.constraints.encoder_microbatches
    num_llm = problem.recipe.train.global_batch // max(problem.cluster.rank_counts)
    for unit, number in fixed.items():
        for more in range(number + 1, num_llm + 1):
            if num_llm % more:
                continue
            constraints = replace(problem.constraints, encoder_microbatches={**fixed, unit: more})
            if replicated_fits(evaluator_of_changed(replace(problem, constraints=constraints), evaluator)):
                yield f"parallel.{dotted_unit(unit)}.num_microbatches: {more} (the recipe fixes {number})"
                break


def _with_parallel(problem: PlanningProblem, **settings: object) -> PlanningProblem:
    """Return the problem under other settings of `parallel`."""
    recipe = problem.recipe
    parallel = recipe.parallel.model_copy(update=settings)
    return replace(problem, recipe=recipe.model_copy(update={"parallel": parallel}))


def evaluator_of_changed(problem: PlanningProblem, evaluator: Evaluator) -> Evaluator:
    """Return an evaluator of a changed problem, with the budget of another one and its way to split tokens."""
    layer_costs = LayerCosts(problem, evaluator.layer_costs.sp, evaluator.budget, evaluator.layer_costs.chunks)
    return Evaluator(problem, evaluator.budget, layer_costs)
