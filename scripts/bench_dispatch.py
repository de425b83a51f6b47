"""Measure what dispatch brings on lopsided data: `python -m scripts.bench_dispatch`.

Four ranks train the same steps of `replicated` with `parallel.dispatch` none, llm and all, in turns, the last also with
`parallel.exchange: all_gather`: samples of text alone, with one image, with eight images, and with long speech.
Every layer waits for the slowest rank, so an action of a step takes as long as on the rank that computes longest. The
bound is a step in which all ranks compute the mean.

This counts the processor time of the thread that computes, in which waiting is not counted: what a step takes where
each rank has a core of its own, also on a machine with fewer. Beside it stands the time by the clock, which means
something on an idle machine with a core for each rank: of the step, and of the dispatches alone. A rank that comes
early waits in a dispatch for the last one, which is imbalance and no cost of the dispatch. So a dispatch counts from
when the last rank began it until the last rank ended it. The prediction is the planner's, for the modelled `cpu-core`.

Last it counts, without running them, the bytes of features that leave nodes in steps of 16 ranks on four nodes, with
`parallel.node_wise` and without, and what that changes for drawn images of up to 2,560 ranks.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmtrain.balance import BatchCost, Grouping, SampleLengths, rebalance
from mmtrain.balance.batch_meta import BatchMeta, ItemLengths, ItemTable
from mmtrain.balance.dispatch.dispatch_items import DispatchSizes, place_batches_near
from mmtrain.balance.dispatch.node_placement import off_node_bytes
from mmtrain.data import GroupStream
from mmtrain.data.loading.batch_builder import StepData
from mmtrain.data.loading.payload import build_encoder_payload, build_text_payload
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX, EncodedSample
from mmtrain.planning import Plan
from mmtrain.planning.artifact.balancing_targets import derive_step_targets
from mmtrain.program import Action, Dispatch
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.executor import Executor
from mmtrain.runtime.execution.process_groups import Transport
from mmtrain.runtime.execution.rank_context import RankContext, build_rank_context
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.world import Address, join, leave
from scripts.measurements import Report, arguments, start
from scripts.plans import fastest_plan

MODES: Mapping[str, Mapping[str, str]] = {  # by name: settings of `parallel`
    "none": {"dispatch": "none"},
    "llm": {"dispatch": "llm"},
    "all": {"dispatch": "all"},
    "all by all-gather": {"dispatch": "all", "exchange": "all_gather"},
}
NUM_RANKS, NUM_WARM_UP, NUM_SAMPLES, SEED = 4, 1, 2000, 7
SHARES = {"text": 0.55, "one image": 0.25, "eight images": 0.1, "long speech": 0.1}  # of the samples
SIDE, MERGE, STACK, FRAMES = 16, 2, 4, 1024  # patches of an image's side; log-mel frames of a clip
IMAGE_ID, AUDIO_ID, FIRST_WORD_ID = 3, 2, 8
ITEM_IDS = {"vision": (IMAGE_ID,), "audio": (AUDIO_ID,)}
ENCODER = {"layers": 4, "hidden": 192, "heads": 4, "ffn": 768}
SETTINGS: Mapping[str, Any] = {
    "name": "bench-dispatch",
    "model": {
        "vision": {**ENCODER, "patch": 8, "max_side": SIDE, "downsample": "pixel_shuffle", "merge": MERGE},
        "audio": {**ENCODER, "mel_bins": 40, "max_frames": FRAMES, "downsample": STACK},
        "llm": {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 1024, "vocab": 512},
    },
    "data": {"sources": [{"path": "none.json"}], "tokenizer": "none.json", "seq_len": 1024},
    "train": {"steps": 100, "global_batch": 2 * NUM_RANKS, "seed": SEED, "optimizer": {"lr": 0.001}},
    "parallel": {"placement": "replicated", "shard": "all", "schedule": "1f1b", "llm": {"tp": 1}},
    "cluster": {"ranks": NUM_RANKS, "hardware": "cpu-core"},
}
NUM_NODES, RANKS_PER_NODE = 4, 4  # of the steps that are laid out and not run
BYTES_PER_ROW = 4 * SETTINGS["model"]["llm"]["hidden"]  # of features, in fp32
FloatArray = NDArray[np.float64]


class LopsidedSamples:
    """Samples of four kinds, whose work lies in different units."""

    def __init__(self) -> None:
        """Draw the lengths; payload is made where a rank needs it."""
        rng = np.random.default_rng(SEED)
        kind = rng.choice(len(SHARES), NUM_SAMPLES, p=list(SHARES.values()))
        num_images = np.array([0, 1, 8, 0])[kind]
        num_clips = np.array([0, 0, 0, 1])[kind]
        self._num_image_tokens = num_images * (SIDE // MERGE) ** 2
        self._num_clip_tokens = num_clips * (FRAMES // (2 * STACK))
        words = np.where(kind == 0, rng.integers(30, 600, NUM_SAMPLES), rng.integers(20, 60, NUM_SAMPLES))
        tokens = self._num_image_tokens + self._num_clip_tokens + words
        items = {"vision": _items(num_images, SIDE, SIDE, SIDE**2, (SIDE // MERGE) ** 2)}
        items["audio"] = _items(num_clips, FRAMES, 1, FRAMES // 2, FRAMES // (2 * STACK))
        self.lengths = SampleLengths(tokens, words - 1, items)
        self._cells = {
            "vision": rng.standard_normal((SIDE**2, 3 * 8**2)).astype(np.float32),
            "audio": rng.standard_normal((FRAMES, 40)).astype(np.float32),
        }

    def batch(self, recipe: Recipe, plan: Plan, step: int) -> BatchMeta:
        """Lay a step out as a run under this plan does."""
        stream = GroupStream(self.lengths, Grouping.of(recipe.data, recipe.train.num_groups), recipe.train.seed)
        dp = {name: unit.dp for name, unit in plan.units.items()}
        targets = derive_step_targets(recipe, plan, self.lengths)
        return stream.batch(step, recipe.train.num_groups, dp, plan.schedule.num_microbatches, targets)

    def step_data(self, context: RankContext, meta: BatchMeta) -> StepData:
        """Return what this rank needs of a step."""
        data = StepData(meta, {}, {}, ())
        for need in context.needs:
            for index in range(context.num_microbatches[need.unit]):
                key = (need.replica, index)
                if need.unit == "llm":
                    data.text[key] = build_text_payload(meta, need, index, ITEM_IDS, self._encode)
                else:
                    cells = self._cells[need.unit]
                    load = partial(_load, cells) if need.media else None
                    payload = build_encoder_payload(meta, need.unit, *key, cells.shape[1], load)
                    data.encoders.setdefault(need.unit, {})[key] = payload
        return data

    def _encode(self, sample: int) -> EncodedSample:
        num_tokens, num_targets = int(self.lengths.tokens[sample]), int(self.lengths.targets[sample])
        ids = np.random.default_rng([SEED, sample]).integers(FIRST_WORD_ID, 512, num_tokens)
        num_images, num_heard = int(self._num_image_tokens[sample]), int(self._num_clip_tokens[sample])
        ids[:num_images] = IMAGE_ID
        ids[num_images : num_images + num_heard] = AUDIO_ID
        labels = np.full(num_tokens, IGNORE_INDEX, dtype=np.int64)
        labels[-num_targets - 1 : -1] = ids[-num_targets:]
        return EncodedSample(ids, labels)


def _items(counts: NDArray[np.int64], rows: int, cols: int, tokens: int, features: int) -> ItemLengths:
    columns = (np.full(int(counts.sum()), value, dtype=np.int64) for value in (rows, cols, tokens, features))
    return ItemLengths(np.concatenate([[0], np.cumsum(counts)]), *columns)


def _load(cells: NDArray[np.float32], sample: int, position: int, rows: int, cols: int) -> NDArray[np.float32]:
    return cells[: rows * cols]


class ActionTimes(NamedTuple):
    """When a rank ran an action, by the clock that all ranks of the machine share, and its thread's time in it."""

    thread_s: float
    start_s: float
    end_s: float


