"""What to plan for where the recipe leaves it open: this machine."""

from typing import TYPE_CHECKING

from mmtrain.recipe import Recipe, sha256

if TYPE_CHECKING:
    from mmtrain.balance import SampleLengths
    from mmtrain.plan import Plan


def cluster_of(recipe: Recipe) -> tuple[int, str]:
    """Number of ranks and name of the hardware preset, the recipe's or this machine's.

    torch is asked, and so loaded, only where the recipe does not say: planning for a cluster elsewhere stays instant.
    Raises `PlanError` for a GPU without a preset.
    """
    from mmtrain.costs import preset_for_device

    cluster = recipe.cluster
    ranks, hardware = cluster.ranks, cluster.hardware
    if ranks is None or hardware == "auto":
        import torch

        has_gpu = torch.cuda.is_available()
        if hardware == "auto":
            hardware = preset_for_device(torch.cuda.get_device_name(0) if has_gpu else None)
        if ranks is None:
            ranks = torch.cuda.device_count() if has_gpu else 2  # two processes are the least that can cooperate
    return ranks, hardware


def plan_here(recipe: Recipe, lengths: "SampleLengths", num_ranks: int | None = None, top: int = 5) -> "Plan":
    """The plan for the recipe's cluster, or for this machine; on `num_ranks` ranks where their number is given."""
    from mmtrain.plan import plan

    ranks, hardware = cluster_of(recipe)
    sha = sha256(recipe)
    return plan(recipe, lengths, world_size=num_ranks or ranks, hardware=hardware, recipe_sha256=sha, top=top)
