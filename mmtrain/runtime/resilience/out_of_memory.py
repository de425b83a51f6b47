"""Find out how much memory the devices of a run have, measure a rank's, and explain when it was not enough."""

import math
import resource
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch
import torch.distributed as dist

from mmtrain.balance import BatchMeta
from mmtrain.costs import machine_for
from mmtrain.costs.hardware import GIB
from mmtrain.data import DataIndex, StepData
from mmtrain.data.loading.payload import PayloadNeed
from mmtrain.errors import RunError
from mmtrain.machine_limits import machine_limits
from mmtrain.planning.artifact.plan_memory import DeviceMemory
from mmtrain.program import LLM, Action, Compute, Microbatch
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.modalities import dotted_unit
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.world import World

KIB = 1024  # getrusage counts in KiB
MAX_NAMED_SAMPLES = 5  # in a message
# As in the hardware presets: the other half is left to the loader, to checkpoints and to what allocators round up.
HOST_SHARE_OF_ACTIVATIONS = 0.5


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory held so far: by the CUDA allocator, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def held_memory_bytes(device: torch.device) -> int:
    """Return the memory held now, by the CUDA allocator or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def start_memory_peak(device: torch.device) -> int:
    """Forget the peak of a CUDA allocator so far; return what is held now, with what the allocator keeps.

    A process without a GPU cannot forget its peak.
    """
    if device.type != "cuda":
        return held_memory_bytes(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_reserved(device)


def peak_reserved_bytes(device: torch.device) -> int | None:
    """Return the most memory that the CUDA allocator has taken from the GPU so far, with its gaps; None without one."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed: on the device, in NCCL, or (torch has no type for that) on the host."""
    if isinstance(error, dist.DistBackendError):
        return "out of memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


@dataclass(frozen=True)
class OutOfMemoryReport:
    """What explains a failed allocation on one rank."""

    world: World
    activity: Activity
    index: DataIndex
    predicted_gib: float | None  # this rank's peak memory by the plan

    def to_error(self, meta: BatchMeta) -> RunError:
        """Return the error of a rank that ran out of memory in the step of `meta`."""
        return self._error(self.activity.doing, meta)

    def to_input_error(self, error: Exception, data: StepData, needs: Sequence[PayloadNeed]) -> Exception:
        """Return the error of a rank that had no memory for the input of a step; another error as it is.

        needs: the units whose input the rank reads. The step before may still compute: its action is not to blame.
        """
        return self._error(InputOf(tuple(needs)), data.meta) if is_out_of_memory(error) else error

    def _error(self, doing: "Action | str | InputOf", meta: BatchMeta) -> RunError:
        names = [self.index.samples[number].id for number in meta.sample_id]
        measured_bytes = peak_memory_bytes(self.world.device)
        reason = explain_out_of_memory(doing, meta, names, measured_bytes, self.predicted_gib)
        reserved_bytes = peak_reserved_bytes(self.world.device)
        if reserved_bytes is not None:
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.world.device)
            reason += (
                f". The allocator held {reserved_bytes / GIB:.2f} GiB at most, gaps included; of the GPU's "
                f"{total_bytes / GIB:.2f} GiB, {free_bytes / GIB:.2f} GiB are free"
            )
        return RunError(f"rank {self.world.rank}, step {meta.step + 1}: {reason}")


@dataclass(frozen=True)
class InputOf:
    """The input of one step, on its way to the device of a rank with these needs."""

    needs: tuple[PayloadNeed, ...]

    def rows(self, meta: BatchMeta) -> list[int]:
        """Return the rows of `meta`, each once, of which the input holds text or items."""
        rows: set[int] = set()
        for need in self.needs:
            if need.unit == LLM:
                rows.update(np.flatnonzero(meta.replica == need.replica).tolist())
            else:
                items = meta.items[need.unit]
                rows.update(items.sample[items.replica == need.replica].tolist())
        return sorted(rows)


def explain_out_of_memory(
    doing: Action | str | InputOf,
    meta: BatchMeta,
    names: Sequence[str],
    measured_bytes: int,
    predicted_gib: float | None,
) -> str:
    """Name the stage that ran out of memory, its samples, and the memory measured before and predicted by the plan.

    `names` are the users' names of `meta`'s samples, row by row.
    """
    where = ""
    samples = ""
    remedies = "parallel.<unit>.tp or pp, a smaller data.seq_len"
    if isinstance(doing, Compute):
        where = f" in stage {doing.stage}, microbatch {doing.mb}"
        samples = _describe_samples(_rows(doing.mb, meta), meta, names)
        unit = dotted_unit(doing.stage.unit)
        remedies = f"parallel.{unit}.recompute: all, parallel.{unit}.tp or pp, a smaller data.seq_len"
    elif isinstance(doing, InputOf):
        units = ", ".join(need.unit for need in doing.needs)
        where = f" while the step's input of {units} was brought to the device, beside the step before"
        samples = _describe_samples(doing.rows(meta), meta, names)
        remedies = "a smaller train.global_batch or data.seq_len"
    predicted = "" if predicted_gib is None else f"{predicted_gib:.2f} GiB predicted at most, "
    measured = f"{measured_bytes / GIB:.2f} GiB measured before"
    return f"out of memory{where}{samples}; {predicted}{measured}. Try {remedies}"


def predicted_peak_gib(rank: int, peaks: Mapping[str, float]) -> float | None:
    """Look a rank up in a plan's peaks, whose keys are a rank (`3`) or a range of ranks (`0-3`)."""
    for key, gib in peaks.items():
        first, _, last = key.partition("-")
        if int(first) <= rank <= int(last or first):
            return gib
    return None


def _describe_samples(rows: Sequence[int], meta: BatchMeta, names: Sequence[str]) -> str:
    """Name some samples, and say how many tokens all of them have."""
    shown = ", ".join(names[row] for row in rows[:MAX_NAMED_SAMPLES])
    more = f" and {len(rows) - MAX_NAMED_SAMPLES} more" if len(rows) > MAX_NAMED_SAMPLES else ""
    return f"; samples {shown}{more} ({int(meta.tokens[rows].sum())} LLM tokens)"


def _rows(mb: Microbatch, meta: BatchMeta) -> list[int]:
    """Return the rows of `meta`, each once, whose text or items the microbatch holds."""
    if mb.unit == LLM:
        return [int(row) for row in meta.microbatch(mb.replica, mb.index)]
    items = meta.items[mb.unit]
    return list(dict.fromkeys(int(items.sample[item]) for item in items.microbatch(mb.replica, mb.index)))


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
