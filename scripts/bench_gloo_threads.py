"""Compare collectives and steps with and without gloo's listening threads as batch work.

    python -m scripts.bench_gloo_threads            # about a minute; two ranks, each on a core of its own

Two ranks time collectives, and steps of a small model in two placements that wait for collectives, by turns with both
policies. `mmtrain.runtime.gloo_threads` says why they differ. Linux only.
"""

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from mmtrain.data import BatchBuilder, GroupStream, build_index
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.plan import Plan
from mmtrain.plan.planner import plan_recipe
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.gloo_threads import listening_threads
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.world import Address, World, join, leave
from scripts.bench_costs import CASES, DEMO, MODELS

PLACEMENTS = ("wide, tensor-parallel", "replicated, sharded")  # cases of `bench_costs`
KIB = 2**10
SIZES = (4 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
WARM_UP, ROUNDS, REPEATS, STEPS = 3, 6, 20, 12


def main() -> None:
    """Plan both placements and start the ranks."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, torch {torch.__version__}")
    launch_local(2, _time_collectives)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        generate_demo(data, seed=0, train=500, heldout=10)
        common = (f"data.sources=[{{path: {data / 'train.json'}}}]", f"data.tokenizer={data / 'tokenizer.json'}",
                  "data.validation=[]", "train.validate_every=0", "cluster.hardware=cpu-core")  # fmt: skip
        for name in PLACEMENTS:
            model, settings = CASES[name]
            recipe = load_recipe(DEMO, [*common, *MODELS[model], *settings]).recipe
            lengths = build_index(recipe).lengths
            chosen = plan_recipe(recipe, lengths, world_size=2, hardware="cpu-core", recipe_sha256="")
            launch_local(2, partial(_time_steps, name, recipe, chosen))


def _start(address: Address) -> World:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[address.rank % len(cores)]})
    return join(address)


def _by_turns(world: World, work: Callable[[], object], rounds: int, repeats: int) -> dict[int, list[float]]:
    """Return seconds of `work` by policy of the listening threads, in turns of some repeats each."""
    seconds: dict[int, list[float]] = {os.SCHED_OTHER: [], os.SCHED_BATCH: []}
    for _ in range(rounds):
        for policy, of_policy in seconds.items():
            for thread in listening_threads():
                os.sched_setscheduler(thread, policy, os.sched_param(0))
            for _ in range(repeats):
                world.barrier()
                start_s = time.perf_counter()
                work()
                of_policy.append(time.perf_counter() - start_s)
    return seconds


def _print(world: World, name: str, seconds: dict[int, list[float]]) -> None:
    if world.is_first:
        ordinary, batch = ([f"{s * 1e3:6.2f}" for s in statistics.quantiles(of, n=4)] for of in seconds.values())
        ratio = statistics.median(seconds[os.SCHED_OTHER]) / statistics.median(seconds[os.SCHED_BATCH])
        print(f"{name:<24} ms (quartiles): ordinary {', '.join(ordinary)}   batch {', '.join(batch)}   {ratio:.2f}x")


def _time_collectives(address: Address) -> None:
    world = _start(address)
    for nbytes in SIZES:
        data, half = torch.zeros(nbytes // 4), torch.zeros(nbytes // 8)
        for name, work in (
            ("all_reduce", partial(dist.all_reduce, data)),
            ("all_gather", partial(dist.all_gather_into_tensor, data, half)),
            ("reduce_scatter", partial(dist.reduce_scatter_tensor, half, data)),
        ):
            _print(world, f"{name} {nbytes // KIB} KiB", _by_turns(world, work, ROUNDS, REPEATS))
    leave()


def _time_steps(name: str, recipe: Recipe, chosen: Plan, address: Address) -> None:
    world = _start(address)
    job = build_rank_context(recipe, chosen, world)
    index = build_index(recipe)
    stream = GroupStream.of(recipe, index)
    builder = BatchBuilder(index, recipe, job.needs, job.num_microbatches)
    data = builder.build(stream.batch(0, recipe.train.global_batch, job.dp, job.num_microbatches))
    for _ in range(WARM_UP):
        job.train(data, lr=0.0)
    _print(world, name, _by_turns(world, partial(job.train, data, lr=0.0), STEPS, 1))
    leave()


if __name__ == "__main__":
    main()