class StepTimes(NamedTuple):
    """A step on one rank."""

    actions: list[ActionTimes]
    clock_s: float
    loss: float


@dataclass(frozen=True)
class ModeTimes:
    """What the steps of one mode took, on all ranks."""

    seconds: FloatArray  # (steps, ranks, actions) of the thread that computes
    is_dispatch: NDArray[np.bool_]  # (actions,)
    dispatch_clock_s: FloatArray  # (steps,) of all dispatches, each from its last rank's start to its last rank's end
    clock_s: FloatArray  # (steps,) until the last rank had ended
    loss: float  # of all steps

    @property
    def step_s(self) -> FloatArray:
        """(steps,) seconds with a core for each rank: each action takes as long as on the slowest rank."""
        return np.asarray(self.seconds.max(axis=1).sum(axis=1))

    @property
    def bound_s(self) -> FloatArray:
        """(steps,) seconds if all ranks computed the mean, without any dispatch."""
        return np.asarray(self.seconds.mean(axis=1)[:, ~self.is_dispatch].sum(axis=1))

    @property
    def dispatch_s(self) -> FloatArray:
        """(steps,) seconds of dispatches."""
        return np.asarray(self.seconds.max(axis=1)[:, self.is_dispatch].sum(axis=1))


def main() -> None:
    """Plan each mode, run them in turns, and print a row for each."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    num_steps = options.steps
    report = start("Dispatch in `replicated`", options)
    samples = LopsidedSamples()
    plans = {}
    for mode in MODES:
        recipe = _recipe(mode)
        plans[mode] = fastest_plan(recipe, samples.lengths, NUM_RANKS, "cpu-core")
    kinds = ", ".join(f"{share:.0%} {name}" for name, share in SHARES.items())
    report.line(f"{NUM_RANKS} ranks, {num_steps} steps of {2 * NUM_RANKS} groups of at most 1,024 tokens; {kinds}")
    report.line()
    seconds = "a step, s", "bound, s", "over the bound", "dispatches", "by the clock, s", "dispatches by the clock"
    report.table(
        "dispatch", *seconds, "fullest / mean rank: llm, vision, audio", "loss", "predicted, s", "received, held, MB"
    )
    launch_local(NUM_RANKS, partial(_run_rank, report, samples, plans, num_steps))
    report.line()
    report.table("off-node features", "node-wise", "fullest rank", "all ranks", "ms")
    for node_wise in (False, True):
        _count_off_node_bytes(report, node_wise, samples, num_steps)
    for num_ranks, per_rank in ((256, 8), (2560, 4), (2560, 16)):
        _count_places_of_many(report, num_ranks, per_rank)


def _recipe(mode: str) -> Recipe:
    parallel = {**SETTINGS["parallel"], **MODES[mode]}
    return Recipe.model_validate({**SETTINGS, "parallel": parallel})


def _run_rank(
    report: Report, samples: LopsidedSamples, plans: Mapping[str, Plan], num_steps: int, address: Address
) -> None:
    torch.set_num_threads(1)
    world = join(address)
    contexts = {mode: build_rank_context(_recipe(mode), plan, world) for mode, plan in plans.items()}
    taken: dict[str, list[StepTimes]] = {mode: [] for mode in MODES}
    traffic: dict[str, list[tuple[int, int]]] = {mode: [] for mode in MODES}
    for step in range(NUM_WARM_UP + num_steps):
        for mode, context in contexts.items():
            data = samples.step_data(context, samples.batch(context.recipe, plans[mode], step))
            world.barrier()
            start = time.perf_counter()
            with _TimedActions() as actions, _CountedExchanges() as exchanges:
                outcome = context.train(data, lr=0.0)
            if step >= NUM_WARM_UP:
                traffic[mode].append(
                    (sum(moved for moved, _ in exchanges), max([held for _, held in exchanges], default=0))
                )
                taken[mode].append(StepTimes(actions, time.perf_counter() - start, outcome.loss))
    by_rank, traffic_by_rank = world.all_gather(taken), world.all_gather(traffic)
    if world.is_first:
        for mode in MODES:
            actions = contexts[mode].train_executor._actions
            times = _times(actions, [of_rank[mode] for of_rank in by_rank])
            moved, held = np.array([of_rank[mode] for of_rank in traffic_by_rank]).max(axis=(0, 1)) / 1e6
            cells = _cells(times, samples, _recipe(mode), plans[mode], num_steps)
            report.row(mode, *cells, f"{moved:.3f}, {held:.3f}")
    leave()


class _TimedActions:
    """Times each action that the executor runs."""

    def __enter__(self) -> list[ActionTimes]:
        self._run = Executor._run
        times: list[ActionTimes] = []

        def timed(executor: Executor, action: Action) -> None:
            start_s, start_thread_s = time.perf_counter(), time.thread_time()
            self._run(executor, action)
            times.append(ActionTimes(time.thread_time() - start_thread_s, start_s, time.perf_counter()))

        Executor._run = timed  # type: ignore[method-assign]
        return times

    def __exit__(self, *error: object) -> None:
        Executor._run = self._run  # type: ignore[method-assign]


class _CountedExchanges:
    """Counts the bytes that a rank receives from others in each exchange, and those of its buffers."""

    def __enter__(self) -> list[tuple[int, int]]:
        self._originals = Transport.exchange, Transport.gather_rows
        exchange, gather_rows = self._originals
        counted: list[tuple[int, int]] = []

        def exchanged(transport: Transport, rows: Tensor, sent: Any, received: Any, dispatch: Dispatch) -> Tensor:
            result = exchange(transport, rows, sent, received, dispatch)
            from_others = sum(received) - received[transport.rank]
            counted.append((from_others * rows.shape[1] * rows.element_size(), rows.nbytes + result.nbytes))
            return result

        def gathered(transport: Transport, rows: Tensor, num_rows: int, dispatch: Dispatch) -> Tensor:
            result = gather_rows(transport, rows, num_rows, dispatch)
            counted.append((result.nbytes - result[0].nbytes, result[0].nbytes + result.nbytes))
            return result

        Transport.exchange, Transport.gather_rows = exchanged, gathered  # type: ignore[method-assign]
        return counted

    def __exit__(self, *error: object) -> None:
        Transport.exchange, Transport.gather_rows = self._originals  # type: ignore[method-assign]


def _times(actions: Any, by_rank: list[list[StepTimes]]) -> ModeTimes:
    times = np.array([[step.actions for step in of_rank] for of_rank in by_rank]).transpose(1, 0, 2, 3)
    is_dispatch = np.array([isinstance(action, Dispatch) for action in actions])
    last_start_s, last_end_s = times[..., 1].max(axis=1), times[..., 2].max(axis=1)  # (steps, actions), one clock
    return ModeTimes(
        times[..., 0],
        is_dispatch,
        (last_end_s - last_start_s)[:, is_dispatch].sum(axis=1),
        np.array([[step.clock_s for step in of_rank] for of_rank in by_rank]).max(axis=0),
        sum(step.loss for of_rank in by_rank for step in of_rank),
    )


def _cells(times: ModeTimes, samples: LopsidedSamples, recipe: Recipe, plan: Plan, num_steps: int) -> tuple[str, ...]:
    """Return what a mode took beside its bound, and how even its loads were."""
    imbalance: dict[str, list[float]] = {"llm": [], "vision": [], "audio": []}
    for meta in (samples.batch(recipe, plan, NUM_WARM_UP + step) for step in range(num_steps)):
        for unit, loads in _loads(meta, plan):
            imbalance[unit].append(loads)
    step_s, bound_s = float(np.median(times.step_s)), float(np.median(times.bound_s))
    return (
        f"{step_s:.3f}",
        f"{bound_s:.3f}",
        f"{step_s / bound_s:.2f}x",
        f"{np.median(times.dispatch_s / times.step_s):.1%}",
        f"{np.median(times.clock_s):.2f}",
        f"{np.median(times.dispatch_clock_s / times.clock_s):.1%}",
        ", ".join(f"{statistics.mean(ratios):.2f}" for ratios in imbalance.values()),
        f"{times.loss / num_steps:.6f}",
        f"{plan.predicted.step_time_s:.3f}",
    )


def _loads(meta: BatchMeta, plan: Plan) -> Iterator[tuple[str, float]]:
    """Yield for each unit and mini-batch of a step the tokens of the fullest rank over the mean rank's."""
    tables = {"llm": meta, **meta.items}
    for unit, table in tables.items():
        for index in range(plan.schedule.num_microbatches[unit]):
            mine = table.index == index
            tokens = np.bincount(table.replica[mine], table.tokens[mine], NUM_RANKS)
            if tokens.any():
                yield unit, float(tokens.max() / tokens.mean())


