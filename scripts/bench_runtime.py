"""Measure the overhead of the executor and the broker over the compute that they run.

    python -m scripts.bench_runtime recipes/demo.yaml [--set a.b=c ...]

Every rank runs pinned to one core. A bare loop would spend only the seconds inside the units' forwards and backwards
and inside the optimizer. What the executor spends beyond them, except waiting for other ranks, is overhead. Part of it
is recording, which every step does; a traced step also gathers and writes its trace after it has ended.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mmtrain.api.local_cluster import resolve_cluster
from mmtrain.data import BatchBuilder, GroupStream, build_index
from mmtrain.planning.artifact.plan import Plan
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.runtime.execution.optimizer import Optimizer
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.execution.recorder import StepRecorder
from mmtrain.runtime.execution.unit import UnitRunner
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.training.hooks.tracing import RunTracer
from mmtrain.runtime.training.step_metrics import StepMetricsReducer
from mmtrain.runtime.world import Address, join, leave
from scripts.measurements import Report, arguments, start
from scripts.plans import fastest_plan

NUM_WARM_UP_STEPS = 5
NUM_STEPS = 30
MAX_OVERHEAD_SHARE = 0.03  # of a step
MAX_RECORDING_SHARE = 0.01  # of a step


class Stopwatch:
    """Adds up the seconds spent inside some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, timed."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start_s

        return run


def main() -> None:
    """Plan the recipe for this machine, and measure each rank."""
    parser = arguments(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    options = parser.parse_args()
    report = start("Executor and broker", options)
    recipe = load_recipe(options.recipe, options.set).recipe
    ranks, hardware = resolve_cluster(recipe)
    lengths = build_index(recipe).lengths
    chosen = fastest_plan(recipe, lengths, ranks, hardware)
    report.line(f"{chosen.placement} plan")
    report.line()
    report.targets()
    launch_local(ranks, partial(bench_rank, report, recipe, chosen))


def bench_rank(report: Report, recipe: Recipe, chosen: Plan, address: Address) -> None:
    """Run the steps on one rank and print their overhead."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[address.rank % len(cores)]})
    compute, recording = Stopwatch(), Stopwatch()
    for name in ("start_step", "start_action", "wait", "arrived", "stop_step"):
        setattr(StepRecorder, name, recording.timed(getattr(StepRecorder, name)))
    for owner, names in ((UnitRunner, ("forward", "backward")), (Optimizer, ("zero_grad", "step"))):
        for name in names:
            setattr(owner, name, compute.timed(getattr(owner, name)))
    world = join(address)
    context = build_rank_context(recipe, chosen, world)
    index = build_index(recipe)
    stream = GroupStream.of(recipe, index)
    builder = BatchBuilder(index, recipe, context.needs, context.num_microbatches)
    num_actions = len(context.program.for_rank(world.rank))
    reducer = StepMetricsReducer(context, stream, chosen.hardware)
    trace = Path(tempfile.gettempdir()) / f"bench-trace-{os.getppid()}.json"
    tracer = RunTracer(context.graph, world, reducer.timing, chosen.sha256, trace)
    rows: list[tuple[float, ...]] = []  # seconds: step, compute, waiting, overhead, recording
    for step in range(NUM_WARM_UP_STEPS + NUM_STEPS):
        data = builder.build(stream.batch(step, recipe.train.num_groups, context.dp, context.num_microbatches))
        world.barrier()
        compute_before_s, recording_before_s = compute.seconds, recording.seconds
        start_s = time.perf_counter()
        outcome = context.train(data, lr=1e-3)
        step_s = time.perf_counter() - start_s
        compute_s = compute.seconds - compute_before_s
        recording_s = recording.seconds - recording_before_s
        wait_s = outcome.record.seconds()["wait"]
        rows.append((step_s, compute_s, wait_s, step_s - compute_s - wait_s, recording_s))
        if step == NUM_WARM_UP_STEPS:
            start_s = time.perf_counter()
            tracer.add_step(step, outcome)
            trace_s = time.perf_counter() - start_s
    trace.unlink(missing_ok=True)
    step_s, compute_s, wait_s, overhead_s, recording_s = (
        statistics.median(column) for column in zip(*rows[NUM_WARM_UP_STEPS:], strict=True)
    )
    label = f"rank {world.rank} ({', '.join(context.units)})"
    parts = ", ".join(f"{1e3 * seconds:.1f}" for seconds in (step_s, compute_s, wait_s, overhead_s))
    report.figure(f"{label}: step, compute, waiting, overhead, ms", parts)
    report.target(f"{label}: overhead over the step", overhead_s / step_s, MAX_OVERHEAD_SHARE)
    report.target(f"{label}: recording over the step", recording_s / step_s, MAX_RECORDING_SHARE)
    of_actions = f"{overhead_s / num_actions * 1e6:.0f}, {recording_s / num_actions * 1e6:.1f}"
    report.figure(f"{label}: overhead, recording of each of {num_actions} actions, us", of_actions)
    report.figure(f"{label}: a trace, ms after its step", f"{1e3 * trace_s:.1f}")
    leave()


if __name__ == "__main__":
    main()
