"""`mmtrain profile`: measure what the layers of a recipe's model and messages between local ranks take here."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
import torch.distributed as dist
from pydantic import BaseModel
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from mmtrain.balance import SampleLengths
from mmtrain.costs import precision_for, preset
from mmtrain.costs.cost_table import (
    CostTable,
    LayerEntry,
    LayerSample,
    MessageEntry,
    OptimizerEntry,
    TimedPass,
    layer_fields,
    layer_key,
)
from mmtrain.costs.measured_costs import interpolation_errors
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.model_shape import UnitShape, build_model_shape
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.precision import compute_dtype
from mmtrain.runtime.profiling.layer_profiler import LayerProfiler, build_layer_profiler, median_without_outliers
from mmtrain.runtime.profiling.probes import Probe, make_probes
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.world import Address, World, join, leave

MESSAGE_WARM_UP_REPEATS = 2
MESSAGE_REPEATS = 7  # repeats of one
MESSAGE_BYTES = tuple(2**k for k in (10, 14, 18, 20, 22, 24))


@dataclass(frozen=True)
class ProfileRequest:
    """What to measure."""

    recipe: Recipe
    hardware: str  # preset that stands for this machine
    ranks: int  # of this machine, which measure all at once, as they will train
    tp: Mapping[str, tuple[int, ...]]  # tensor-parallel sizes of each unit to measure
    lengths: SampleLengths | None = None  # of the recipe's data; without, loads are made up
    repeats: tuple[int, int] = (3, 12)  # of one measurement, at least and at most


@dataclass(frozen=True)
class Profile:
    """A table, and how well it foretells loads that it does not hold: relative errors by unit and tp."""

    table: CostTable
    errors: dict[str, tuple[float, ...]]

    @property
    def median_error(self) -> float:
        """Over everything held out; 0 without any."""
        everything = [error for found in self.errors.values() for error in found]
        return statistics.median(everything) if everything else 0.0


class _Measurements(BaseModel):
    """What the ranks of one launch measured."""

    layers: list[LayerEntry] = []
    messages: list[MessageEntry] = []
    optimizer: list[OptimizerEntry] = []
    errors: dict[str, list[float]] = {}


def profile(request: ProfileRequest) -> Profile:
    """Measure every distinct layer of the model at every size asked for, in processes of this machine.

    Raises RunError where a process fails.
    """
    sizes = sorted({tp for sizes in request.tp.values() for tp in sizes})
    together = [2**k for k in range(1, request.ranks.bit_length()) if 2**k <= request.ranks]
    todo: list[tuple[int, Callable[[World], _Measurements]]]
    todo = [(request.ranks // tp * tp, partial(_measure_layers, request, tp)) for tp in sizes]
    todo += [(size, _measure_messages) for size in together]
    found: list[_Measurements] = []
    with TemporaryDirectory(prefix="mmtrain-profile-") as folder:
        for number, (ranks, measure) in enumerate(todo):
            out = Path(folder) / f"{number}.json"
            launch_local(ranks, partial(_rank_main, measure, out))
            found.append(_Measurements.model_validate_json(out.read_text(encoding="utf-8")))
    table = empty_cost_table(request)
    for part in found:
        entries = {"layers": (*part.layers,), "messages": (*part.messages,), "optimizer": (*part.optimizer,)}
        table = table.merged(table.model_copy(update=entries))
    return Profile(table, {name: tuple(values) for part in found for name, values in part.errors.items()})


def empty_cost_table(request: ProfileRequest) -> CostTable:
    """The table without its entries: what it will say of this machine."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return CostTable(
        hardware=request.hardware,
        device=device_name(device),
        precision=precision_for(request.recipe, preset(request.hardware)),
        software={"python": platform.python_version(), "torch": torch.__version__},
        date=time.strftime("%Y-%m-%d"),
    )


