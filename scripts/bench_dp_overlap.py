"""Measure what buckets of layers hide of data-parallel communication (`parallel.bucket_parameters`).

Or, with `--grad-reduce fp32 bf16`, what gradients that travel in bf16 save of it (`train.grad_reduce`).

    mmtrain data demo --out demo-data
    python -m scripts.bench_dp_overlap demo-data            # a link of 20 MB/s between two replicas
    python -m scripts.bench_dp_overlap demo-data --megabytes-per-s 50 --bucket-parameters 500000
    python -m scripts.bench_dp_overlap demo-data --grad-reduce fp32 bf16

Two replicas of a small model train with one bucket for all layers, and with several. Every reduction of gradients and
every gathering of parameters takes the time of a slow link, by its bytes, with the core free. A step without the link
gives the seconds of every action, and the simulator predicts from these what the link adds to a step. What it adds in
fact is what ranks wait more in steps with the link, the median of pairs that follow each other: the steps themselves
vary more where other programs use the cores. Losses are equal bit for bit, whatever the buckets.
"""

import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from scripts.measurements import Report, arguments, start
from scripts.slow_link import SlowLink

LINK = SlowLink()
# Before Megatron-core keeps these functions under names of its own.
LINK.carry("reduce_scatter_tensor", "all_gather_into_tensor", "reduce_scatter_single", "all_gather_single")
LINK.carry("all_to_all_single")
LINK.carry_coalesced()

from mmtrain.costs.hardware import ELEMENT_BYTES  # noqa: E402
from mmtrain.data import BatchBuilder, GroupStream, build_index  # noqa: E402
from mmtrain.data.loading.batch_builder import StepData  # noqa: E402
from mmtrain.planning.artifact.plan import Plan  # noqa: E402
from mmtrain.program import GatherParams, ReduceGrads, TransferCost, simulate  # noqa: E402
from mmtrain.program.ir.actions import Action, Collective, Compute, Partial, Send  # noqa: E402
from mmtrain.program.ir.graph import Microbatch, StageId  # noqa: E402
from mmtrain.recipe import Recipe, load_recipe  # noqa: E402
from mmtrain.runtime.execution.rank_context import RankContext, build_rank_context  # noqa: E402
from mmtrain.runtime.resilience.launch import launch_local  # noqa: E402
from mmtrain.runtime.world import Address, World, join, leave  # noqa: E402
from scripts.plans import fastest_plan  # noqa: E402

NUM_RANKS = 2
ONE_BUCKET = 1_000_000_000
SETTINGS = (
    "model.llm.layers=6",
    "model.llm.hidden=256",
    "model.llm.heads=4",
    "model.llm.ffn=1024",
    "model.llm.tie_embeddings=false",
    "parallel.placement=unified",
    "parallel.llm.tp=1",
    "parallel.llm.dp=2",
    "parallel.llm.recompute=none",
    "train.global_batch=4",
)


