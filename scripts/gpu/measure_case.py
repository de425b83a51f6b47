"""Measure one case of `bench_gpu.py` in a process of its own, so that what it breaks or leaks ends with it.

python -m scripts.gpu.measure_case '{"model": "tiny", "tokens": 128, ...}' result.json [--profile] [--trace FILE]
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from mmtrain.costs import preset
from mmtrain.costs.hardware import GIB
from mmtrain.data.loading.batch_builder import StepData
from mmtrain.errors import MmtrainError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.runtime.execution.input_arena import copier_for
from mmtrain.runtime.execution.rank_context import RankContext, build_rank_context
from mmtrain.runtime.execution.recorder import clock_for
from mmtrain.runtime.execution.step_prefetcher import StepPrefetcher
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.resilience.out_of_memory import is_out_of_memory, peak_memory_bytes, peak_reserved_bytes
from mmtrain.runtime.training.step_metrics import counted_flops
from mmtrain.runtime.world import Address, detect_hardware, join, leave, limit_threads
from scripts.gpu.cases import BenchCase
from scripts.gpu.findings import predicted_allocation_gib, write_json
from scripts.gpu.kernel_profile import profile_step, synchronizing_lines
from scripts.gpu.synthetic import DRY_SIZES, SIZES, SyntheticSamples
from scripts.plans import fastest_plan

WARM_UP_STEPS, TIMED_STEPS = 3, 8
DRY_WARM_UP_STEPS, DRY_TIMED_STEPS = 1, 2
LEARNING_RATE = 1e-5
ALLOCATOR_COUNTS = ("num_alloc_retries", "num_ooms", "inactive_split_bytes.all.peak", "segment.all.peak")


@dataclass(frozen=True)
class Pace:
    """What steps of one kind took."""

    step_s: float  # median
    tokens_per_s: float  # of the LLM
    mfu: float  # forward and the gradients that are needed, of both units; the head for tokens with a target


@dataclass
class CaseResult:
    """One row of the table, as it is written to JSON."""

    case: BenchCase
    problem: str | None = None  # why there is nothing else
    hardware: str = ""
    steps: Pace | None = None
    text_steps: Pace | None = None  # of steps as long, without pictures
    predicted_step_s: float = 0.0
    predicted_gib: float = 0.0  # of the allocator, without the plan's margin
    allocated_gib: float = 0.0
    reserved_gib: float | None = None
    idle_share: float | None = None  # of the device, in one profiled step
    recomputed_layers: dict[str, int] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    waits_for_device: list[str] = field(default_factory=list)  # lines of code
    kernels: str = ""  # a table
    allocator: dict[str, int] = field(default_factory=dict)  # of a GPU: what shows gaps and lack of memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", help="the fields of a BenchCase, as JSON")
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", action="store_true", help="list the kernels that take most time")
    parser.add_argument("--trace", type=Path, help="write a step's timeline, for Perfetto (.json or .json.gz)")
    options = parser.parse_args()
    result = CaseResult(BenchCase(**json.loads(options.case)))

    def save() -> None:
        write_json(options.out, asdict(result))

    measure(result, save, options.profile, options.trace)
    save()


def measure(
    result: CaseResult, save: Callable[[], None], with_kernels: bool = False, trace: Path | None = None
) -> None:
    """Plan the case for one rank of this machine, build it as a run does, and time its steps.

    save: writes the result as far as it goes; called after each part, since the time may be over before the next.
    """
    try:
        _measure(result, save, with_kernels, trace)
    except MmtrainError as error:
        result.problem = str(error)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        result.problem = f"out of memory: {str(error).splitlines()[0]}"
        result.allocated_gib = peak_memory_bytes(torch.device("cuda" if torch.cuda.is_available() else "cpu")) / GIB


def _measure(result: CaseResult, save: Callable[[], None], with_kernels: bool, trace: Path | None) -> None:
    case = result.case
    recipe = case.recipe()
    sizes = DRY_SIZES if case.dry else SIZES
    samples = SyntheticSamples(recipe, sizes)
    result.hardware = detect_hardware()
    plan = fastest_plan(recipe, samples.lengths, 1, result.hardware)
    result.predicted_step_s = plan.predicted.step_time_s
    result.predicted_gib = predicted_allocation_gib(plan.predicted)
    result.recomputed_layers = {unit: part.num_recomputed for unit, part in plan.units.items()}
    address = Address(0, 1, 0, "127.0.0.1", free_port(), "mmtrain")
    world = join(address)
    limit_threads(address)
    context = build_rank_context(recipe, plan, world)
    num_warm, num_timed = (DRY_WARM_UP_STEPS, DRY_TIMED_STEPS) if case.dry else (WARM_UP_STEPS, TIMED_STEPS)
    steps = list(samples.steps(context, plan, num_warm + num_timed + 2))
    *timed, for_profiler, for_waits = steps
    result.steps, result.losses = _time_steps(context, plan, timed, num_warm)
    result.allocated_gib = peak_memory_bytes(world.device) / GIB
    reserved = peak_reserved_bytes(world.device)
    result.reserved_gib = None if reserved is None else reserved / GIB
    result.allocator = _allocator_counts(world.device)
    save()
    without_images = SyntheticSamples(recipe, sizes, with_images=False)
    text_steps = list(without_images.steps(context, plan, num_warm + num_timed))
    result.text_steps, _ = _time_steps(context, plan, text_steps, num_warm)
    save()
    _profile(context, plan, for_profiler, result, with_kernels)
    save()
    with StepPrefetcher(iter([for_waits]), context.host_input, copier_for(world.device), ahead=False) as prepared_steps:
        prepared = next(prepared_steps)
        result.waits_for_device = synchronizing_lines(
            lambda: context.train_executor.run(replace(prepared.input, lr=LEARNING_RATE))
        )
    save()
    if trace is not None:
        profile_step(lambda: context.train(for_waits, LEARNING_RATE), trace)
    leave()


def _time_steps(
    context: RankContext, plan: Plan, steps: Sequence[StepData], num_warm: int
) -> tuple[Pace, tuple[float, ...]]:
    """Train on the steps; return the pace after warm-up, by the device's clock, and the losses.

    Raises MmtrainError for a loss that is not finite.
    """
    clock = clock_for(context.world.device)
    clock.start()
    marks = [clock.mark()]
    losses = []
    copier = copier_for(context.world.device)
    with StepPrefetcher(iter(steps), context.host_input, copier, ahead=True) as prepared_steps:
        for prepared in prepared_steps:
            losses.append(context.train_executor.run(replace(prepared.input, lr=LEARNING_RATE)).loss)
            marks.append(clock.mark())
    if not np.isfinite(losses).all():
        raise MmtrainError(f"a loss is not finite: {losses}")
    seconds = np.diff(clock.seconds(marks))[num_warm:].tolist()
    paces = [_pace(context, plan, data, s) for data, s in zip(steps[num_warm:], seconds, strict=True)]
    return (
        Pace(
            statistics.median(pace.step_s for pace in paces),
            statistics.median(pace.tokens_per_s for pace in paces),
            statistics.median(pace.mfu for pace in paces),
        ),
        tuple(losses),
    )


def _pace(context: RankContext, plan: Plan, data: StepData, seconds: float) -> Pace:
    meta = data.meta
    flops = counted_flops(context.shape, meta)
    peak = preset(plan.hardware).peak_flops(context.precision)
    return Pace(seconds, int(meta.tokens.sum()) / seconds, flops / seconds / peak)


def _allocator_counts(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {name: int(stats[name]) for name in ALLOCATOR_COUNTS if name in stats}


def _profile(context: RankContext, plan: Plan, data: StepData, result: CaseResult, with_kernels: bool) -> None:
    """Find the device's idle share in a step under the profiler, and the kernels that took most of it."""
    paces: list[Pace] = []
    profiled = profile_step(lambda: paces.append(_time_steps(context, plan, [data], 0)[0]))
    if profiled.busy_s is not None:
        result.idle_share = max(0.0, 1 - profiled.busy_s / paces[0].step_s)
    if with_kernels:
        result.kernels = profiled.table


if __name__ == "__main__":
    main()
