"""Plan again with recorded costs, and predict the present plan with them too."""

from pathlib import Path
from statistics import fmean

from mmtrain.balance import SampleLengths
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_change import with_present
from mmtrain.planning.evaluate.simulate_plan import simulate_plan
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.planner import plan as search_plan
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.planning.space.sample_batches import SampledBatches
from mmtrain.recipe.settings.schema import Recipe


def plan_again(recipe: Recipe, lengths: SampleLengths, *, present: Plan, costs: Path, can_shard: bool = True) -> Plan:
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
        request=PlanRequest(can_shard=can_shard),
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
