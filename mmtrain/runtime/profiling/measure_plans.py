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

PLAN_WARM_UP_STEPS, MEASURED_STEPS = 2, 3  # the first steps fill caches and open connections


def measure_step_time(recipe: Recipe, plan: Plan) -> float:
    """Seconds of a step of the plan on this machine's ranks: the slowest rank's, median of a few after warm-up.

    Every plan is given the run's own first batches, data made ready before the clock starts. Weights stay as they are.

    Raises:
        UserError: the plan is for other hardware, or for more GPUs than this machine has.
        RunError: the plan could not be run, for want of memory for one.
    """
    [seconds] = measure_step_times(recipe, [plan], MEASURED_STEPS)
    return statistics.median(seconds)


def measure_step_times(recipe: Recipe, plans: Sequence[Plan], rounds: int) -> list[list[float]]:
    """Seconds of `rounds` steps of each plan, after warm-up, of plans for as many ranks as each other.

    The plans take turns, step by step, so that what else the machine does slows all of them alike; they must fit into
    memory side by side. Otherwise as `measure_step_time`.
    """
    here = preset_for_device(torch.cuda.get_device_name(0) if torch.cuda.is_available() else None)
    world_size = plans[0].world_size
    assert all(plan.world_size == world_size for plan in plans), "they run in the same processes"
    for plan in plans:
        if plan.hardware != here:
            raise UserError(f"--measure: the plan is for {plan.hardware} and this machine is {here}; plan without")
    if torch.cuda.is_available() and world_size > torch.cuda.device_count():
        raise UserError(
            f"--measure: the plan is for {world_size} ranks and this machine has {torch.cuda.device_count()} "
            "GPUs; measure on one node with --set cluster.ranks, or plan without"
        )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        launch_local(world_size, partial(_run_rank, recipe, plans, rounds, out))
        found: list[list[float]] = json.loads(out.read_text(encoding="utf-8"))
        return found


def _run_rank(recipe: Recipe, plans: Sequence[Plan], rounds: int, out: Path, address: Address) -> None:
    world = join(address)
    if world.device.type == "cpu":
        torch.set_num_threads(1)  # a rank is one core, as in training
    index = build_index(recipe)
    stream = GroupStream.of(recipe, index)
    targets = [derive_step_targets(recipe, plan, index.lengths) for plan in plans]
    jobs = [build_rank_context(recipe, plan, world) for plan in plans]
    batch_builders = [BatchBuilder(index, recipe, job.needs, job.num_microbatches) for job in jobs]
    rows: list[list[float]] = []
    for step in range(PLAN_WARM_UP_STEPS + rounds):
        rows.append([])
        for job, batch_builder, wanted in zip(jobs, batch_builders, targets, strict=True):
            batch = stream.batch(step, recipe.train.global_batch, job.dp, job.num_microbatches, wanted)
            data = batch_builder.build(batch)
            world.barrier()
            record = job.train(data, lr=0.0).record
            rows[-1].append(record.end_s - record.start_s)
    everywhere = np.array(world.all_gather(rows))  # (ranks, steps, plans)
    if world.is_first:
        out.write_text(json.dumps(everywhere.max(axis=0)[PLAN_WARM_UP_STEPS:].T.tolist()), encoding="utf-8")
    leave()
