"""`mmtrain profile`: measure on this machine the layers of a recipe's model and messages between ranks."""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
import torch.distributed as dist
from pydantic import BaseModel
from rich.progress import Progress

from mmtrain.balance import SampleLengths
from mmtrain.costs import machine_for, num_parameters, precision_for, preset
from mmtrain.costs.core_ratios import COPIED_BYTES, GEMM_SIDE
from mmtrain.costs.cost_table import (
    CoreSpeed,
    CostTable,
    LayerEntry,
    LayerSample,
    MeasuredSpread,
    MessageEntry,
    OptimizerEntry,
    TimedPass,
    layer_fields,
    layer_key,
)
from mmtrain.costs.find_hardware import CORE_PREFIX, MEASURED_GEMM_SIDE, is_other_hardware
from mmtrain.costs.measured_costs import interpolation_errors
from mmtrain.errors import PlanError
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.layer_shape import BLOCK_KINDS
from mmtrain.models.shapes.model_shape import (
    ModelShape,
    UnitShape,
    build_model_shape,
    with_offload,
    with_recomputed_activations,
)
from mmtrain.program import LLM
from mmtrain.recipe import Recipe
from mmtrain.report.console import Console
from mmtrain.runtime.execution.precision import compute_dtype
from mmtrain.runtime.execution.recorder import clock_for
from mmtrain.runtime.gloo_threads import calm_gloo_threads
from mmtrain.runtime.profiling.cut_profiler import ProfiledUnit, seconds_of_a_stop
from mmtrain.runtime.profiling.host_report import processor_name
from mmtrain.runtime.profiling.layer_profiler import (
    LayerProfiler,
    build_layer_profiler,
    median_without_outliers,
    relative_deviation,
)
from mmtrain.runtime.profiling.message_profiler import measure_node_groups, measure_node_links
from mmtrain.runtime.profiling.probes import Probe, make_probes
from mmtrain.runtime.resilience.failures import lost_peers_named
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.world import Address, World, join, leave

MEASURED_CHUNKS = 4  # of tokens, in which blocks are measured a second time; other numbers differ as modelled
CUT_ROUNDS = 24  # a stop costs a small part of what a round takes
NUM_TIMED_GEMMS = 100  # 0.2 s on an H100, 0.3 s on a core
_PACED: tuple[TimedPass, ...] = ("forward", "backward")
SECONDS_OF_EACH = 0.5  # of repeating the GEMM, and of repeating the copy


@dataclass(frozen=True)
class ProfileRequest:
    """What to measure."""

    recipe: Recipe
    hardware: str  # preset of this machine
    ranks: int  # of this machine; they measure at the same time, as they will train
    tp: Mapping[str, tuple[int, ...]]  # tensor-parallel sizes of each unit to measure
    lengths: SampleLengths | None = None  # of the recipe's data; None: loads are made up
    repeats: tuple[int, int] = (3, 12)  # of one measurement, at least and at most


@dataclass(frozen=True)
class Profile:
    """A cost table, and how well it predicts held-out loads: relative errors by unit and tp."""

    table: CostTable
    errors: dict[str, tuple[float, ...]]

    @property
    def median_error(self) -> float:
        """The median over all held-out loads; 0 without any."""
        all_errors = [error for errors in self.errors.values() for error in errors]
        return statistics.median(all_errors) if all_errors else 0.0


class _Measurements(BaseModel):
    """What the ranks of one launch measured."""

    layers: list[LayerEntry] = []
    messages: list[MessageEntry] = []
    optimizer: list[OptimizerEntry] = []
    errors: dict[str, list[float]] = {}
    core_speed: CoreSpeed | None = None
    cut_s: float | None = None
    time_spread: MeasuredSpread | None = None


