"""Plans run for a few steps on this machine: what `mmtrain plan --measure` decides by (OmniBal)."""

import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from mmtrain.data import GroupStream, Preparer, build
from mmtrain.errors import UserError
from mmtrain.plan.aims import step_aims
from mmtrain.plan.plan import Plan
from mmtrain.recipe import Recipe
from mmtrain.runtime.job import assemble
from mmtrain.runtime.launch import launch_local
from mmtrain.runtime.world import Address, hardware_here, join, leave

WARM_UP, STEPS = 2, 3  # the first steps fill caches and open connections


def measured_step(recipe: Recipe, plan: Plan) -> float:
    """Seconds of a step of the plan on this machine's ranks: the slowest rank's, median of a few after warm-up.

    Every plan is given the run's own first batches, data made ready before the clock starts. Weights stay as they are.

    Raises:
        UserError: the plan is for other hardware, or for more GPUs than this machine has.
        RunError: the plan could not be run, for want of memory for one.
    """
    here = hardware_here()
    if plan.hardware != here:
        raise UserError(f"--measure: the plan is for {plan.hardware} and this machine is {here}; plan without")
    if torch.cuda.is_available() and plan.world_size > torch.cuda.device_count():
        raise UserError(
            f"--measure: the plan is for {plan.world_size} ranks and this machine has {torch.cuda.device_count()} "
            "GPUs; measure on one node with --set cluster.ranks, or plan without"
        )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        launch_local(plan.world_size, partial(_run_rank, recipe, plan, out))
        return float(statistics.median(json.loads(out.read_text(encoding="utf-8"))))


def _run_rank(recipe: Recipe, plan: Plan, out: Path, address: Address) -> None:
    world = join(address)
    job = assemble(recipe, plan, world)
    index = build(recipe)
    stream, preparer = GroupStream.of(recipe, index), Preparer(index, recipe, job.needs, job.num_microbatches)
    aims, seconds = step_aims(recipe, plan, index.lengths), []
    for step in range(WARM_UP + STEPS):
        data = preparer.prepare(stream.batch(step, recipe.train.global_batch, job.dp, job.num_microbatches, aims))
        world.barrier()
        begin = time.perf_counter()
        job.train(data, lr=0.0)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    slowest = [max(column) for column in zip(*world.gather(seconds), strict=True)]
    if world.is_first:
        out.write_text(json.dumps(slowest[WARM_UP:]), encoding="utf-8")
    leave()
