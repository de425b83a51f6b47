"""Run plans for a few steps on this machine: `mmtrain plan --measure` ranks them by their measured step times."""

import json
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mmtrain.costs import preset_for_device
from mmtrain.data import BatchBuilder, GroupStream, build_index
from mmtrain.errors import UserError
from mmtrain.plan.artifact.balancing_targets import derive_step_targets
from mmtrain.plan.artifact.plan import Plan
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.world import Address, join, leave

PLAN_WARM_UP_STEPS = 2  # fill caches and open connections
MEASURED_STEPS = 3


def measure_step_time(recipe: Recipe, plan: Plan) -> float:
    """Return the seconds of a step of the plan on this machine: the slowest rank's, median of a few after warm-up.

    The plan trains on the run's own first batches, loaded before the clock starts, with a learning rate of 0.

    Raises:
        UserError: the plan is for other hardware, or for more GPUs than this machine has.
        RunError: the plan could not be run, for example because memory ran out.
    """
    [seconds] = measure_step_times(recipe, [plan], MEASURED_STEPS)
    return statistics.median(seconds)


def measure_step_times(recipe: Recipe, plans: Sequence[Plan], num_steps: int) -> list[list[float]]:
    """Return the seconds of `num_steps` steps of each plan, after warm-up; all plans need the same number of ranks.

    The plans alternate step by step, so that other work on the machine slows all of them alike; they must fit into
    memory together. Otherwise as `measure_step_time`.
    """
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
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        launch_local(world_size, partial(_run_rank, recipe, plans, num_steps, out))
        seconds: list[list[float]] = json.loads(out.read_text(encoding="utf-8"))
        return seconds


def _run_rank(recipe: Recipe, plans: Sequence[Plan], num_steps: int, out: Path, address: Address) -> None:
    """Run the plans in turn as one rank; rank 0 writes the slowest rank's seconds, (plans, steps), to `out`."""
    world = join(address)
    if world.device.type == "cpu":
        torch.set_num_threads(1)  # a rank is one core, as in training
    index = build_index(recipe)
    stream = GroupStream.of(recipe, index)
    targets = [derive_step_targets(recipe, plan, index.lengths) for plan in plans]
    contexts = [build_rank_context(recipe, plan, world) for plan in plans]
    builders = [BatchBuilder(index, recipe, context.needs, context.num_microbatches) for context in contexts]
    seconds: list[list[float]] = []  # of this rank, (steps, plans)
    for step in range(PLAN_WARM_UP_STEPS + num_steps):
        seconds.append([])
        for context, builder, plan_targets in zip(contexts, builders, targets, strict=True):
            num_groups = recipe.train.global_batch
            batch = stream.batch(step, num_groups, context.dp, context.num_microbatches, plan_targets)
            data = builder.build(batch)
            world.barrier()
            record = context.train(data, lr=0.0).record
            seconds[-1].append(record.end_s - record.start_s)
    all_seconds = np.array(world.all_gather(seconds))  # (ranks, steps, plans)
    if world.is_first:
        slowest = all_seconds.max(axis=0)[PLAN_WARM_UP_STEPS:]
        out.write_text(json.dumps(slowest.T.tolist()), encoding="utf-8")
    leave()
