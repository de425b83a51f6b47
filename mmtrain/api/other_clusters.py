"""Plan for other hardware: parse `--cluster` and `--gpus`, and plan for each number of GPUs."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mmtrain.errors import PlanError, UserError
from mmtrain.recipe import Recipe

if TYPE_CHECKING:
    from mmtrain.planning import Plan
    from mmtrain.report.scaling import ScalingPoint

_CLUSTER_SYNTAX = "HARDWARE:KEY=VALUE,... with keys nodes, ranks, ranks_per_node, memory_gib, as in h100-80g:nodes=8"


def cluster_overrides(text: str) -> list[str]:
    """Translate `--cluster h100:nodes=384,ranks_per_node=8` into recipe overrides.

    A unique prefix of a hardware preset's name is enough. The overrides remove `cluster.costs`, since a measured table
    belongs to another cluster. Raises UserError for a key or value that is not understood.
    """
    from mmtrain.costs import preset

    name, _, rest = text.partition(":")
    hardware = preset(name)
    values: dict[str, float] = {}
    for part in rest.split(",") if rest else ():
        key, _, value = part.partition("=")
        if key not in ("nodes", "ranks", "ranks_per_node", "memory_gib"):
            raise UserError(f"--cluster {text}: {key!r} is not known; allowed: {_CLUSTER_SYNTAX}")
        try:
            values[key] = float(value) if key == "memory_gib" else int(value)
        except ValueError:
            raise UserError(f"--cluster {text}: {key} is {value!r}; allowed: a number") from None
    if "nodes" in values and "ranks" in values:
        raise UserError(f"--cluster {text}: nodes and ranks both set the size; give one of them")
    per_node = values.get("ranks_per_node", hardware.ranks_per_node)
    ranks = values.get("ranks", values.get("nodes", 1) * per_node)
    settings = {
        "hardware": hardware.name,
        "ranks": ranks,
        "ranks_per_node": values.get("ranks_per_node", "null"),
        "memory_gib": values.get("memory_gib", "null"),
        "costs": "null",
    }
    return [f"cluster.{key}={value}" for key, value in settings.items()]


def parse_gpu_counts(text: str) -> list[int]:
    """Parse `--gpus 64,128,256` into ascending numbers. Raises UserError."""
    try:
        gpu_counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        gpu_counts = []
    if not gpu_counts or gpu_counts[0] < 1:
        raise UserError(f"--gpus {text}: allowed: numbers of at least 1, separated by commas, like 64,128,256")
    return gpu_counts


def plan_for_each_count(
    recipe: Recipe, gpu_counts: list[int], plan_for: "Callable[[Recipe], Plan]"
) -> "list[ScalingPoint]":
    """Plan the recipe for each number of GPUs; a point without a plan holds the reason.

    Raises PlanError if no number of GPUs has a plan.
    """
    from mmtrain.report.scaling import ScalingPoint

    points = []
    for gpus in gpu_counts:
        cluster = recipe.cluster.model_copy(update={"ranks": gpus})
        try:
            plan = plan_for(recipe.model_copy(update={"cluster": cluster}))
            points.append(ScalingPoint(gpus, plan, ""))
        except PlanError as error:
            points.append(ScalingPoint(gpus, None, str(error)))
    if all(point.plan is None for point in points):
        largest = points[-1]
        raise PlanError(f"--gpus: no plan exists for any of these numbers; for {largest.gpus}: {largest.reason}")
    return points
