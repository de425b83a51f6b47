"""What to plan for where the recipe leaves it open: this machine."""

from mmtrain.recipe import Recipe


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
