"""Halve and double the constants of balancing on four sets: `python -m scripts.bench_constants --lengths DIR`.

Run it from the root of a checkout. DIR holds the files that `bench_balance` reads. `--only NAME` runs the constants of
one module. For each constant, set and factor it prints how uneven the result is beside that of the constant as it is
(1.00: the same; what is compared stands in `PARTS`), and the processor time beside it.
"""

import argparse
import math
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np

import mmtrain.balance
from mmtrain.balance import (
    BalancedLoad,
    BatchCost,
    Grouping,
    SampleLengths,
    SequenceCost,
    StepTargets,
    dist_ratio,
    max_over_mean,
    rebalance,
)
from mmtrain.balance.dispatch.node_placement import off_node_bytes, rearrange_across_nodes
from mmtrain.balance.grouping.methods import token_targets
from mmtrain.balance.ordering.makespan_1f1b import makespans_1f1b
from mmtrain.balance.ordering.microbatch_order import SEARCH_ROUNDS
from mmtrain.balance.ordering.reordering import reorder_microbatches
from mmtrain.data import GroupStream
from scripts.bench_balance import (
    LOADS_SUMMED,
    MAX_GROUP_TOKENS,
    TILE_PATCHES,
    TILES,
    TOKENS,
    WINDOW,
    item_lengths,
    mixture,
    other_sets,
)
from scripts.bench_shapes import NODE_SHAPES, RANKS_PER_NODE, SAMPLES_PER_RANK, TAILS

Measure = Callable[[], tuple[float, float]]  # how uneven, and something that costs, as the number of groups
FACTORS = (0.5, 2)
NUM_SETS = 4
LARGE_RANKS = 256
NUM_STEPS = {"mixture": 24, "AI2D": 12, "COCO and texts": 3, "ChartQA and speech": 12}  # of 64 groups
PARTS = {  # modules of mmtrain.balance -> what their constants are measured by
    "step": (
        "group_exchange",
        "regroup_step",
        "row_targets",
        "step_matching",
        "random_order",
        "slack_packing",
        "top_up_groups",
    ),
    "post": ("post_balancing",),
    "nodes": ("node_placement",),
    "order": ("reordering", "uneven_stage"),
}
# No choices but facts, rounding, or what arrays are made of when the module is loaded.
NOT_VARIED = ("ROUNDING", "MIN_GAIN", "MIN_ROUNDING_SHARE", "MIN_CHANCE_SHARE")


