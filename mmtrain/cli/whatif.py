"""Planning for hardware that is not here: the cluster as one word, and a sweep over numbers of GPUs."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mmtrain.errors import PlanError, UserError
from mmtrain.recipe import Recipe

if TYPE_CHECKING:
    from mmtrain.plan import Plan
    from mmtrain.report.scaling import ScalingPoint

_CLUSTER = "h100-80g:nodes=8, with nodes, ranks, ranks_per_node and memory_gib where they matter"


def cluster_overrides(text: str) -> list[str]:
    """The overrides that `--cluster h100:nodes=384,ranks_per_node=8` stands for.

    The hardware's name may be cut short while it stays clear. A table of measured costs belongs to another cluster
    and is left out. Raises UserError for what is not understood.
    """
    from mmtrain.costs import PRESETS, preset

    name, _, rest = text.partition(":")
    matches = [known for known in PRESETS if known.startswith(name)]
    hardware = preset(matches[0] if len(matches) == 1 else name)
    found: dict[str, float] = {}
    for part in rest.split(",") if rest else ():
        key, _, value = part.partition("=")
        if key not in ("nodes", "ranks", "ranks_per_node", "memory_gib"):
            raise UserError(f"--cluster {text}: {key!r} is not known; allowed: {_CLUSTER}")
        try:
            found[key] = float(value) if key == "memory_gib" else int(value)
        except ValueError:
            raise UserError(f"--cluster {text}: {key} is {value!r}; allowed: a number") from None
    if "nodes" in found and "ranks" in found:
        raise UserError(f"--cluster {text}: nodes and ranks both say how many; give one")
    per_node = found.get("ranks_per_node", hardware.ranks_per_node)
    ranks = found.get("ranks", found.get("nodes", 1) * per_node)
    settings = {
        "hardware": hardware.name,
        "ranks": ranks,
        "ranks_per_node": found.get("ranks_per_node", "null"),
        "memory_gib": found.get("memory_gib", "null"),
        "costs": "null",
    }
    return [f"cluster.{key}={value}" for key, value in settings.items()]


def parse_gpu_counts(text: str) -> list[int]:
    """The numbers of `--gpus 64,128,256`, rising. Raises UserError."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise UserError(f"--gpus {text}: allowed: numbers of at least 1 with commas, like 64,128,256")
    return found


def plan_for_each_count(
    recipe: Recipe, numbers: list[int], plan_for: "Callable[[Recipe], Plan]"
) -> "list[ScalingPoint]":
    """The plan of each number of GPUs, or why there is none; PlanError if there is none at all."""
    from mmtrain.report.scaling import ScalingPoint

    found = []
    for number in numbers:
        cluster = recipe.cluster.model_copy(update={"ranks": number})
        try:
            plan = plan_for(recipe.model_copy(update={"cluster": cluster}))
            found.append(ScalingPoint(number, plan, ""))
        except PlanError as error:
            found.append(ScalingPoint(number, None, str(error)))
    if all(one.plan is None for one in found):
        raise PlanError(f"--gpus: there is a plan for none of them; for {found[-1].gpus}, {found[-1].reason}")
    return found
