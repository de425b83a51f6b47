"""The cluster that a recipe is planned for, or this machine where the recipe leaves it open."""

from pathlib import Path

from mmtrain.extras import TRAIN, require_extra
from mmtrain.recipe import Recipe

# What the drivers of the GPUs that torch.cuda knows create: NVIDIA's, NVIDIA's under WSL, AMD's.
GPU_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
NUM_RANKS_WITHOUT_GPU = 2  # the fewest that exercise communication


def resolve_cluster(recipe: Recipe) -> tuple[int, str]:
    """Return the number of ranks and the name of the hardware preset: the recipe's, else this machine's.

    Loads torch only where the recipe leaves one of them open and this machine has a GPU, since loading it takes longer
    than most plans. A GPU without a preset is measured. Raises PlanError for GPUs that differ too much.
    """
    cluster = recipe.cluster
    ranks, hardware = cluster.ranks, cluster.hardware
    if ranks is None or hardware == "auto":
        num_gpus = _count_gpus()
        if hardware == "auto":
            hardware = _local_hardware(num_gpus)
        if ranks is None:
            ranks = num_gpus or NUM_RANKS_WITHOUT_GPU
    from mmtrain.costs.find_hardware import preset

    return min(ranks, recipe.parallel.max_gpus or ranks), preset(hardware).name


def _count_gpus() -> int:
    if not any(file.exists() for file in GPU_DRIVER_FILES):
        return 0
    require_extra(TRAIN, "finding the GPUs of this machine", "state cluster.ranks and cluster.hardware")
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _local_hardware(num_gpus: int) -> str:
    if not num_gpus:
        return "cpu-core"
    from mmtrain.runtime.world import detect_hardware

    return detect_hardware()


def require_costs(recipe: Recipe) -> None:
    """Read the recipe's cost table before anything slow starts; print which layers of the model it does not hold.

    Raises PlanError for a table that is damaged, contradictory or empty, or was made for other hardware or precision.
    """
    table = recipe.cluster.costs
    if table is None:
        return
    from mmtrain.api.recipe_index import print_note
    from mmtrain.costs.choose import costs_of_recipe, layers_without_entry
    from mmtrain.models.shapes.model_shape import build_model_shape

    _, hardware = resolve_cluster(recipe)
    missing = layers_without_entry(costs_of_recipe(recipe, hardware), build_model_shape(recipe))
    if missing:
        print_note(
            f"cluster.costs: {table} has no entry for these layers ({'; '.join(missing)}): they are modelled from the "
            "hardware preset; `mmtrain profile` on such hardware measures them"
        )