def main() -> None:
    """Print a line for each constant and factor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, metavar="DIR", help="folder of the length files")
    parser.add_argument("--only", metavar="NAME", help="the constants of one module")
    options = parser.parse_args()
    for _, name, _ in pkgutil.iter_modules(mmtrain.balance.__path__):
        import_module(f"mmtrain.balance.{name}")
    for part, modules in PARTS.items():
        chosen = [module for module in modules if options.only in (None, module)]
        if not chosen:
            continue
        measures = _measures(part, options.lengths)
        print(f"{part}: {', '.join(measures)}: uneven (time), each beside the constant as it is")
        usual = {name: _timed(measure) for name, measure in measures.items()}
        for module in chosen:
            for constant, value in _constants(module):
                limit = 1.0 if constant.endswith(("_SHARE", "_QUANTILE")) else math.inf  # of all there is
                for factor in FACTORS:
                    with _changed(constant, _scaled(value, factor, limit)):
                        changed = {name: _timed(measure) for name, measure in measures.items()}
                    print(f"  {module}.{constant} x {factor:g}: {_beside(changed, usual)}", flush=True)


def _measures(part: str, folder: Path) -> dict[str, Measure]:
    if part == "step":
        sets = {"mixture": (mixture(folder, WINDOW), None), **other_sets(folder)}
        return {name: _stream_measure(sets[name][0][:WINDOW], num) for name, num in NUM_STEPS.items()}
    if part == "post":
        return {name: _post_measure(name) for name in list(TAILS)[:NUM_SETS]}
    if part == "nodes":
        return {f"{per_rank} {name}": _node_measure((name, per_rank)) for name, per_rank in NODE_SHAPES}
    shapes = {"encoder 0.9": (0.9, 0.36), "encoder 1.0": (1.0, 0.36), "even": (1.0, 0.05), "heavy tail": (0.8, 1.0)}
    return {name: _order_measure(*shape) for name, shape in shapes.items()}


def _stream_measure(tokens: np.ndarray, num_steps: int) -> Measure:
    """Measure what replicas wait for in a microbatch, in steps of 8 x 8.

    That is tiles and tokens where units are balanced apart, and the summed cost where they are balanced together.
    """
    items = {"audio": item_lengths(tokens[:, 2]), "vision": item_lengths(TILE_PATCHES * tokens[:, TILES])}
    lengths = SampleLengths(tokens[:, TOKENS], tokens[:, TOKENS] // 2, items)
    replicas, microbatches = 8, 8
    grouping = Grouping(MAX_GROUP_TOKENS, WINDOW, replicas * microbatches)
    costs = {"llm": SequenceCost(TILE_PATCHES), "vision": SequenceCost(300), "audio": SequenceCost(TILE_PATCHES)}
    dp = {"llm": replicas, "vision": replicas, "audio": replicas}

    def measure() -> tuple[float, float]:
        stream = GroupStream(lengths, grouping, 0)
        uneven = 0.0
        for targets in (token_targets(lengths, grouping), StepTargets((BalancedLoad(costs),))):
            slots = np.zeros((num_steps, microbatches, replicas, 3))
            for step in range(num_steps):
                meta = stream.batch(step, grouping.global_batch, dp, dict.fromkeys(dp, microbatches), targets)
                np.add.at(slots[step], (meta.index, meta.replica), tokens[meta.sample_id])
            side_by_side = slots.reshape(-1, replicas, 3)
            if len(targets.loads) > 1:
                uneven += float(dist_ratio(side_by_side)[[TILES, TOKENS]].sum())
            else:
                uneven += max_over_mean(side_by_side @ LOADS_SUMMED[0]) - 1
        return uneven, float(stream.groups_per_epoch)

    return measure


def _post_measure(tail: str) -> Measure:
    """Measure the largest load over its bound with two keys."""
    num = LARGE_RANKS * SAMPLES_PER_RANK
    lengths = np.ceil(TAILS[tail](np.random.default_rng(0), num)).astype(np.int64)
    source = np.arange(num) % LARGE_RANKS
    cost = BatchCost("two_key", quadratic=1e-4)

    def measure() -> tuple[float, float]:
        loads = cost.of_ranks(lengths, rebalance(lengths, source, LARGE_RANKS, cost).dest_rank, LARGE_RANKS)
        return float(loads.max()) / max(float(loads.mean()), float(cost.of_samples(lengths).max())), 1.0

    return measure


def _node_measure(shape: tuple[str, int]) -> Measure:
    """Measure what the largest sender sends to other nodes."""
    num = LARGE_RANKS
    sizes = np.clip(NODE_SHAPES[shape](np.random.default_rng(0), num * shape[1]), 1, 2**20).astype(np.int64)
    source = np.repeat(np.arange(num), shape[1])
    batch = rebalance(sizes, source, num, BatchCost()).dest_rank

    def measure() -> tuple[float, float]:
        replica = rearrange_across_nodes(source, batch, sizes, num, RANKS_PER_NODE)
        return float(off_node_bytes(source, batch, sizes, replica, RANKS_PER_NODE).max()), 1.0

    return measure


def _order_measure(weight: float, variance: float) -> Measure:
    """Measure the time of 64 ordered microbatches over 10 stages, of which the first varies."""
    forwards = []
    for seed in range(6):
        forward = np.ones((1, 10, 64))
        forward[0, 0] = np.random.default_rng(seed).gamma(1 / variance, weight * variance, 64)
        forwards.append(forward)

    def measure() -> tuple[float, float]:
        spans = []
        for forward in forwards:
            rng = np.random.default_rng(0)
            order = reorder_microbatches(forward, 2 * forward, np.arange(64), SEARCH_ROUNDS, rng)
            spans.append(float(makespans_1f1b(forward, 2 * forward, order[None])[0]))
        return float(np.mean(spans)), 1.0

    return measure


def _constants(module: str) -> Iterator[tuple[str, object]]:
    """Yield the constants of a module that are numbers, or pairs of a slack and what it may cost."""
    for name, value in vars(sys.modules[f"mmtrain.balance.{module}"]).items():
        if name.isupper() and name not in NOT_VARIED and isinstance(value, (int, float, tuple)):
            yield name, value


def _scaled(value: object, factor: float, limit: float) -> object:
    if isinstance(value, tuple):
        return tuple(_scaled(part, factor, limit) for part in value)
    if isinstance(value, int):
        return max(round(value * factor), 1)
    assert isinstance(value, float)
    return min(value * factor, limit)


@contextmanager
def _changed(name: str, value: object) -> Iterator[None]:
    """Set a constant in every module of the package that has it."""
    modules = [module for key, module in sys.modules.items() if key.startswith("mmtrain.") and hasattr(module, name)]
    before = [getattr(module, name) for module in modules]
    for module in modules:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            setattr(module, name, old)


def _timed(measure: Measure) -> tuple[float, float, float]:
    start = time.process_time()
    uneven, cost = measure()
    return uneven, cost, time.process_time() - start


def _beside(changed: dict[str, tuple[float, float, float]], usual: dict[str, tuple[float, float, float]]) -> str:
    parts = []
    for name, (uneven, cost, seconds) in changed.items():
        ratio = uneven / usual[name][0] if usual[name][0] else math.nan
        more = f", {cost / usual[name][1] - 1:+.2%} groups" if cost != usual[name][1] else ""
        parts.append(f"{ratio:.2f} ({seconds / usual[name][2]:.2f}{more})")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
