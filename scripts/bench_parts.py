"""Measure the overhead of running every forward and backward layer by layer instead of as a whole.

    python scripts/bench_parts.py recipes/demo.yaml [--set a.b=c ...]

One rank on one core holds all units. Two programs of the same plan run alternately on the same batches: the planner's
own order, and the same order with every action divided at every layer. Both compute the same numbers.
"""

import os
import platform
import statistics
import sys
import time
from functools import partial
from pathlib import Path

from mmtrain.data import BatchBuilder, GroupStream, build_index
from mmtrain.models.model_shape import build_model_shape
from mmtrain.plan.artifact.plan import Plan
from mmtrain.plan.artifact.plan_graph import stage_graph
from mmtrain.plan.planner import plan_recipe
from mmtrain.program import Partial, action_to_text, build_1f1b
from mmtrain.program.ir.segments import direction, num_segments
from mmtrain.recipe import Recipe, load_recipe, recipe_fingerprint
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.world import Address, join, leave

WARM_UP, STEPS = 5, 30


def main() -> None:
    recipe_file, *options = sys.argv[1:]
    recipe = load_recipe(
        Path(recipe_file), [*(o for o in options if o != "--set"), "parallel.placement=unified"]
    ).recipe
    chosen = plan_recipe(
        recipe, build_index(recipe).lengths, world_size=1, hardware="cpu-core", recipe_sha256=recipe_fingerprint(recipe)
    )
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; {chosen.placement} plan")
    launch_local(1, partial(bench_rank, recipe, chosen))


def bench_rank(recipe: Recipe, chosen: Plan, address: Address) -> None:
    """Run the steps of both programs alternately and print their times."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    world = join(address)
    jobs = [build_rank_context(recipe, of_kind, world) for of_kind in (chosen, divide_at_layers(recipe, chosen))]
    index = build_index(recipe)
    stream = GroupStream.of(recipe, index)
    batch_builder = BatchBuilder(index, recipe, jobs[0].needs, jobs[0].num_microbatches)
    seconds: list[list[float]] = [[], []]
    for step in range(WARM_UP + STEPS):
        data = batch_builder.build(stream.batch(step, recipe.train.global_batch, jobs[0].dp, jobs[0].num_microbatches))
        losses = []
        for job, times in zip(jobs, seconds, strict=True):
            start = time.perf_counter()
            losses.append(job.train(data, lr=1e-3).loss)
            times.append(time.perf_counter() - start)
        # Equal but for rounding: gradients of a tied weight are added in another order.
        assert abs(losses[0] - losses[1]) < 1e-5 * losses[0], f"step {step}: losses {losses}"
    ratio = statistics.median(b / a for a, b in list(zip(*seconds, strict=True))[WARM_UP:])
    whole_s, divided_s = (statistics.median(times[WARM_UP:]) for times in seconds)
    counts = [len(job.program.for_rank(0)) for job in jobs]
    per_action_us = (divided_s - whole_s) / (counts[1] - counts[0]) * 1e6
    print(
        f"step {whole_s * 1e3:.1f} ms with {counts[0]} actions, {divided_s * 1e3:.1f} ms with {counts[1]}: "
        f"{ratio - 1:+.1%} (median of {STEPS} ratios), {per_action_us:.0f} us per action"
    )
    leave()


def divide_at_layers(recipe: Recipe, chosen: Plan) -> Plan:
    """Return the plan with an explicit order in which every action is divided at every layer."""
    graph = stage_graph(chosen, build_model_shape(recipe))
    order = {}
    for rank, todo in build_1f1b(graph).actions.items():
        lines = []
        for action in todo:
            kind = direction(action)
            layers = range(num_segments(graph, action.stage))
            pieces = [Partial(action.stage, action.mb, kind, i, i + 1) for i in layers]
            lines += [action_to_text(piece) for piece in (pieces if kind == "F" else reversed(pieces))]
        order[rank] = tuple(lines)
    schedule = chosen.schedule.model_copy(update={"kind": "explicit", "order": order})
    return chosen.model_copy(update={"schedule": schedule})


if __name__ == "__main__":
    main()