def _rank_main(measure: Callable[[World], _Measurements], out: Path, address: Address) -> None:
    """Be one of the ranks that measure; the first one writes what was found."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # a rank is one core
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[address.local_rank % len(cores)]})
    world = join(address)
    found = measure(world)
    if world.is_first:
        out.write_text(found.model_dump_json(), encoding="utf-8")
    leave()


def _measure_layers(request: ProfileRequest, tp: int, world: World) -> _Measurements:
    """Time the layers of every unit that may be split so; TP groups of as many ranks do the same side by side."""
    groups = _tp_groups(world, tp)
    model, found = build_model_shape(request.recipe), _Measurements()
    dtype = compute_dtype(precision_for(request.recipe, preset(request.hardware)), world.device)
    units = [unit for unit in model.units if tp in request.tp.get(unit.name, ())]
    plans = [(unit, make_probes(request.recipe, unit, request.lengths)) for unit in units]
    console = Console(stderr=True, quiet=not world.is_first)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"tp {tp}", total=sum(len(fitted) + len(held_out) for _, (fitted, held_out) in plans))
        for unit, (fitted, held_out) in plans:
            progress.update(task, description=f"tp {tp}: {unit.name}")
            stack = build_layer_profiler(request.recipe, model, unit, groups, world, dtype)

            def sampled(probe: Probe, every_way: bool, stack: LayerProfiler = stack) -> dict[str, LayerSample]:
                mine = stack.sample(probe, request.recipe, request.repeats, every_way)
                progress.advance(task)
                return _mean(world, mine)

            samples = [sampled(probe, True) for probe in fitted]
            others = [sampled(probe, False) for probe in held_out]
            entries = _entries(unit, tp, samples)
            found.layers.extend(entries.values())
            off = found.errors.setdefault(f"{unit.name} tp{tp}", [])
            off += [
                e
                for key, entry in entries.items()
                for e in interpolation_errors(entry, [other[key] for other in others])
            ]
            parameters, seconds = stack.optimizer_seconds(request.repeats)
            found.optimizer.append(OptimizerEntry(parameters=parameters, seconds=seconds))
    return found


def _measure_messages(world: World) -> _Measurements:
    """Time what goes between all ranks of this launch."""
    return _Measurements(messages=measure_messages(world, MESSAGE_BYTES))


def _tp_groups(world: World, tp: int) -> ParallelGroups:
    """Groups of this rank in a world that is cut into TP groups of `tp` ranks."""
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    first = world.rank // tp * tp
    group = dist.new_group([*range(first, first + tp)], use_local_synchronization=True) if tp > 1 else alone
    assert group is not None
    return ParallelGroups(tp=group, dp=alone, pp=alone)


def _mean(world: World, samples: dict[str, LayerSample]) -> dict[str, LayerSample]:
    """Of the seconds that the ranks saw: none of them stands for all."""
    seen = cast(list[dict[str, LayerSample]], world.all_gather(samples))

    def over_ranks(key: str, timed: TimedPass) -> float:
        return statistics.fmean(one[key].seconds[timed] for one in seen)

    return {
        key: sample.model_copy(update={"seconds": {timed: over_ranks(key, timed) for timed in sample.seconds}})
        for key, sample in samples.items()
    }


def _entries(unit: UnitShape, tp: int, samples: list[dict[str, LayerSample]]) -> dict[str, LayerEntry]:
    """Samples of all loads by layer, in ascending order of tokens."""
    layers = {layer_key(layer_fields(layer)): layer_fields(layer) for layer in unit.layers}
    ordered = sorted(samples, key=_size)
    return {
        key: LayerEntry(layer=fields, tp=tp, samples=tuple(found[key] for found in ordered))
        for key, fields in layers.items()
    }


def device_name(device: torch.device) -> str:
    """What is measured: the GPU, or one core of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"one core of {models[0] if models else platform.processor() or platform.machine()}"


def _size(found: dict[str, LayerSample]) -> tuple[int, int]:
    """What samples of one load are ordered by."""
    sample = next(iter(found.values()))
    return sample.tokens, sample.sum_sq


def measure_messages(world: World, sizes: tuple[int, ...]) -> list[MessageEntry]:
    """Time messages of `sizes` bytes between the first two ranks, and collectives over all."""
    found = []
    # torch 2.13 renamed them and warns of the old names.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    ways: dict[str, Callable[[Tensor], None]] = {
        "p2p": lambda x: _pass_on(x, world),
        "all_reduce": lambda x: dist.all_reduce(x),
        "broadcast": lambda x: dist.broadcast(x, src=0),
        "all_gather": lambda x: gather(x, x.chunk(world.size)[world.rank].clone()),
        "reduce_scatter": lambda x: scatter(x.chunk(world.size)[world.rank].clone(), x),
    }
    for kind, way in ways.items():
        seconds = []
        for nbytes in sizes:
            data = torch.zeros(nbytes // 4 // world.size * world.size, device=world.device)
            for _ in range(MESSAGE_WARM_UP_REPEATS):
                way(data)
            times = []
            for _ in range(MESSAGE_REPEATS):
                world.barrier()
                begin = _now(world.device)
                way(data)
                times.append(_now(world.device) - begin)
            seconds.append(median_without_outliers(times))
        size = 2 if kind == "p2p" else world.size
        found.append(MessageEntry(kind=kind, size=size, nbytes=sizes, seconds=tuple(seconds)))
    return found


def _pass_on(data: Tensor, world: World) -> None:
    """From the first rank to the second; the others look on."""
    if world.rank == 0:
        dist.send(data, 1)
    elif world.rank == 1:
        dist.recv(data, 0)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