def _count_off_node_bytes(report: Report, node_wise: bool, samples: LopsidedSamples, num_steps: int) -> None:
    """Count what the forwards of a step send to other nodes; backwards send as many bytes of gradients back."""
    num_ranks = NUM_NODES * RANKS_PER_NODE
    changes = {
        "parallel": {**SETTINGS["parallel"], "dispatch": "all", "node_wise": node_wise},
        "cluster": {**SETTINGS["cluster"], "ranks": num_ranks, "ranks_per_node": RANKS_PER_NODE},
        "train": {**SETTINGS["train"], "global_batch": 2 * num_ranks},
    }
    recipe = Recipe.model_validate({**SETTINGS, **changes})
    plan = fastest_plan(recipe, samples.lengths, num_ranks, "cpu-core")
    by_rank, seconds = np.zeros((num_steps, 2)), []
    for step in range(num_steps):
        start = time.thread_time()
        meta = samples.batch(recipe, plan, step)
        seconds.append(time.thread_time() - start)
        for table in meta.items.values():
            for index in range(int(table.index.max(initial=-1)) + 1):
                by_rank[step] += _largest_and_total(meta, table, index)
    largest, total = by_rank.mean(axis=0) / 1e6
    label = f"{num_ranks} ranks on {NUM_NODES} nodes, a step"
    report.row(label, node_wise, f"{largest:.3f} MB", f"{total:.3f} MB", f"{1e3 * np.median(seconds):.1f}")


