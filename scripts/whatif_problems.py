"""The planning problems of recipes/whatif, which several benchmarks look at from the inside."""

from collections.abc import Sequence
from pathlib import Path

from mmtrain.data import build_index
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.space.problem import PlanningProblem, PlanRequest
from mmtrain.recipe import load_recipe, recipe_fingerprint

WHAT_IF_FOLDER = Path(__file__).resolve().parents[1] / "recipes/whatif"


def whatif_problem(name: str, settings: Sequence[str] = (), request: PlanRequest | None = None) -> PlanningProblem:
    """Return the problem of planning a recipe with changed settings, on as many ranks as it names."""
    recipe = load_recipe(WHAT_IF_FOLDER / f"{name}.yaml", list(settings)).recipe
    assert recipe.cluster.ranks is not None, "what-if recipes name a cluster"
    return formulate_problem(
        recipe,
        build_index(recipe).lengths,
        world_size=recipe.cluster.ranks,
        hardware=recipe.cluster.hardware,
        recipe_sha256=recipe_fingerprint(recipe),
        request=request,
    )
