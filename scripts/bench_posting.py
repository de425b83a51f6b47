"""Measure the processor time that a message costs its two ranks: `python -m scripts.bench_posting`.

Two pipeline ranks of the demo's model train a few steps. The script counts the thread time that the computing thread
spends inside the broker. Waiting is not counted, so other work on the machine matters little.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmtrain.data import BatchBuilder, GroupStream, build_index
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.plan import Plan
from mmtrain.plan.planner import plan_recipe
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.runtime.execution.broker import Broker
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.world import Address, join, leave

DEMO = Path(__file__).parents[1] / "recipes" / "demo.yaml"
SENDING, RECEIVING = ("put", "send"), ("receive", "take")
WARM_UP, STEPS = 2, 20


def main() -> None:
    """Plan the run and start its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        generate_demo(data, seed=0, train=500, heldout=10)
        settings = [f"data.sources=[{{path: {data / 'train.json'}}}]", f"data.tokenizer={data / 'tokenizer.json'}",
                    "data.validation=[]", "train.validate_every=0", "train.global_batch=8",
                    "parallel.placement=unified", "parallel.llm.pp=2"]  # fmt: skip
        recipe = load_recipe(DEMO, settings).recipe
        chosen = plan_recipe(recipe, build_index(recipe).lengths, world_size=2, hardware="cpu-core", recipe_sha256="")
        launch_local(2, partial(_run_rank, recipe, chosen))


def _run_rank(recipe: Recipe, chosen: Plan, address: Address) -> None:
    torch.set_num_threads(1)
    world = join(address)
    seconds = Counter[str]()
    calls = Counter[str]()
    for name in (*SENDING, *RECEIVING):
        setattr(Broker, name, _timed(getattr(Broker, name), name, seconds, calls))
    job = build_rank_context(recipe, chosen, world)
    index = build_index(recipe)
    stream = GroupStream.of(recipe, index)
    batch_builder = BatchBuilder(index, recipe, job.needs, job.num_microbatches)
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            seconds.clear()
            calls.clear()
        job.train(
            batch_builder.build(stream.batch(step, recipe.train.global_batch, job.dp, job.num_microbatches)), lr=0.0
        )
    sent, received = (
        sum(seconds[name] for name in names) / calls[counted]
        for names, counted in ((SENDING, "send"), (RECEIVING, "receive"))
    )
    figures = f"rank {world.rank}: {sent * 1e3:.3f} ms a message sent, {received * 1e3:.3f} ms a message received"
    for line in world.all_gather(figures):
        if world.is_first:
            print(line)
    leave()


def _timed(method: Callable[..., Any], name: str, seconds: Counter[str], calls: Counter[str]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        start = time.thread_time()
        try:
            return method(*args)
        finally:
            seconds[name] += time.thread_time() - start
            calls[name] += 1

    return timed


if __name__ == "__main__":
    main()