def _count_places_of_many(report: Report, num_ranks: int, per_rank: int) -> None:
    """Count what node-wise places change for images of log-normal sizes, of `per_rank` samples on each rank."""
    rng = np.random.default_rng(SEED)
    num_images = rng.choice([0, 1, 8, 3], num_ranks * per_rank, p=list(SHARES.values()))
    home = np.repeat(np.repeat(np.arange(num_ranks), per_rank), num_images)
    features = np.clip(rng.lognormal(5.5, 0.6, len(home)), 1, 2048).astype(np.int64)
    batch = rebalance(4 * features, home, num_ranks, BatchCost("packed", 3.0, 0.002))
    off_node, seconds = [], []
    for per_node in (None, 8):
        sizes = DispatchSizes(num_ranks, 1, per_node)
        start = time.thread_time()
        replica = place_batches_near(batch, home, features, sizes)
        seconds.append(time.thread_time() - start)
        off_node.append(off_node_bytes(home, batch, features, replica, 8))
    largest, total = ([float(count(received)) for received in off_node] for count in (np.max, np.sum))
    label = f"{num_ranks} ranks on nodes of 8, {len(home)} images"
    ratios = f"x {largest[1] / largest[0]:.2f}", f"x {total[1] / total[0]:.2f}"
    report.row(label, True, *ratios, f"{1e3 * seconds[0]:.0f} -> {1e3 * seconds[1]:.0f}")


def _largest_and_total(meta: BatchMeta, table: ItemTable, index: int) -> FloatArray:
    """Return the off-node bytes of the rank that sends or receives most in a dispatch, and those of all ranks."""
    home = meta.replica[table.sample]
    leaves = (table.index == index) & (table.replica // RANKS_PER_NODE != home // RANKS_PER_NODE)
    num_bytes = table.features[leaves] * BYTES_PER_ROW
    largest = max(int(np.bincount(ranks[leaves], num_bytes).max(initial=0)) for ranks in (table.replica, home))
    return np.array([largest, num_bytes.sum()], dtype=np.float64)


if __name__ == "__main__":
    main()
