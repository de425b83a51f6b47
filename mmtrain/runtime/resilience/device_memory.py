"""Find out how much memory the devices of a run have, before anything is built on them."""

import math
import socket
from collections import Counter

import torch

from mmtrain.costs import machine_for
from mmtrain.machine_limits import machine_limits
from mmtrain.planning.artifact.plan_memory import DeviceMemory
from mmtrain.recipe import Recipe
from mmtrain.runtime.world import World

# As in the hardware presets: the other half is left to the loader, to checkpoints and to what allocators round up.
HOST_SHARE_OF_ACTIVATIONS = 0.5


def smallest_device_memory(recipe: Recipe, hardware: str, world: World) -> DeviceMemory:
    """Return the memory of the smallest device: what the hardware has by its preset or the recipe, or what is free.

    Free memory counts on GPUs, where other processes may hold a part. Of host memory, each rank has its share of what
    its container is limited to, unless `cluster.host_memory_gib` says what it has. All ranks call this together.
    """
    found = world.all_gather((_free_bytes(world.device), machine_limits().memory_bytes, socket.gethostname()))
    of_ranks: list[tuple[int | None, int | None, str]] = found  # type: ignore[assignment]
    host_bytes = math.inf
    if recipe.cluster.host_memory_gib is None:
        num_on_host = Counter(host for _, _, host in of_ranks)
        shares = (limit / num_on_host[host] for _, limit, host in of_ranks if limit is not None)
        host_bytes = HOST_SHARE_OF_ACTIVATIONS * min(shares, default=math.inf)
    planned_bytes = machine_for(recipe, hardware).memory_bytes
    on_gpus = {rank: nbytes for rank, (nbytes, _, _) in enumerate(of_ranks) if nbytes is not None}
    rank = min(on_gpus, key=lambda number: on_gpus[number], default=None)
    if rank is None or on_gpus[rank] >= planned_bytes:
        return DeviceMemory(planned_bytes, f"{hardware} (see cluster.memory_gib)", host_bytes)
    return DeviceMemory(on_gpus[rank], f"the GPU of rank {rank}", host_bytes)


def _free_bytes(device: torch.device) -> int | None:
    """Return what is free on this GPU, with what this process already holds of it; None for a CPU."""
    if device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device)