def main() -> None:
    """Print a line for each size of buckets, and type in which gradients travel."""
    parser = arguments(__doc__)
    parser.add_argument("data", type=Path, help="the folder that `mmtrain data demo` wrote")
    parser.add_argument("--megabytes-per-s", type=float, default=20.0)
    parser.add_argument("--bucket-parameters", type=int, nargs="+", default=[2_000_000, 1_000_000])
    parser.add_argument("--grad-reduce", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--steps", type=int, default=9)
    options = parser.parse_args()
    report = start("Data-parallel communication in buckets of layers", options)
    report.table("gradients", "buckets", "step without a link", "the link", "it adds", "predicted", "hidden", "loss")
    runs = []
    for size, grad_reduce in product((ONE_BUCKET, *options.bucket_parameters), options.grad_reduce):
        settings = [*_settings(options.data, size), f"train.grad_reduce={grad_reduce}"]
        recipe = load_recipe(Path("recipes/demo.yaml"), settings).recipe
        runs.append((recipe, fastest_plan(recipe, build_index(recipe).lengths, NUM_RANKS, "cpu-core")))
    launch_local(NUM_RANKS, partial(_rank_main, report, runs, options.megabytes_per_s * 1e6, options.steps))


def _settings(data: Path, bucket_parameters: int) -> list[str]:
    files = (("sources", "train"), ("validation", "heldout"))
    paths = [f"data.{key}=[{{path: {(data / f'{name}.json').resolve()}}}]" for key, name in files]
    tokenizer = f"data.tokenizer={(data / 'tokenizer.json').resolve()}"
    return [*SETTINGS, *paths, tokenizer, f"parallel.bucket_parameters={bucket_parameters}"]


def _rank_main(
    report: Report, runs: Sequence[tuple[Recipe, Plan]], bytes_per_s: float, num_steps: int, address: Address
) -> None:
    """Train with each size of buckets in turn, one step without the link and one with it."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[address.local_rank % len(cores)]})
    world = join(address)
    replicas = [_Replica.build(recipe, chosen, world) for recipe, chosen in runs]
    for _ in range(num_steps + 1):
        for replica in replicas:
            replica.step(None)
            replica.step(bytes_per_s)
    if world.is_first:
        for replica in replicas:
            report.row(*replica.cells(bytes_per_s))
    leave()


@dataclass
class _Replica:
    """One of two replicas of the model, and what its steps took; the first with and without the link are left out."""

    context: RankContext
    data: StepData
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})  # by whether with the link
    waits: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})  # seconds of each step
    recorded: dict[Action, list[float]] = field(default_factory=dict)  # without the link
    link_s: float = 0.0
    loss: float = 0.0

    @classmethod
    def build(cls, recipe: Recipe, chosen: Plan, world: World) -> "_Replica":
        context = build_rank_context(recipe, chosen, world)
        index = build_index(recipe)
        stream = GroupStream.of(recipe, index)
        builder = BatchBuilder(index, recipe, context.needs, context.num_microbatches)
        batch = stream.batch(0, recipe.train.num_groups, context.dp, context.num_microbatches)
        return cls(context, builder.build(batch))

    def step(self, bytes_per_s: float | None) -> None:
        LINK.bytes_per_s, LINK.seconds = bytes_per_s, 0.0
        self.context.world.barrier()
        start_s = time.perf_counter()
        outcome = self.context.train(self.data, lr=1e-3)
        self.seconds[bytes_per_s is not None].append(time.perf_counter() - start_s)
        self.waits[bytes_per_s is not None].append(sum(action.wait_s for action in outcome.record.actions))
        self.loss = outcome.loss
        if bytes_per_s is not None:
            self.link_s = LINK.seconds
            return
        for action, begin_s, end_s, wait_s in outcome.record.actions:
            self.recorded.setdefault(action, []).append(end_s - begin_s - wait_s)

    def cells(self, bytes_per_s: float) -> list[str]:
        free, with_link = (self.waits[has_link][1:] for has_link in (False, True))
        recorded = {action: statistics.median(seconds[1:]) for action, seconds in self.recorded.items()}
        grad_reduce = self.context.recipe.train.grad_reduce
        timing = _Recorded(recorded, _num_elements(self.context), ELEMENT_BYTES[grad_reduce], bytes_per_s)
        predicted_s, free_s = (
            simulate(self.context.program, timed).step_time_s
            for timed in (timing, replace(timing, bytes_per_s=math.inf))
        )
        added_s = statistics.median(b - a for a, b in zip(free, with_link, strict=True))  # one behind the other
        return [
            grad_reduce,
            str(sum(isinstance(action, ReduceGrads) for action in self.context.program.for_rank(0))),
            f"{statistics.median(self.seconds[False][1:]):.3f} s",
            f"{self.link_s:.3f} s",
            f"{added_s:.3f} s",
            f"{predicted_s - free_s:.3f} s",
            f"{1 - added_s / self.link_s:.0%}",
            repr(self.loss),
        ]


def _num_elements(context: RankContext) -> Mapping[tuple[str, int, int], int]:
    """Return the parameters of each bucket."""
    return {
        (name, *number): sum(buffer.numel for buffer in ddp.buffers)
        for name, unit in context.optimizer.units.items()
        for number, ddp in unit._buffers.items()  # type: ignore[attr-defined]
    }


@dataclass(frozen=True)
class _Recorded:
    """A `Timing` of recorded seconds, and of a link between two ranks for what replicas exchange."""

    seconds: Mapping[Action, float]
    num_elements: Mapping[tuple[str, int, int], int]  # of each bucket; parameters are fp32
    gradient_bytes: int  # of one as it travels
    bytes_per_s: float

    def compute(self, action: Compute) -> float:
        mb = action.mb._replace(replica=0)  # the other rank computes about as much
        return self.seconds[replace(action, mb=mb)]

    def left_under_way(self, action: Partial) -> float:
        return 0.0

    def tp_wait(self, action: Compute) -> float:
        return 0.0

    def message(self, sender: int, action: Send) -> TransferCost:
        raise AssertionError("replicas send no messages")

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        if isinstance(action, ReduceGrads | GatherParams):
            is_reduction = isinstance(action, ReduceGrads)
            element_bytes = self.gradient_bytes if is_reduction else ELEMENT_BYTES["fp32"]
            nbytes = element_bytes * self.num_elements[action.unit, action.chunk, action.bucket]
            rounding_s = self.seconds[action] if is_reduction else 0.0
            return TransferCost(rounding_s + nbytes / NUM_RANKS / self.bytes_per_s, nbytes)
        return TransferCost(self.seconds[action], 0)

    def link_class(self, ranks: tuple[int, ...]) -> int:
        return len(ranks)

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        return 0


if __name__ == "__main__":
    main()
