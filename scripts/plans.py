"""The plan of a recipe, for scripts that run or measure it."""

from mmtrain.balance import SampleLengths
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.planner import plan
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.recipe import Recipe, recipe_fingerprint


def fastest_plan(
    recipe: Recipe, lengths: SampleLengths, num_ranks: int, hardware: str, request: PlanRequest | None = None
) -> Plan:
    """Search for the fastest plan on `num_ranks` ranks of a preset, without the hints that `mmtrain plan` adds.

    Raises PlanError where nothing fits.
    """
    return plan(
        formulate_problem(
            recipe,
            lengths,
            world_size=num_ranks,
            hardware=hardware,
            recipe_sha256=recipe_fingerprint(recipe),
            request=request,
        )
    )
