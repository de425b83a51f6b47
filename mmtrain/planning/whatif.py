"""Plans of other problems than the recipe's: the model without media, nearby settings, the data seen so far."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from mmtrain.balance import SampleLengths
from mmtrain.errors import UserError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.advise.baselines import BaselinePlanner
from mmtrain.planning.advise.sharded_baselines import SHARDED_RULES
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_change import with_present
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.simulate_plan import simulate_plan
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.token_splits import with_token_splits
from mmtrain.planning.planner import plan as search_plan
from mmtrain.planning.planner import search_placements
from mmtrain.planning.search.strategies import StrategySearches
from mmtrain.planning.space.budget import QUICK_BUDGET
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.planning.space.sample_batches import SampledBatches
from mmtrain.program.ir.graph import LLM
from mmtrain.recipe.settings.parallel_settings import ParallelSettings
from mmtrain.recipe.settings.schema import Recipe

MIN_GAIN = 1.1  # in tokens/s, below which there is no hint
MAX_BATCH_CHANGE = 0.1  # share of the global batch by which another one may differ
MAX_RANKS_LEFT_OUT = 0.25  # share of the ranks
MIN_DIVISOR_RATIO = 2  # by how much the common divisor of batch and ranks must grow before a plan is tried


def with_text_only(plan: Plan, recipe: Recipe, lengths: SampleLengths) -> Plan:
    """Return the plan with the throughput of its LLM alone: same tokens, same ranks, sizes free.

    Unchanged for a model without encoders, for one whose LLM does not train, and where the LLM alone has no plan.
    """
    is_trained = any(layer.trainable for layer in build_model_shape(recipe).unit(LLM).layers)
    if len(plan.units) == 1 or "generator" in plan.units or not is_trained:
        return plan
    model = recipe.model.model_copy(update={"vision": None, "audio": None, "encoders": {}})
    of_llm = recipe.parallel.llm.model_dump(include={"recompute", "sp", "tp_overlap"})
    parallel = ParallelSettings.model_validate({"llm": of_llm})
    problem_recipe = recipe.model_copy(update={"model": model, "parallel": parallel})
    try:
        problem = formulate_problem(
            problem_recipe,
            SampleLengths(lengths.tokens, lengths.targets, {}),
            world_size=plan.world_size,
            hardware=plan.hardware,
            recipe_sha256=plan.recipe_sha256,
            request=PlanRequest(num_alternatives=0),
        )
        if not problem.cluster.rank_counts:
            return plan
        evaluator, results = search_placements(problem, QUICK_BUDGET)
    except UserError:  # patterns or sizes that need an encoder, or nothing fits
        return plan
    tokens_per_s = evaluator.layer_costs.loads.tokens() / results.fastest_s / plan.world_size
    predicted = plan.predicted.model_copy(update={"text_only_tokens_per_s_per_gpu": tokens_per_s})
    return plan.model_copy(update={"predicted": predicted})


def describe_faster_nearby(recipe: Recipe, lengths: SampleLengths, plan: Plan) -> list[str]:
    """Return a sentence for another batch, and one for fewer ranks, that is over 10% faster.

    At most one of each is planned, roughly, and only where data-parallel degrees divide it much better: what is said is
    what a plan reaches at least. Searches end where no plan can be so much faster.
    """
    sentences = []
    batch, num_ranks = recipe.train.num_groups, plan.world_size
    for other in _better_divided(batch, num_ranks, _nearest(batch, MAX_BATCH_CHANGE, both_ways=True)):
        gain = _gain(recipe.with_groups(other, recipe.data.group_tokens), lengths, plan, num_ranks)
        if gain >= MIN_GAIN:
            sentences.append(f"train.global_batch {other} instead of {batch}: at least {gain - 1:.0%} more tokens/s.")
    for other in _better_divided(num_ranks, batch, _nearest(num_ranks, MAX_RANKS_LEFT_OUT, both_ways=False)):
        gain = _gain(recipe, lengths, plan, other)
        if gain >= MIN_GAIN:
            sentences.append(f"{other} ranks instead of {num_ranks}: at least {gain - 1:.0%} more tokens/s.")
    return sentences


def _nearest(number: int, share: float, both_ways: bool) -> list[int]:
    """Return other numbers within a share of this one, the nearest first."""
    most = int(number * share)
    others = [number + sign * distance for distance in range(1, most + 1) for sign in ((1, -1) if both_ways else (-1,))]
    return [other for other in others if other > 0]


def _better_divided(number: int, partner: int, others: list[int]) -> Iterator[int]:
    """Yield the one of the other numbers that has most in common with `partner`, if that is much more than now."""
    best = max(others, key=lambda other: math.gcd(other, partner), default=number)
    if math.gcd(best, partner) >= MIN_DIVISOR_RATIO * math.gcd(number, partner):
        yield best


def _gain(recipe: Recipe, lengths: SampleLengths, plan: Plan, num_ranks: int) -> float:
    """Return how many times as many tokens/s a plan reaches that is sought with little effort; 0 if below `MIN_GAIN`.

    Where memory leaves no plan without sequence parallelism at any cost, none is found.
    """
    tokens_per_s = plan.predicted.tokens_per_s_per_gpu * plan.world_size
    limit = tokens_per_s * MIN_GAIN
    found = quick_tokens_per_s(recipe, lengths, num_ranks, plan.hardware, plan.recipe_sha256, limit)
    return found / tokens_per_s


def quick_tokens_per_s(
    recipe: Recipe,
    lengths: SampleLengths,
    num_ranks: int,
    hardware: str,
    recipe_sha256: str,
    min_tokens_per_s: float = 0.0,
    baseline: str | None = None,
) -> float:
    """Return the tokens/s of a plan on all ranks that is sought with little effort; 0 if none reaches the minimum.

    baseline: a rule of thumb that makes the plan in place of the search; what it reaches is returned, whatever that is.
    """
    try:
        problem = formulate_problem(
            recipe,
            lengths,
            world_size=num_ranks,
            hardware=hardware,
            recipe_sha256=recipe_sha256,
            request=PlanRequest(num_alternatives=0),
            budget=QUICK_BUDGET,
        )
        if not problem.cluster.rank_counts:
            return 0.0
        layer_costs = LayerCosts(problem, budget=QUICK_BUDGET)
        tokens = layer_costs.loads.tokens()
        if min_tokens_per_s and baseline is None:
            problem = replace(problem, request=replace(problem.request, max_step_s=tokens / min_tokens_per_s))
        split_costs = with_token_splits(problem, layer_costs)
        evaluator = Evaluator(problem, QUICK_BUDGET, split_costs)
        if baseline is None:
            best = StrategySearches(evaluator).search().best
        else:  # sharded baselines need no meshes
            meshes = () if baseline in SHARDED_RULES else StrategySearches(evaluator).search().enumerated
            best = BaselinePlanner(evaluator, meshes).plan_baseline(baseline)
    except UserError:
        return 0.0
    return 0.0 if best is None else tokens / best.step_time_s


def plan_again(recipe: Recipe, lengths: SampleLengths, *, present: Plan, costs: Path) -> Plan:
    """Return the fastest plan by the table `costs`, for the ranks and under the fingerprint of the present plan.

    Both plans are predicted by the same program simulation on the same batches, so that their times compare.

    Raises:
        PlanError: the table cannot be read, or nothing fits.
    """
    cluster = recipe.cluster.model_copy(update={"costs": costs})
    parallel = recipe.parallel.model_copy(update={"max_gpus": None})  # the ranks run already
    recorded = recipe.model_copy(update={"cluster": cluster, "parallel": parallel})
    problem = formulate_problem(
        recorded,
        lengths,
        world_size=present.world_size,
        hardware=present.hardware,
        recipe_sha256=present.recipe_sha256,
    )
    plan = search_plan(problem)
    predicted = plan.predicted.model_copy(update={"step_time_s": _step_s(recorded, plan, problem.batches)})
    plan = plan.model_copy(update={"predicted": predicted})
    return with_present(plan, present, _step_s(recorded, present, problem.batches))


def _step_s(recipe: Recipe, plan: Plan, batches: SampledBatches) -> float:
    """Return the simulated step time of a plan, mean over the batches."""
    data_parallel = {name: unit.dp for name, unit in plan.units.items()}
    laid_out = batches.lay_out(data_parallel, plan.schedule.num_microbatches)
    return fmean(simulate_plan(recipe, plan, batch).step_time_s for batch in laid_out)
