"""Let every rank of an evaluation run the whole model."""

from mmtrain.costs.hardware import ELEMENT_BYTES, GIB
from mmtrain.costs.layer_arithmetic import num_parameters
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import StagePlan, UnitPlan
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.precision import precision_on_device
from mmtrain.runtime.resilience.device_memory import smallest_device_memory
from mmtrain.runtime.world import World, detect_hardware

# Of a device's memory. The rest is for keys and values, activations, the decoder of latents and the allocator.
MAX_SHARE_OF_WEIGHTS = 0.6


def whole_model(recipe: Recipe, num_ranks: int, *, sharded: bool = False) -> dict[str, UnitPlan]:
    """Return a layout in which each rank runs every unit as one stage; `sharded`: all ranks hold one copy together."""
    ranks = tuple(range(num_ranks))
    shard = num_ranks if sharded else None
    units = {}
    for unit in build_model_shape(recipe).units:
        stage = StagePlan(stage=0, layers=(0, len(unit.layers)))
        units[unit.name] = UnitPlan(tp=1, pp=1, dp=num_ranks, shard=shard, ranks=ranks, stages=(stage,))
    return units


def too_large_for_one_rank(recipe: Recipe, world: World) -> str | None:
    """Say how large a model is whose weights leave too little room on a device; None for one that fits.

    All ranks call this together.
    """
    hardware = recipe.cluster.hardware
    if world.device.type == "cpu":
        hardware = "cpu-core"
    elif hardware == "auto":
        hardware = detect_hardware()
    device = smallest_device_memory(recipe, hardware, world)
    element_bytes = ELEMENT_BYTES[precision_on_device(recipe.train.precision, world.device)]
    layers = [layer for unit in build_model_shape(recipe).units for layer in unit.layers]
    nbytes = element_bytes * sum(map(num_parameters, layers))
    if nbytes <= MAX_SHARE_OF_WEIGHTS * device.nbytes:
        return None
    return f"its weights take {nbytes / GIB:.3g} GiB, and {device.described} has {device.nbytes / GIB:.3g} GiB"
