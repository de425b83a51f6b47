"""What the executor and the broker cost beside the compute they drive.

    python scripts/bench_runtime.py recipes/demo.yaml [--set a.b=c ...]

Every rank runs pinned to one core. A bare loop would spend only the seconds inside the units' forwards and backwards
and inside the optimizer; what the executor spends beyond them, waiting for other ranks apart, is overhead. Part of that
is recording, which every step does; a step whose trace is wanted pays for gathering and writing it once it is over.
"""

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mmtrain.cli.local_cluster import resolve_cluster
from mmtrain.data import BatchBuilder, GroupStream, build_index
from mmtrain.plan.artifact.plan import Plan
from mmtrain.plan.planner import plan_recipe
from mmtrain.recipe import Recipe, load_recipe, recipe_fingerprint
from mmtrain.runtime.execution.optimizer import Optimizer
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.execution.recorder import StepRecorder
from mmtrain.runtime.execution.unit import UnitRunner
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.training.run_tracer import RunTracer
from mmtrain.runtime.training.step_metrics import StepMetricsReducer
from mmtrain.runtime.world import Address, join, leave

WARM_UP, STEPS = 5, 30
LIMIT, RECORD_LIMIT = 0.03, 0.01  # of a step


class Stopwatch:
    """Adds up the seconds spent inside some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, timed."""

        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return run


def main() -> None:
    recipe_file, *options = sys.argv[1:]
    recipe = load_recipe(Path(recipe_file), [o for o in options if o != "--set"]).recipe
    ranks, hardware = resolve_cluster(recipe)
    lengths = build_index(recipe).lengths
    chosen = plan_recipe(recipe, lengths, world_size=ranks, hardware=hardware, recipe_sha256=recipe_fingerprint(recipe))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; {chosen.placement} plan")
    launch_local(ranks, partial(bench_rank, recipe, chosen))


def bench_rank(recipe: Recipe, chosen: Plan, address: Address) -> None:
    """Run the steps on one rank and print what they cost."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[address.rank % len(cores)]})
    inside, recording = Stopwatch(), Stopwatch()
    for name in ("start_step", "start_action", "wait", "arrived", "stop_step"):
        setattr(StepRecorder, name, recording.timed(getattr(StepRecorder, name)))
    for owner, names in ((UnitRunner, ("forward", "backward")), (Optimizer, ("zero_grad", "step"))):
        for name in names:
            setattr(owner, name, inside.timed(getattr(owner, name)))
    world = join(address)
    job = build_rank_context(recipe, chosen, world)
    index = build_index(recipe)
    stream = GroupStream.of(recipe, index)
    batch_builder = BatchBuilder(index, recipe, job.needs, job.num_microbatches)
    num_actions = len(job.program.for_rank(world.rank))
    meter = StepMetricsReducer(job, stream, chosen.hardware)
    trace = Path(tempfile.gettempdir()) / f"bench-trace-{os.getppid()}.json"
    tracer = RunTracer(job.graph, world, meter.timing, chosen.sha256, trace)
    rows = []
    for step in range(WARM_UP + STEPS):
        data = batch_builder.build(stream.batch(step, recipe.train.global_batch, job.dp, job.num_microbatches))
        world.barrier()
        before, recorded, begin = inside.seconds, recording.seconds, time.perf_counter()
        outcome = job.train(data, lr=1e-3)
        step_s = time.perf_counter() - begin
        bare_s, wait_s = inside.seconds - before, outcome.record.seconds()["wait"]
        over_s, record_s, begin = step_s - bare_s - wait_s, recording.seconds - recorded, time.perf_counter()
        if step == WARM_UP:
            tracer.add_step(step, outcome)
            trace_s = time.perf_counter() - begin
        rows.append((step_s, bare_s, wait_s, over_s, record_s))
    trace.unlink(missing_ok=True)
    step_s, bare_s, wait_s, over_s, record_s = (
        statistics.median(column) for column in zip(*rows[WARM_UP:], strict=True)
    )
    verdict = "within" if over_s <= LIMIT * step_s else "above"
    parts = f"compute {bare_s * 1e3:.1f} + waiting {wait_s * 1e3:.1f} + overhead {over_s * 1e3:.2f} ms"
    print(
        f"rank {world.rank} ({', '.join(job.units)}): step {step_s * 1e3:.1f} ms = {parts}\n  overhead is "
        f"{over_s / step_s:.1%} of the step ({verdict} {LIMIT:.0%}), {over_s / num_actions * 1e6:.0f} us for each of "
        f"{num_actions} actions\n  recording is {record_s / step_s:.2%} of the step (limit {RECORD_LIMIT:.0%}), "
        f"{record_s / num_actions * 1e6:.1f} us for each action; a trace took {trace_s * 1e3:.1f} ms after its step",
        flush=True,
    )
    leave()


if __name__ == "__main__":
    main()
