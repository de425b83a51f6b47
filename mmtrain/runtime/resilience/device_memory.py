"""Find out how much memory the devices of a run have, before anything is built on them."""

import torch

from mmtrain.costs import machine_for
from mmtrain.plan.artifact.plan_memory import DeviceMemory
from mmtrain.recipe import Recipe
from mmtrain.runtime.world import World


def smallest_device_memory(recipe: Recipe, hardware: str, world: World) -> DeviceMemory:
    """Return the memory of the smallest device: what the hardware has by its preset or the recipe, or what is free.

    Free memory counts on GPUs, where other processes may hold a part. All ranks call this together.
    """
    planned = DeviceMemory(machine_for(recipe, hardware).memory_bytes, f"{hardware} (see cluster.memory_gib)")
    free_bytes = world.all_gather(_free_bytes(world.device))
    on_gpus = {rank: nbytes for rank, nbytes in enumerate(free_bytes) if isinstance(nbytes, int)}
    if not on_gpus:
        return planned
    rank = min(on_gpus, key=lambda number: on_gpus[number])
    if on_gpus[rank] >= planned.nbytes:
        return planned
    return DeviceMemory(on_gpus[rank], f"the GPU of rank {rank}")


def _free_bytes(device: torch.device) -> int | None:
    """Return what is free on this GPU, with what this process already holds of it; None for a CPU."""
    if device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device)
