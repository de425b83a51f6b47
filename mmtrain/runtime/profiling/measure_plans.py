"""Run plans for a few steps on this machine: `mmtrain plan --measure` ranks them by their measured step times."""

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mmtrain.balance import BatchMeta
from mmtrain.costs import RankMemory, TokenLoad, preset_for_device
from mmtrain.data import BatchBuilder, GroupStream, build_index
from mmtrain.errors import RunError, UserError
from mmtrain.planning.artifact.balancing_targets import derive_step_targets
from mmtrain.planning.artifact.plan import LargestMicrobatch, Plan, StepMeasurement
from mmtrain.planning.artifact.plan_memory import plan_memory
from mmtrain.program.ir.step_loads import step_loads
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import RankContext, build_rank_context
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.resilience.out_of_memory import (
    held_memory_bytes,
    is_out_of_memory,
    peak_memory_bytes,
    peak_reserved_bytes,
)
from mmtrain.runtime.world import Address, join, leave

PLAN_WARM_UP_STEPS = 2  # fill caches and open connections
MEASURED_STEPS = 3

RESULT_FILE = "measured.json"
OUT_OF_MEMORY_FILE = "out_of_memory"


def measure_step(recipe: Recipe, plan: Plan) -> StepMeasurement:
    """Run a few steps of the plan on this machine; return its step time and memory.

    The time is the slowest rank's, median of a few steps after warm-up. The plan trains on the run's own first batches,
    loaded before the clock starts, with a learning rate of 0. Running out of memory is a result.

    Raises:
        UserError: the plan is for other hardware, or for more GPUs than this machine has.
        RunError: the plan could not be run for another reason than memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            measured = _run(recipe, [plan], MEASURED_STEPS, Path(folder))
        except RunError:
            if not (Path(folder) / OUT_OF_MEMORY_FILE).exists():
                raise
            return StepMeasurement(math.inf, is_out_of_memory=True)
    return StepMeasurement(statistics.median(measured.seconds[0]), measured.memory_ratio)


def measure_step_times(recipe: Recipe, plans: Sequence[Plan], num_steps: int) -> list[list[float]]:
    """Return the seconds of `num_steps` steps of each plan, after warm-up; all plans need the same number of ranks.

    The plans alternate step by step, so that other work on the machine slows all of them alike; they must fit into
    memory together. Otherwise as `measure_step_time`.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _run(recipe, plans, num_steps, Path(folder)).seconds


class _RunResult(NamedTuple):
    seconds: list[list[float]]  # of the slowest rank, (plans, steps)
    memory_ratio: float  # see `StepMeasurement`; of all plans together


def _run(recipe: Recipe, plans: Sequence[Plan], num_steps: int, folder: Path) -> _RunResult:
    """Run the plans in turn, in processes of their own, which leave their results in `folder`."""
    hardware = preset_for_device(torch.cuda.get_device_name(0) if torch.cuda.is_available() else None)
    world_size = plans[0].world_size
    assert all(plan.world_size == world_size for plan in plans), "they run in the same processes"
    for plan in plans:
        if plan.hardware != hardware:
            raise UserError(
                f"--measure: the plan is for {plan.hardware} and this machine is {hardware}; leave --measure out"
            )
    if torch.cuda.is_available() and world_size > torch.cuda.device_count():
        raise UserError(
            f"--measure: the plan is for {world_size} ranks and this machine has {torch.cuda.device_count()} "
            "GPUs; measure on one node with --set cluster.ranks, or leave --measure out"
        )
    launch_local(world_size, partial(_run_rank, recipe, plans, num_steps, folder))
    return _RunResult(**json.loads((folder / RESULT_FILE).read_text(encoding="utf-8")))


def _run_rank(recipe: Recipe, plans: Sequence[Plan], num_steps: int, folder: Path, address: Address) -> None:
    """Run the plans in turn as one rank; rank 0 writes what all saw, and a rank without memory says so."""
    try:
        _measure_as_rank(recipe, plans, num_steps, folder, address)
    except Exception as error:
        if is_out_of_memory(error):
            (folder / OUT_OF_MEMORY_FILE).touch()
        raise


def _measure_as_rank(recipe: Recipe, plans: Sequence[Plan], num_steps: int, folder: Path, address: Address) -> None:
    world = join(address)
    if world.device.type == "cpu":
        torch.set_num_threads(1)  # a rank is one core, as in training
    bytes_before = held_memory_bytes(world.device)
    index = build_index(recipe)
    stream = GroupStream.of(recipe, index)
    targets = [derive_step_targets(recipe, plan, index.lengths) for plan in plans]
    contexts = [build_rank_context(recipe, plan, world) for plan in plans]
    builders = [BatchBuilder(index, recipe, context.needs, context.num_microbatches) for context in contexts]
    seconds: list[list[float]] = []  # of this rank, (steps, plans)
    counted_bytes = communicator_bytes = 0.0
    for step in range(PLAN_WARM_UP_STEPS + num_steps):
        seconds.append([])
        counted: list[RankMemory] = []
        for context, builder, plan, plan_targets in zip(contexts, builders, plans, targets, strict=True):
            num_groups = recipe.train.num_groups
            batch = stream.batch(step, num_groups, context.dp, context.num_microbatches, plan_targets)
            data = builder.build(batch)
            world.barrier()
            record = context.train(data, lr=0.0).record
            seconds[-1].append(record.end_s - record.start_s)
            counted.append(counted_memory(recipe, plan, context, batch))
        counted_bytes = max(counted_bytes, sum(memory.total for memory in counted))
        communicator_bytes = sum(memory.communicators for memory in counted)
    # What communicators hold is not the allocator's, so it is taken as counted.
    held = (peak_reserved_bytes(world.device) or peak_memory_bytes(world.device)) - bytes_before + communicator_bytes
    all_seconds = np.array(world.all_gather(seconds))  # (ranks, steps, plans)
    ratios = np.array(world.all_gather(held / counted_bytes))
    if world.is_first:
        slowest = all_seconds.max(axis=0)[PLAN_WARM_UP_STEPS:]
        result = {"seconds": slowest.T.tolist(), "memory_ratio": float(ratios.max())}
        (folder / RESULT_FILE).write_text(json.dumps(result), encoding="utf-8")
    leave()


def counted_memory(recipe: Recipe, plan: Plan, context: RankContext, batch: BatchMeta) -> RankMemory:
    """Return what the memory model counts for this rank if no microbatch is larger than those of the batch."""
    largest: dict[str, TokenLoad] = {}
    for mb, load in step_loads(context.graph, batch).loads.items():
        if mb.unit not in largest or load.tokens > largest[mb.unit].tokens:
            largest[mb.unit] = load
    microbatches = {unit: LargestMicrobatch(**asdict(load)) for unit, load in largest.items()}
    of_batch = plan.model_copy(update={"data": plan.data.model_copy(update={"largest_microbatch": microbatches})})
    by_rank = plan_memory(recipe, of_batch, context.shape)
    fullest = max(by_rank.values(), key=lambda memory: memory.total)
    return by_rank.get(context.world.rank, fullest)  # ranks of other replica groups hold what those of the first hold
