"""How far the costs can be trusted here: what is predicted of a step, beside what is measured.

    python scripts/bench_costs.py recipes/demo.yaml [--set a.b=c ...]

Measures a cost table of the recipe's layers as `mmtrain profile` does, plans once with the preset and once with the
table, and runs the plan on as many local processes, one core each. Prints the interpolation error on loads held out,
the error of the simulated step and of every stage on the same batches, and for each rank the predicted peak memory over
the measured one, counted: saved tensors alive at the fullest moment of all steps, parameters, gradients, optimizer.
"""

import os
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mmtrain.costs.hardware import GIB
from mmtrain.data import GroupStream, Preparer, build
from mmtrain.plan import Plan, plan
from mmtrain.plan.aims import step_aims
from mmtrain.plan.profiling import sizes_to_measure
from mmtrain.plan.rehearse import rehearse
from mmtrain.recipe import Recipe, load, sha256
from mmtrain.report.comparison import Trace, compare, comparison_text
from mmtrain.runtime.activity import Activity
from mmtrain.runtime.job import assemble
from mmtrain.runtime.launch import launch_local
from mmtrain.runtime.measure import Meter
from mmtrain.runtime.memory import predicted_for
from mmtrain.runtime.profile import ProfileRequest, profile
from mmtrain.runtime.recorder import Recorder, clock_of
from mmtrain.runtime.tracing import Tracer
from mmtrain.runtime.world import Address, join, leave

RANKS, WARM_UP, STEPS = 2, 4, 12
MIB = 2**20


def main() -> None:
    recipe_file, *options = sys.argv[1:]
    recipe = load(Path(recipe_file), [o for o in options if o != "--set"]).recipe
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    with tempfile.TemporaryDirectory() as folder:
        found = profile(
            ProfileRequest(recipe, "cpu-core", RANKS, sizes_to_measure(recipe, RANKS), build(recipe).lengths)
        )
        for name, errors in found.errors.items():
            print(f"{name:<12} {len(errors)} loads held out: off by {statistics.median(errors):.1%} (median)")
        print(f"all: {found.median_error:.1%} (limit 10%)")
        table = Path(folder) / "costs.json"
        found.table.save(table)
        measured = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"costs": table})})
        lengths = build(recipe).lengths
        for name, settings in (("modelled", recipe), ("measured", measured)):
            chosen = plan(settings, lengths, world_size=RANKS, hardware="cpu-core", recipe_sha256=sha256(settings))
            print(f"\nplanned with {name} costs: {chosen.placement}")
            launch_local(RANKS, partial(run_rank, settings, chosen, Path(folder) / f"{name}.json"))
            report(settings, chosen, Trace.load(Path(folder) / f"{name}.json"))


def run_rank(recipe: Recipe, chosen: Plan, out: Path, address: Address) -> None:
    """Train some steps, the later ones recorded; then take these once more, and count memory."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[address.rank]})
    torch.set_num_threads(1)
    world = join(address)
    job = assemble(recipe, chosen, world, Activity(recorder=Recorder(clock_of(world.device))))
    index = build(recipe)
    stream = GroupStream.of(recipe, index)
    preparer = Preparer(index, recipe, job.needs, job.num_microbatches)
    meter = Meter(job, stream, chosen.hardware)
    recorded = frozenset(range(WARM_UP + 1, WARM_UP + STEPS + 1))
    tracer = Tracer(recorded, job.graph, world, meter.timing, chosen.sha256, out)
    batches = [
        preparer.prepare(stream.batch(step, recipe.train.global_batch, job.dp, job.num_microbatches))
        for step in range(WARM_UP + STEPS)
    ]
    for step, data in enumerate(batches):
        world.barrier()
        outcome = job.train(data, lr=1e-4)
        if tracer.wants(step + 1):
            tracer.take(step + 1, outcome)
    params = [p for unit in job.units.values() for stage in unit.stages.values() for p in stage.parameters()]
    saved = Saved({p.untyped_storage().data_ptr() for p in params})
    with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda kept: kept.tensor):
        for data in batches[WARM_UP:]:
            job.train(data, lr=1e-4)
    shards = [shard for unit in job.optimizer.units.values() for shard in unit.shards()]
    moments = sum(shard.tensor.nbytes for shard in shards if "#" in shard.name)
    weights = 2 * sum(p.nbytes for p in params)  # and their gradients
    counted = saved.peak + moments + weights
    predicted = predicted_for(world.rank, chosen.predicted.peak_memory_gib)
    assert predicted is not None
    parts = " + ".join(f"{n / MIB:.1f}" for n in (saved.peak, weights, moments))
    lines = world.gather(
        f"rank {world.rank}: predicted {predicted * 1024:.1f} MiB over {parts} counted (saved, weights and gradients, "
        f"optimizer) = {predicted * GIB / counted:.2f} (wanted 1.00 to 1.25)"
    )
    if world.is_first:
        print(*lines, sep="\n", flush=True)
    leave()


@dataclass
class _Kept:
    """A saved tensor; counted as long as autograd holds it."""

    tensor: Tensor
    saved: "Saved"

    def __del__(self) -> None:
        self.saved.drop(self.tensor)


class Saved:
    """Bytes of saved tensors alive, each storage once, weights left out."""

    def __init__(self, weights: set[int]) -> None:
        self._weights, self._alive = weights, dict[int, int]()
        self._bytes = self.peak = 0

    def keep(self, tensor: Tensor) -> _Kept:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._weights:
            self._alive[key] = self._alive.get(key, 0) + 1
            if self._alive[key] == 1:
                self._bytes += storage.nbytes()
                self.peak = max(self.peak, self._bytes)
        return _Kept(tensor, self)

    def drop(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self._alive:
            self._alive[key] -= 1
            if not self._alive[key]:
                del self._alive[key]
                self._bytes -= storage.nbytes()


def report(recipe: Recipe, chosen: Plan, trace: Trace) -> None:
    """Print the simulated steps beside the recorded ones."""
    index = build(recipe)
    stream, dp = GroupStream.of(recipe, index), {name: unit.dp for name, unit in chosen.units.items()}
    counts, aims = chosen.schedule.num_microbatches, step_aims(recipe, chosen, index.lengths)
    batches = [stream.batch(number - 1, recipe.train.global_batch, dp, counts, aims) for number in trace.steps]
    timelines = [rehearse(recipe, chosen, batch) for batch in batches]
    print(comparison_text(compare(timelines, trace), timelines[0].bubble_shares()))


if __name__ == "__main__":
    main()
