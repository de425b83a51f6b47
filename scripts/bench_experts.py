"""Compare predicted with measured steps of a mixture of experts whose router loads them unevenly.

    python -m scripts.bench_experts                  # about five minutes
    python -m scripts.bench_experts --steps 4

Two ranks hold eight experts together (ep 2). Both the cost table and the steps count processor seconds of the thread
that computes, in which waiting is not counted. So a step is what it takes where each rank has a core of its own, also
on a busy machine. The ranks wait for each other in every all-to-all. A step is therefore the sum, over what lies
between two all-to-alls or actions, of the rank that computed longest. Messages take no time, neither here nor in the
prediction. `scripts.bench_costs --only mixture` counts memory, and steps by the clock.

First some steps are trained to record how unevenly experts are loaded (`parallel.llm.expert_spread`).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from mmtrain.costs.cost_table import CostTable, MessageEntry
from mmtrain.data import BatchBuilder, GroupStream, build_index
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.planning import Plan
from mmtrain.planning.artifact.balancing_targets import derive_step_targets
from mmtrain.planning.evaluate.simulate_plan import simulate_plan
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.runtime.execution import recorder
from mmtrain.runtime.execution.executor import Executor
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.execution.recorder import HostClock
from mmtrain.runtime.profiling.profile import ProfileRequest, profile
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.training.expert_reduction import ExpertLoadReducer
from mmtrain.runtime.world import Address, join, leave
from scripts.bench_costs import DEMO, MIXTURE, UNIFIED
from scripts.measurements import arguments, start
from scripts.plans import fastest_plan

RANKS, WARM_UP, REPEATS = 2, 2, (3, 8)
FREE_S = 1e-12  # of messages
KINDS = ("p2p", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
SETTINGS = (UNIFIED, f"parallel.llm.dp={RANKS}", f"parallel.llm.ep={RANKS}", "train.global_batch=8",
            "cluster.hardware=cpu-core", "data.validation=[]", "train.validate_every=0")  # fmt: skip
CASES: dict[str, tuple[str, ...]] = {"ep 2": (), "ep 2, recomputed": ("parallel.llm.recompute=all",)}


class ThreadClock(HostClock):
    """Processor seconds of the thread that computes."""

    def __init__(self) -> None:
        """Read the time of the calling thread."""
        self.mark = time.thread_time


@dataclass(frozen=True)
class Compared:
    """A case's prediction beside its measurement, medians over steps."""

    step: float  # predicted over measured seconds
    if_even: float  # the same, had the prediction been of equal loads
    measured_s: float
    spread: float  # recorded, see `parallel.llm.expert_spread`
    fullest_rank: float  # recorded: rows of the fullest rank over the mean


def main() -> None:
    options = _options()
    report = start("Predicted beside measured steps of a mixture", options)
    report.table("case", "step", "recorded spread", "fullest rank", "predicted / measured", "with equal loads")
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        for case, compared in compare(Path(name), options.steps, options.set):
            numbers = (compared.spread, compared.fullest_rank, compared.step, compared.if_even)
            report.row(case, f"{compared.measured_s * 1e3:.0f} ms", *(f"{number:.2f}" for number in numbers))
            worst = max(worst, 100 * abs(compared.step - 1))
    report.line()
    report.targets()
    report.target("error of steps, worst, %", worst, 15)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="that are measured")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    return parser.parse_args()


def compare(folder: Path, num_steps: int, settings: list[str]) -> Iterator[tuple[str, Compared]]:
    """Yield each case with its figures; files go to `folder`."""
    data, costs = folder / "data", folder / "costs.json"
    generate_demo(data, seed=0, train=2000, heldout=10)
    common = (f"data.sources=[{{path: {data / 'train.json'}}}]", f"data.tokenizer={data / 'tokenizer.json'}",
              *MIXTURE, *SETTINGS, *settings)  # fmt: skip
    with patch.object(recorder, "HostClock", ThreadClock):
        for case, changes in CASES.items():
            recipe = load_recipe(DEMO, [*common, *changes]).recipe
            if not costs.exists():
                _measured_table(recipe).save(costs)
            cluster = recipe.cluster.model_copy(update={"costs": costs})
            yield case, _compare(recipe.model_copy(update={"cluster": cluster}), folder / "steps.json", num_steps)


