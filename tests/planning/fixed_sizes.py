"""Search with and without fixed degrees of units: what the recipe fixes must never make a plan faster."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mmtrain.data import build_index
from mmtrain.errors import PlanError, RecipeError
from mmtrain.planning.colocated.colocated_search import ColocatedStrategy
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.search.strategies import PIPELINED, PlacementStrategy
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.recipe import load_recipe

WHAT_IF = Path(__file__).parents[2] / "recipes" / "whatif"
CLOSE = 1.01
STRATEGIES: dict[str, PlacementStrategy] = {"disaggregated": PIPELINED, "colocated": ColocatedStrategy()}
Degrees = Mapping[tuple[str, str], int]  # (unit, degree) -> size
LARGE_RECIPE, LARGE_BATCH = "papers/mmscale_7b", 1920  # the paper's own
LARGE_SIZES = (960, 1152, 1296)


def problem_of(name: str, placement: str, num_ranks: int, global_batch: int, fixed: Degrees) -> PlanningProblem:
    """Return the problem of planning a what-if recipe for one placement, with some degrees of units fixed."""
    settings = {
        "parallel.placement": placement,
        "cluster.ranks": num_ranks,
        "train.global_batch": global_batch,
        **{f"parallel.{unit}.{degree}": size for (unit, degree), size in fixed.items()},
    }
    recipe = load_recipe(WHAT_IF / f"{name}.yaml", [f"{key}={value}" for key, value in settings.items()]).recipe
    lengths, hardware = build_index(recipe).lengths, recipe.cluster.hardware
    return formulate_problem(recipe, lengths, world_size=num_ranks, hardware=hardware, recipe_sha256="f" * 64)


def least_step(placement: str, problem: PlanningProblem) -> float:
    """Return the seconds of the fastest plan that the search finds; infinite without any."""
    try:
        found = STRATEGIES[placement].search(Evaluator(problem), None).results
        return found.fastest_s if problem.cluster.rank_counts else float("inf")
    except PlanError:
        return float("inf")


def steps_of_fixed(
    name: str, placement: str, num_ranks: int, global_batch: int, draws: Iterable[Degrees]
) -> Iterator[tuple[Degrees, float]]:
    """Yield degrees that the recipe's own rules allow, such as no pipeline of a U-Net, with the least step of each."""
    for fixed in draws:
        try:
            problem = problem_of(name, placement, num_ranks, global_batch, fixed)
        except RecipeError:
            continue
        yield fixed, least_step(placement, problem)


def large_degrees(num_ranks: int) -> list[tuple[tuple[str, str], int]]:
    """Return degrees that a unit of the large recipe may have: tp and pp up to 8, and dp from a 32nd of the ranks on.

    Smaller dp of the LLM have so many microbatches that one search takes minutes.
    """
    dps = [dp for dp in range(num_ranks // 32, num_ranks + 1) if LARGE_BATCH % dp == 0]
    sizes = {"tp": (1, 2, 4, 8), "pp": range(1, 9), "dp": dps}
    return [((unit, degree), n) for unit in ("vision", "llm", "generator") for degree in sizes for n in sizes[degree]]