def profile(request: ProfileRequest) -> Profile:
    """Measure every distinct layer of the model at every tensor-parallel size of the request, and messages.

    Starts processes on this machine. Raises RunError if one fails.
    """
    tp_sizes = sorted({tp for sizes in request.tp.values() for tp in sizes})
    group_sizes = [2**k for k in range(1, request.ranks.bit_length()) if 2**k <= request.ranks]
    launches: list[tuple[int, Callable[[World], _Measurements]]]  # ranks, and what they measure
    launches = [(request.ranks // tp * tp, partial(_measure_layers, request, tp)) for tp in tp_sizes]
    launches += [(request.ranks // size * size, partial(_measure_messages, size)) for size in group_sizes]
    results: list[_Measurements] = []
    with TemporaryDirectory(prefix="mmtrain-profile-") as folder:
        for number, (num_ranks, measure) in enumerate(launches):
            out = Path(folder) / f"{number}.json"
            launch_local(num_ranks, partial(_rank_main, measure, out))
            results.append(_Measurements.model_validate_json(out.read_text(encoding="utf-8")))
    table = empty_cost_table(request)
    for result in results:
        entries: dict[str, object] = {
            "layers": (*result.layers,),
            "messages": (*result.messages,),
            "optimizer": (*result.optimizer,),
        }
        newest = {name: getattr(result, name) for name in ("core_speed", "cut_s", "time_spread")}
        table = table.merged(table.model_copy(update=entries | newest))
    errors = {name: tuple(errors) for result in results for name, errors in result.errors.items()}
    measured = Profile(table, errors)
    return replace(measured, table=table.model_copy(update={"held_out_error": measured.median_error}))


def profile_node_links(request: ProfileRequest, address: Address) -> CostTable | None:
    """Measure messages, collectives and how much ranks differ across nodes, as one rank that a launcher started.

    Returns the table on rank 0, None on others. Raises LaunchError, see `measure_node_links`, and RunError where
    another rank is lost.
    """
    with lost_peers_named(address):
        world = join(address)
        entries = measure_node_links(world, ranks_per_node(request, address))
        spread = _measure_rank_spread(world)
        leave()
    measured = {"messages": tuple(entries), "time_spread": spread}
    return empty_cost_table(request).model_copy(update=measured) if world.is_first else None


def ranks_per_node(request: ProfileRequest, address: Address) -> int:
    """Return the ranks of a node: those that the launcher started on a machine, or on all machines of an NVLink domain.

    `cluster.ranks_per_node` says it too, if it is a multiple of the ranks of a machine.
    """
    machine, per_machine = machine_for(request.recipe, request.hardware), address.ranks_per_node
    spans_machines = machine.spans_machines or request.recipe.cluster.ranks_per_node is not None
    is_whole = machine.ranks_per_node % per_machine == 0
    return machine.ranks_per_node if spans_machines and is_whole else per_machine


def empty_cost_table(request: ProfileRequest) -> CostTable:
    """Return the table without entries: what it states about this machine."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return CostTable(
        hardware=request.hardware,
        device=device_name(device),
        precision=precision_for(request.recipe, preset(request.hardware)),
        software={"python": platform.python_version(), "torch": torch.__version__},
        date=time.strftime("%Y-%m-%d"),
    )


def require_this_hardware(request: ProfileRequest) -> None:
    """Raise PlanError if this machine is other hardware than the cluster's, so that its times would mislead plans."""
    device = empty_cost_table(request).device
    if is_other_hardware(request.hardware, device):
        raise PlanError(
            f"cluster.hardware: {request.hardware}, and this machine would be measured: `{device}`. Profile on "
            f"{request.hardware}, or add --set cluster.hardware=auto to measure this machine"
        )


def _rank_main(measure: Callable[[World], _Measurements], out: Path, address: Address) -> None:
    """Measure as one rank; the first rank writes the result to `out`."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # a rank is one core
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[address.local_rank % len(cores)]})
    world = join(address)
    result = measure(world)
    if world.is_first:
        out.write_text(result.model_dump_json(), encoding="utf-8")
    leave()


def _measure_layers(request: ProfileRequest, tp: int, world: World) -> _Measurements:
    """Time the layers of every unit that the request measures with this `tp`; all TP groups measure at once."""
    groups = _tp_groups(world, tp)
    # Activation functions run once and activations stay on the device, as in all tables: the rest is modelled.
    model = with_offload(with_recomputed_activations(build_model_shape(request.recipe), ()), {})
    result = _Measurements()
    relative_times: list[list[float]] = []
    deviations: list[float] = []
    dtype = compute_dtype(precision_for(request.recipe, preset(request.hardware)), world.device)
    units = [unit for unit in model.units if tp in request.tp.get(unit.name, ())]
    unit_probes = [(unit, *make_probes(request.recipe, unit, request.lengths)) for unit in units]
    num_probes = sum(
        len(fitted) * (1 + _measures_chunks(request, unit, tp)) + len(held_out)
        for unit, fitted, held_out in unit_probes
    )
    console = Console(stderr=True, quiet=not world.is_first)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(f"tp {tp}", total=num_probes)
        for unit, fitted, held_out in unit_probes:
            progress.update(task, description=f"tp {tp}: {unit.name}")
            profiler = build_layer_profiler(request.recipe, model, unit, groups, world, dtype)

            def measure(probe: Probe, all_modes: bool, profiler: LayerProfiler = profiler) -> dict[str, LayerSample]:
                samples = profiler.sample(probe, request.recipe, request.repeats, all_modes)
                progress.advance(task)
                all_samples = cast(list[dict[str, LayerSample]], world.all_gather(samples))
                relative_times.append(_relative_rank_times(all_samples))
                return _mean_over_ranks(all_samples)

            fitted_samples = [measure(probe, True) for probe in fitted]
            if _measures_chunks(request, unit, tp):
                profiler.set_chunks(MEASURED_CHUNKS)
                in_chunks = [measure(probe, True) for probe in fitted]
                result.layers.extend(_chunked_entries(unit, tp, in_chunks))
                profiler.set_chunks(1)
            held_out_samples = [measure(probe, False) for probe in held_out]
            entries = _layer_entries(unit, tp, fitted_samples)
            result.layers.extend(entries.values())
            errors = result.errors.setdefault(f"{unit.name} tp{tp}", [])
            for key, entry in entries.items():
                errors += interpolation_errors(entry, [samples[key] for samples in held_out_samples])
            deviations += profiler.deviations
            parameters, seconds = profiler.optimizer_seconds(request.repeats)
            result.optimizer.append(OptimizerEntry(parameters=parameters, seconds=seconds))
    if tp == 1:  # ranks of a TP group wait for each other, so none of them is slower
        deviations_of_ranks = cast(list[float], world.all_gather(statistics.median(deviations)))
        result.time_spread = _time_spread(relative_times, deviations_of_ranks)
    result.cut_s = _measure_cut(request, model, tp, world, dtype)
    if world.device.type == "cpu":
        result.core_speed = measure_core_speed()  # on all cores at once, as the layers
    return result


def _measure_cut(request: ProfileRequest, model: ModelShape, tp: int, world: World, dtype: torch.dtype) -> float | None:
    """Time what a stop inside a layer costs; None where no plan stops there.

    Only `colocated` plans do, in an LLM with tensor parallelism, for the encoder with most to compute.
    """
    if request.recipe.parallel.placement not in ("auto", "colocated") or tp == 1 or tp not in request.tp.get(LLM, ()):
        return None
    if not model.encoders:
        return None
    encoder = max(map(model.unit, model.encoders), key=lambda unit: sum(map(num_parameters, unit.layers)))
    encoder_tp = min(request.tp.get(encoder.name, (1,)))
    if world.size % encoder_tp:  # a rank would be in no group of the encoder
        return None

    def built(unit: UnitShape, tp: int) -> ProfiledUnit:
        groups = _tp_groups(world, tp)
        fitted, _ = make_probes(request.recipe, unit, request.lengths)
        profiler = build_layer_profiler(request.recipe, model, unit, groups, world, dtype)
        return ProfiledUnit(profiler, groups, fitted[-1])

    units = built(model.unit(LLM), tp), built(encoder, encoder_tp)
    seconds = seconds_of_a_stop(*units, request.recipe, CUT_ROUNDS)
    return statistics.fmean(cast(list[float], world.all_gather(seconds)))


def _measure_messages(group_size: int, world: World) -> _Measurements:
    """Time messages, collectives of all groups of `group_size` ranks at once, and what compute loses beside these."""
    return _Measurements(messages=measure_node_groups(world, group_size, with_overlap=True))


def _tp_groups(world: World, tp: int) -> ParallelGroups:
    """Return the groups of this rank in a world that is split into TP groups of `tp` ranks."""
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    first = world.rank // tp * tp
    group = dist.new_group([*range(first, first + tp)], use_local_synchronization=True) if tp > 1 else alone
    assert group is not None
    calm_gloo_threads()
    return ParallelGroups(tp=group, dp=alone, pp=alone)


def _mean_over_ranks(all_samples: list[dict[str, LayerSample]]) -> dict[str, LayerSample]:
    """Return the samples with the mean of all ranks' seconds: no single rank is representative."""
    samples = all_samples[0]

    def mean_s(key: str, timed: TimedPass) -> float:
        return statistics.fmean(of_rank[key].seconds[timed] for of_rank in all_samples)

    return {
        key: sample.model_copy(update={"seconds": {timed: mean_s(key, timed) for timed in sample.seconds}})
        for key, sample in samples.items()
    }


def _relative_rank_times(all_samples: list[dict[str, LayerSample]]) -> list[float]:
    """Return by rank how many times as long as the mean of all ranks its forwards and backwards took."""
    seconds = [[sample.seconds[timed] for sample in samples.values() for timed in _PACED] for samples in all_samples]
    means = [statistics.fmean(of_pass) for of_pass in zip(*seconds, strict=True)]
    return [
        statistics.fmean(rank_s / mean_s for rank_s, mean_s in zip(of_rank, means, strict=True) if mean_s > 0)
        for of_rank in seconds
    ]


def _time_spread(relative_times: list[list[float]], deviations: list[float]) -> MeasuredSpread:
    """Return how much ranks differ in all that they measured, and how much the passes of a layer differ on one rank.

    relative_times: (samples, ranks). deviations: of passes, by rank.
    """
    by_rank = [statistics.fmean(of_rank) for of_rank in zip(*relative_times, strict=True)]
    ranks = statistics.stdev(by_rank) / statistics.fmean(by_rank) if len(by_rank) > 1 else None
    return MeasuredSpread(
        ranks=None if ranks is None else min(1.0, ranks), layers=min(1.0, statistics.fmean(deviations))
    )


def _layer_entries(unit: UnitShape, tp: int, samples: list[dict[str, LayerSample]]) -> dict[str, LayerEntry]:
    """Return the samples of all loads by layer, in ascending order of tokens."""
    layers = {layer_key(layer_fields(layer)): layer_fields(layer) for layer in unit.layers}
    ordered = sorted(samples, key=_load_size)
    return {
        key: LayerEntry(layer=fields, tp=tp, samples=tuple(of_load[key] for of_load in ordered))
        for key, fields in layers.items()
    }


def _measures_chunks(request: ProfileRequest, unit: UnitShape, tp: int) -> bool:
    """Return whether the unit's blocks are measured in chunks of tokens too: where a plan may run them so.

    Where the recipe leaves it open, not on hardware whose collectives take all of the compute beside them.
    """
    if tp == 1 or unit.kind == "generator":
        return False
    setting = request.recipe.parallel.of(unit.name).tp_overlap
    return setting is True or (setting == "auto" and preset(request.hardware).overlap_slowdown < 1)


def _chunked_entries(unit: UnitShape, tp: int, samples: list[dict[str, LayerSample]]) -> list[LayerEntry]:
    """Return the entries of blocks, the only layers with chunks, from samples that were measured in chunks."""
    blocks = replace(unit, layers=tuple(layer for layer in unit.layers if layer.kind in BLOCK_KINDS))
    entries = _layer_entries(blocks, tp, samples).values()
    return [entry.model_copy(update={"tp_chunks": MEASURED_CHUNKS}) for entry in entries]


def device_name(device: torch.device) -> str:
    """Name what is measured: the GPU, or one core of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{CORE_PREFIX}{processor_name()}"


def _measure_rank_spread(world: World) -> MeasuredSpread:
    """Time one GEMM again and again, on all ranks at once; return how much ranks and repetitions differ."""
    is_gpu = world.device.type == "cuda"
    side, dtype = (MEASURED_GEMM_SIDE, torch.bfloat16) if is_gpu else (GEMM_SIDE, torch.float32)
    a, b = (torch.randn(side, side, dtype=dtype, device=world.device) for _ in range(2))
    clock = clock_for(world.device)
    a @ b  # loads the kernel
    world.barrier()
    clock.start()
    marks = [clock.mark()]
    for _ in range(NUM_TIMED_GEMMS):
        a @ b
        marks.append(clock.mark())
    seconds = [end_s - start_s for start_s, end_s in pairwise(clock.seconds(marks))]
    of_rank = median_without_outliers(seconds), relative_deviation(seconds)
    medians, deviations = zip(*cast(list[tuple[float, float]], world.all_gather(of_rank)), strict=True)
    return _time_spread([list(medians)], list(deviations))


def _load_size(samples: dict[str, LayerSample]) -> tuple[int, int]:
    """Return (tokens, sum of squared lengths) of the load of these samples."""
    sample = next(iter(samples.values()))
    return sample.tokens, sample.sum_sq


def measure_core_speed() -> CoreSpeed:
    """Return the median seconds of a GEMM in fp32 and of a copy, on the threads that torch uses."""
    a, b = (torch.randn(GEMM_SIDE, GEMM_SIDE) for _ in range(2))
    source = torch.zeros(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    return CoreSpeed(gemm_s=_median_seconds(lambda: a @ b), copy_s=_median_seconds(lambda: target.copy_(source)))


def _median_seconds(work: Callable[[], object]) -> float:
    """Return the median of repetitions that take `SECONDS_OF_EACH` together."""
    seconds: list[float] = []
    while sum(seconds) < SECONDS_OF_EACH or len(seconds) < 3:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