def _measured_table(recipe: Recipe) -> CostTable:
    """Return the layers' processor seconds, with messages that take no time."""
    tp = {"vision": (1,), "llm": (1,)}
    free = recipe.model_copy(update={"parallel": type(recipe.parallel)()})
    lengths = build_index(recipe).lengths
    table = profile(ProfileRequest(free, "cpu-core", RANKS, tp, lengths, repeats=REPEATS)).table
    messages = tuple(MessageEntry(kind=kind, size=RANKS, nbytes=(1,), seconds=(FREE_S,)) for kind in KINDS)
    return table.model_copy(update={"messages": messages})


def _compare(recipe: Recipe, file: Path, num_steps: int) -> Compared:
    """Plan the case, train steps, and predict the same ones with the loads of experts that were recorded."""
    index = build_index(recipe)
    chosen = fastest_plan(recipe, index.lengths, RANKS, "cpu-core")
    launch_local(RANKS, partial(_run_rank, recipe, chosen, num_steps, file))
    measured, spread, fullest_rank = json.loads(file.read_text(encoding="utf-8"))
    predicted, even = (
        np.array(_predicted_steps(recipe, fastest_plan(stated, index.lengths, RANKS, "cpu-core"), num_steps))
        for stated in (_with_spread(recipe, spread), _with_spread(recipe, 0.0))
    )
    ratios = [float(np.median(steps / np.array(measured))) for steps in (predicted, even)]
    return Compared(*ratios, statistics.median(measured), spread, fullest_rank)


def _with_spread(recipe: Recipe, spread: float) -> Recipe:
    llm = recipe.parallel.llm.model_copy(update={"expert_spread": spread})
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"llm": llm})})


def _predicted_steps(recipe: Recipe, chosen: Plan, num_steps: int) -> list[float]:
    """Return the simulated seconds of the steps that are measured."""
    index = build_index(recipe)
    stream = GroupStream.of(recipe, index)
    dp = {name: unit.dp for name, unit in chosen.units.items()}
    targets = derive_step_targets(recipe, chosen, index.lengths)
    counts = chosen.schedule.num_microbatches
    steps = range(WARM_UP, WARM_UP + num_steps)
    batches = [stream.batch(step, recipe.train.num_groups, dp, counts, targets) for step in steps]
    return [simulate_plan(recipe, chosen, batch).step_time_s for batch in batches]


def _run_rank(recipe: Recipe, chosen: Plan, num_steps: int, file: Path, address: Address) -> None:
    """Train steps; the first rank writes what they took, and how unevenly experts were loaded."""
    torch.set_num_threads(1)
    world = join(address)
    job = build_rank_context(recipe, chosen, world)
    index = build_index(recipe)
    stream, batch_builder = GroupStream.of(recipe, index), BatchBuilder(index, recipe, job.needs, job.num_microbatches)
    targets, loads = derive_step_targets(recipe, chosen, index.lengths), ExpertLoadReducer(job)
    steps = []
    for step in range(WARM_UP + num_steps):
        content = stream.batch(step, recipe.train.num_groups, job.dp, job.num_microbatches, targets)
        data = batch_builder.build(content)
        if step == WARM_UP:
            loads.reduce()
        with _marks() as marks:
            job.train(data, lr=1e-4)
        steps.append(np.diff(marks).tolist())
    of_ranks = np.array(world.all_gather(steps[WARM_UP:]))  # (ranks, steps, parts)
    recorded = loads.reduce()
    assert recorded is not None
    if world.is_first:
        seconds = of_ranks.max(axis=0).sum(axis=1).tolist()
        file.write_text(json.dumps([seconds, recorded.spread, recorded.fullest_rank]), encoding="utf-8")
    leave()


@contextmanager
def _marks() -> Iterator[list[float]]:
    """Give processor seconds of this thread at the borders of actions and at all-to-alls, in which ranks meet.

    What the thread itself does for a message, like copying it to be sent, is left out.
    """
    run, all_to_all = Executor._run, dist.all_to_all_single
    messages_s = 0.0
    marks = [time.thread_time()]

    def timed(executor: Executor, action: Any) -> None:
        run(executor, action)
        marks.append(time.thread_time() - messages_s)

    def met(*arguments: Any, **options: Any) -> Any:
        nonlocal messages_s
        start_s = time.thread_time()
        marks.append(start_s - messages_s)
        work = all_to_all(*arguments, **options)
        messages_s += time.thread_time() - start_s
        return work

    with patch.object(Executor, "_run", timed), patch.object(dist, "all_to_all_single", met):
        yield marks


if __name__ == "__main__":
    main()
