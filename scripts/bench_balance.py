"""Print every measure of balancing beside its target: `python -m scripts.bench_balance --lengths DIR`.

Run it from the root of a checkout; it uses tools of the tests. DIR holds ai2d_train_12k.csv, chartqa_train_18k.csv
(image_tiles, llm_tokens), coco_captions_val2017.csv (width, height, captions, caption_words) and librilight_10h.csv
(duration_ms, words). Times are processor seconds of one core, the least of two or three runs.
"""

import argparse
import csv
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

from mmtrain.balance import (
    BalancedLoad,
    BatchCost,
    Grouping,
    ItemLengths,
    SampleGroups,
    SampleLengths,
    SequenceCost,
    StepTargets,
    dist_ratio,
    max_over_mean,
    pack_groups,
    pad_ratio,
    rebalance,
)
from mmtrain.balance.dispatch.node_placement import off_node_bytes, rearrange_across_nodes
from mmtrain.balance.grouping.methods import token_targets
from mmtrain.balance.grouping.pack_groups import group_across_devices, group_by_isf, group_by_length, group_randomly
from mmtrain.balance.ordering.makespan_1f1b import makespans_1f1b
from mmtrain.balance.ordering.reordering import construct_order, reorder_microbatches
from mmtrain.balance.ordering.schedule_recurrence import ScheduleRecurrence
from mmtrain.data import GroupStream, build_index
from mmtrain.planning import SchedulePlan
from mmtrain.planning.artifact.balancing_targets import derive_step_targets
from mmtrain.planning.artifact.schedule_table import build_schedule_table
from mmtrain.planning.evaluate.simulate_plan import simulate_plan
from mmtrain.planning.planner import plan_recipe
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.program import Edge, Stage, StageGraph, StageId, UnitMesh
from mmtrain.recipe import load_recipe
from tests.balance.makespan_bound import makespan_lower_bound, pairing_lower_bound

NUM_SAMPLES, WINDOW = 100_000, 16_384
TOKENS, TILES, AUDIO = range(3)  # columns of a mixture
LOADS_SUMMED = np.array([[1.0, 300.0, 1.0]])  # units on the same ranks: tile : token = 300 : 1
MAX_GROUP_TOKENS = 4096
TRAINING_SIZES = ((8, 1), (64, 1), (8, 8), (64, 8), (256, 8), (1024, 8))  # replicas, and microbatches of each
OTHER_SAMPLES = 80_000  # of a single set; a quarter for each of two
MIN_STEPS_OF_VARIANCE, MAX_EPOCHS_OF_VARIANCE = 400, 12
OTHER_TRAINING_SIZES = ((8, 8), (64, 8))  # with data other than the mixture
MAX_ARRANGED_STEPS, MAX_ARRANGED_GROUPS = 60, 2**13
STEP_TARGETS = {  # dist ratios of tiles and tokens: of a step, and of a microbatch
    (8, 8): ((0.003, 0.002), (0.01, 0.005)),
    (64, 8): ((0.01, 0.003), (0.01, 0.005)),
    (256, 8): ((0.02, 0.02),),
    (1024, 8): ((0.02, 0.02),),
}
ENCODER_WEIGHTS = (0.9, 1.0)  # of a pipeline's first stage, beside the others
TILE_PATCHES = 1024  # tokens that a vision unit sees of a tile of 448 pixels
PLAN_SETTINGS = (  # of a what-if recipe whose steps are ordered in time
    ("cluster.ranks=32", "parallel.placement=disaggregated", *(f"parallel.llm.{s}" for s in ("tp=2", "pp=4", "vpp=2"))),
    ("cluster.ranks=32", "parallel.placement=colocated"),
)
T = TypeVar("T")


def main() -> None:
    """Print every measure beside its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, metavar="DIR", help="folder of the length files")
    parser.add_argument("--no-milp", action="store_true", help="leave out the exact node-wise optimum (a minute)")
    parser.add_argument("--only-steps", action="store_true", help="only the steps that training reads")
    options = parser.parse_args()
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()}-core {platform.machine()}, Python {platform.python_version()}"
    )
    tokens = mixture(options.lengths, NUM_SAMPLES)
    print(f"means: {tokens.mean(axis=0).round(2).tolist()} LLM tokens, tiles, audio tokens; {NUM_SAMPLES} samples")
    if not options.only_steps:
        grouping(tokens)
    training(tokens)
    for name, (other, kind) in other_sets(options.lengths).items():
        print(f"{name}: means {other.mean(axis=0).round(2).tolist()} LLM tokens, tiles, audio tokens")
        for size in OTHER_TRAINING_SIZES:
            train_size(other, kind, size)
    if options.only_steps:
        return
    isf_speed(mixture(options.lengths, 1_200_000))
    post_and_nodes(tokens, exact=not options.no_milp)
    for weight in ENCODER_WEIGHTS:
        ordering(weight)
    for stages, chunks, num in ((4, 2, 16), (8, 3, 32), (8, 12, 32)):
        ordering_chunks(stages, chunks, num)
    for settings in PLAN_SETTINGS:
        ordering_plan(settings)


def grouping(tokens: np.ndarray) -> None:
    """Print OmniBal's Table 3 for the mixture; `training` measures what `matched` makes of it."""
    order = np.random.default_rng(1).permutation(len(tokens))
    budgets, fill = _isf_budgets(tokens)
    bounds = np.array([MAX_GROUP_TOKENS, 64, MAX_GROUP_TOKENS])  # tokens bind; the others only cap memory
    batch = round(MAX_GROUP_TOKENS / tokens[:, TOKENS].mean())
    alone, no_budget = (
        tokens[:, :1],
        np.array([batch * MAX_GROUP_TOKENS]),
    )  # the baselines' batches are padded to any length
    by_method: dict[str, Callable[[int], SampleGroups]] = {
        "random": lambda replicas: group_randomly(alone, no_budget, batch, np.random.default_rng(0)),
        "length": lambda replicas: group_by_length(alone, no_budget, batch, WINDOW, np.random.default_rng(0)),
        "device": lambda replicas: group_across_devices(
            alone, no_budget, batch, replicas, WINDOW, np.random.default_rng(0)
        ),
        "isf": lambda replicas: group_by_isf(
            np.ascontiguousarray(tokens[:, :2]), budgets, fill, 10, np.random.default_rng(0)
        ),
        "best fit": lambda replicas: pack_groups(tokens, bounds, order, WINDOW),
    }
    print("method    replicas groups  batch  fill   pad    dist tiles / tokens / audio   summed-1   seconds")
    for replicas in (8, 64):
        for name, method in by_method.items():
            seconds, groups = least_seconds(lambda method=method, r=replicas: method(r), 2)
            steps = _steps(groups.loads(tokens), replicas)
            over = max_over_mean(_steps(groups.loads(tokens) @ LOADS_SUMMED[0], replicas)) - 1
            dist = dist_ratio(steps)
            padded = pad_ratio(tokens[:, TOKENS], groups)
            filled = groups.loads(tokens)[:, TOKENS].mean() / MAX_GROUP_TOKENS
            padding = f"{padded:.3f}" if name in ("random", "length", "device") else "  -  "
            print(
                f"{name:<10}{replicas:>7}{len(groups):>8}{groups.sizes.mean():>7.2f}{filled:>7.3f}  {padding}  "
                f"{dist[TILES]:.4f} / {dist[TOKENS]:.4f} / {dist[AUDIO]:.3f}   {over:.5f}   {seconds:.2f}"
            )
            if name == "isf":
                full = (groups.loads(tokens)[:, :2] >= fill).any(axis=1)
                left = groups.sizes[~full].sum() / len(tokens)
                print(
                    f"          remainder of isf: {left:.1%} of the samples, in groups {_fill(groups, tokens, ~full)}"
                )


def training(tokens: np.ndarray) -> None:
    """Arrange the stream that training reads for plans whose units share ranks and for plans whose units do not."""
    for size in TRAINING_SIZES:
        train_size(tokens, mixture_kinds(np.random.default_rng(0), len(tokens)), size)


def train_size(tokens: np.ndarray, kind: np.ndarray, size: tuple[int, int]) -> None:
    """Arrange steps of one size, replicas and the microbatches of each, and print how even and how random they are.

    kind: (n,) the source of each sample.
    """
    lengths = SampleLengths(
        tokens[:, TOKENS],
        tokens[:, TOKENS] // 2,
        {"audio": item_lengths(tokens[:, AUDIO]), "vision": item_lengths(TILE_PATCHES * tokens[:, TILES])},
    )
    tile = {
        "llm": SequenceCost(TILE_PATCHES),
        "vision": SequenceCost(300),
        "audio": SequenceCost(TILE_PATCHES),
    }  # tile : token = 300 : 1
    replicas, microbatches = size
    grouping = Grouping(MAX_GROUP_TOKENS, WINDOW, replicas * microbatches)
    seconds, stream = least_seconds(lambda: GroupStream(lengths, grouping, 0), 1)
    far, _ = least_seconds(lambda: stream.groups(10**6 * grouping.global_batch, grouping.global_batch), 1)
    print(
        f"  training, {replicas} replicas of {microbatches} microbatches: starts in "
        f"{seconds:.2f} s, step 1,000,000 found in {far * 1e3:.0f} ms"
    )
    _arranged("apart", token_targets(lengths, grouping), tokens, stream, size)
    _arranged("summed", StepTargets((BalancedLoad(tile),)), tokens, stream, size)
    if stream.groups_per_epoch >= 10 * grouping.global_batch:
        _randomness(tokens, kind, stream, replicas * microbatches)


def other_sets(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return other sets by name: (n, 3) LLM tokens, tiles and audio tokens, and (n,) the number of the source."""
    rng = np.random.default_rng(7)
    ai2d, chartqa, coco, speech = _sources(folder)
    texts = np.clip(rng.lognormal(5.5, 1.0, 20_000), 16, 0.985 * MAX_GROUP_TOKENS)[:, None]
    sets = {
        "AI2D": (ai2d,),
        "ChartQA": (chartqa,),
        "COCO and texts": (coco, texts),
        "ChartQA and speech": (chartqa, speech),
    }
    drawn = {}
    for name, tables in sets.items():
        size = (OTHER_SAMPLES if len(tables) == 1 else OTHER_SAMPLES // 4, 3)
        parts = [np.zeros(size, dtype=np.int64) for _ in tables]
        for part, table in zip(parts, tables, strict=True):
            part[:, : table.shape[1]] = table[rng.integers(len(table), size=len(part))]
        order = rng.permutation(len(parts) * len(parts[0]))
        drawn[name] = np.concatenate(parts)[order], order // len(parts[0])
    return drawn


def _arranged(
    name: str,
    targets: StepTargets,
    tokens: np.ndarray,
    stream: GroupStream,
    size: tuple[int, int],
) -> None:
    """Arrange an epoch's steps for `targets`, and print how even they are; size: replicas and their microbatches."""
    replicas, microbatches = size
    dp = {"llm": replicas, "vision": replicas, "audio": replicas}
    num_steps = min(
        max(stream.groups_per_epoch // (replicas * microbatches), 1),
        MAX_ARRANGED_STEPS,
        max(MAX_ARRANGED_GROUPS // (replicas * microbatches), 1),
    )
    slots = np.zeros((num_steps, microbatches, replicas, 3), dtype=np.int64)
    bounds = []
    start = time.process_time()
    for step in range(num_steps):
        meta = stream.batch(step, replicas * microbatches, dp, dict.fromkeys(dp, microbatches), targets)
        np.add.at(slots[step], (meta.index, meta.replica), tokens[meta.sample_id])
        bounds.append(_least_dist_ratio(tokens[meta.sample_id], replicas))
    step_ms = (time.process_time() - start) / num_steps * 1e3
    side_by_side = slots.reshape(-1, replicas, 3)
    in_all = slots.sum(axis=1)
    over, over_all = (max_over_mean(loads @ LOADS_SUMMED[0]) - 1 for loads in (side_by_side, in_all))
    fill = side_by_side[:, :, TOKENS].mean() / MAX_GROUP_TOKENS
    print(
        f"    {name}: dist tiles / tokens / audio {_ratios(side_by_side)} a microbatch, {_ratios(in_all)} a step; "
        f"summed {over:.5f} a microbatch, {over_all:.5f} a step; fill {fill:.4f}; {step_ms:.0f} ms a step"
    )
    if name == "apart" and microbatches == 1:
        print(f"    no grouping of the samples of these steps has a dist ratio of tiles below {np.mean(bounds):.4f}")
    if name == "apart" and size in STEP_TARGETS:
        target(f"training, {replicas} x {microbatches}: fill of all groups", float(fill), 0.985, at_least=True)
        for what, ratio, limits in zip(
            ("a step", "a microbatch"), (dist_ratio(in_all), dist_ratio(side_by_side)), STEP_TARGETS[size], strict=False
        ):
            target(f"training, {replicas} x {microbatches}, {what}: dist ratio of image tiles", ratio[TILES], limits[0])
            target(f"training, {replicas} x {microbatches}, {what}: dist ratio of LLM tokens", ratio[TOKENS], limits[1])


def _least_dist_ratio(samples: np.ndarray, replicas: int) -> float:
    """Return a lower bound of the dist ratio of tiles in a step of one microbatch; samples: (k, 3).

    A group has at most one text of more than half its tokens, and tiles only for the tokens that the text leaves. The
    other groups have the rest, in whole tiles.
    """
    with_tiles = samples[samples[:, TILES] > 0]
    if not len(with_tiles):
        return 0.0
    tokens_per_tile = (with_tiles[:, TOKENS] / with_tiles[:, TILES]).min()
    texts = samples[samples[:, TILES] == 0, TOKENS]
    room = (MAX_GROUP_TOKENS - texts[texts > MAX_GROUP_TOKENS // 2]) // tokens_per_tile
    total = int(samples[:, TILES].sum())
    level = -(-total // replicas)
    while np.minimum(room, level).sum() + level * (replicas - len(room)) < total:
        level += 1
    return 1 - total / (level * replicas)


def _randomness(tokens: np.ndarray, kind: np.ndarray, stream: GroupStream, step_size: int) -> None:
    """Print the variance of what steps hold, over that of steps of shuffled samples with as many tokens.

    kind: (n,) the source of each sample, from 0. Columns that follow from the number of a step's tokens count for
    nothing: what is compared is what steps hold beyond what is usual for their tokens.
    """
    names = ["image tiles", "audio tokens", *(f"source {number}" for number in range(kind.max() + 1))]
    of_sources = [np.where(kind == number, tokens[:, TOKENS], 0) for number in range(kind.max() + 1)]
    loads = np.stack([tokens[:, TOKENS], tokens[:, TILES], tokens[:, AUDIO], *of_sources], axis=1).astype(np.float64)
    density = loads.sum(axis=0) / loads[:, 0].sum()
    parts = []
    while sum(map(len, parts)) < MIN_STEPS_OF_VARIANCE and len(parts) < MAX_EPOCHS_OF_VARIANCE:
        groups = stream.epoch(len(parts))
        sums = np.add.reduceat(loads[groups.samples], groups.first[:-1], axis=0)
        parts.append(_steps(sums, step_size).sum(axis=1))
    steps = np.concatenate(parts)
    chance = (loads - loads[:, :1] * density).var(axis=0) * steps[:, 0].mean() / loads[:, 0].mean()
    found = (steps - steps[:, :1] * density).var(axis=0)
    ratios = [
        f"{found[c] / chance[c]:.2f} of {name}" for c, name in enumerate(names, 1) if chance[c] > 1e-6 * found[0] + 1e-6
    ]
    print(
        f"    variance of {len(steps)} steps over chance's: {', '.join(ratios)} (give or take "
        f"{(2 / len(steps)) ** 0.5:.0%}); LLM tokens of a step vary by {steps[:, 0].std() / steps[:, 0].mean():.2%}"
    )


def _ratios(loads: np.ndarray) -> str:
    ratio = dist_ratio(loads)
    return f"{ratio[TILES]:.4f} / {ratio[TOKENS]:.4f} / {ratio[AUDIO]:.3f}"


def item_lengths(counts: np.ndarray) -> ItemLengths:
    """Make one item for each sample that has any."""
    sizes = counts[counts > 0]
    return ItemLengths(np.concatenate([[0], np.cumsum(counts > 0)]), sizes, np.ones_like(sizes), sizes, sizes)


def isf_speed(many: np.ndarray) -> None:
    """Time ISF."""
    for tokens, limit in ((many[:NUM_SAMPLES], 0.2), (many, 2.0)):
        two = np.ascontiguousarray(tokens[:, :2])
        budgets, fill = _isf_budgets(tokens)
        seconds, _ = least_seconds(
            lambda two=two, b=budgets, f=fill: group_by_isf(two, b, f, 10, np.random.default_rng(0))
        )
        target(f"isf, 10 rounds, two budgets: seconds for {len(tokens)} samples", seconds, limit)


def post_and_nodes(tokens: np.ndarray, exact: bool) -> None:
    """Measure post-balancing and node-wise rearrangement, with `exact` against a mixed-integer program."""
    num, per = 2560, 60
    lengths = np.random.default_rng(3).choice(tokens[:, TOKENS], num * per)
    source = np.repeat(np.arange(num), per)
    costs = [
        BatchCost(),
        BatchCost(quadratic=1e-4),
        BatchCost("two_key"),
        BatchCost("padded"),
        BatchCost("convolution", padding=1e-4),
    ]
    for cost in costs:
        seconds, moved = least_seconds(lambda cost=cost: rebalance(lengths, source, num, cost))
        loads, before = (cost.of_ranks(lengths, rank, num) for rank in (moved.dest_rank, source))
        print(
            f"  post-balancing {cost.kind} (quadratic {cost.quadratic:g}): max/mean {before.max() / before.mean():.4f} "
            f"-> {loads.max() / loads.mean():.4f}, largest x {loads.max() / before.max():.3f}, {seconds * 1e3:.0f} ms"
        )
        if cost == BatchCost():
            target(f"post-balancing {num} x {per}: milliseconds", seconds * 1e3, 40)
            target(f"post-balancing {num} x {per}: max/mean", float(loads.max() / loads.mean()), 1.001)
    batch = rebalance(lengths, source, num, BatchCost()).dest_rank
    seconds, replica = least_seconds(lambda: rearrange_across_nodes(source, batch, lengths, num, 8))
    before, after = (off_node_bytes(source, batch, lengths, r, 8) for r in (np.arange(num), replica))
    target(f"node-wise, {num} replicas, 320 nodes: milliseconds", seconds * 1e3, 50)
    print(
        f"  off-node volume in LLM tokens: largest sender {before.max()} -> {after.max()}, "
        f"all {before.sum()} -> {after.sum()}"
    )
    for num, per_node, per in ((16, 4, 60), (32, 8, 60), (64, 8, 8), (64, 8, 60)) if exact else ():
        lengths = np.random.default_rng(num + per).choice(tokens[:, TOKENS], num * per)
        source = np.repeat(np.arange(num), per)
        batch = rebalance(lengths, source, num, BatchCost()).dest_rank
        replica = rearrange_across_nodes(source, batch, lengths, num, per_node)
        worst = off_node_bytes(source, batch, lengths, replica, per_node).max()
        best, proven = _milp(source, batch, lengths, num, per_node)
        name = (
            f"node-wise, {num} replicas x {per}: largest sender over the MILP's (proven >= {proven:.0f} of {best:.0f})"
        )
        target(name, float(worst / best), 1.01)


def _milp(source: np.ndarray, batch: np.ndarray, sizes: np.ndarray, num: int, per_node: int) -> tuple[float, float]:
    """Return the best solution and the lower bound that HiGHS finds in 30 s."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix, eye, hstack, kron, lil_matrix

    nodes = num // per_node
    volume = np.zeros((num, num))
    np.add.at(volume, (source, batch), sizes)
    keeps = lil_matrix((num, num * nodes + 1))
    for i in range(num):
        keeps[i, np.arange(num) * nodes + i // per_node] = volume[i]
        keeps[i, -1] = 1
    once = hstack([kron(eye(num), np.ones((1, nodes))), csr_matrix((num, 1))])
    full = hstack([kron(np.ones((1, num)), eye(nodes)), csr_matrix((nodes, 1))])
    free = np.ones(num * nodes + 1)
    solution = milp(
        np.append(np.zeros(num * nodes), 1),
        constraints=[
            LinearConstraint(keeps.tocsr(), volume.sum(axis=1), np.inf),
            LinearConstraint(once.tocsr(), 1, 1),
            LinearConstraint(full.tocsr(), per_node, per_node),
        ],
        integrality=np.append(free[:-1], 0),
        bounds=Bounds(0, np.append(free[:-1], np.inf)),
        options={"time_limit": 30, "mip_rel_gap": 1e-3},
    )
    return float(solution.fun), float(solution.mip_dual_bound)


def ordering(weight: float) -> None:
    """Order 64 microbatches over 10 stages; the first is an encoder, whose times are gamma distributed.

    weight: mean time of the encoder, of that of any other stage.
    """
    rounds_of = (2, 3, 12)
    removed: dict[str, list[float]] = {"constructed": [], **{f"{r} rounds": [] for r in rounds_of}}
    of_work: dict[str, list[float]] = {name: [] for name in removed}
    seconds: dict[str, list[float]] = {name: [] for name in removed}
    for seed in range(40):
        rng = np.random.default_rng(seed)
        forward = np.ones((1, 10, 64))
        forward[0, 0] = rng.gamma(1 / 0.36, weight * 0.36, 64)
        backward = 2 * forward
        chance = makespans_1f1b(forward, backward, np.stack([rng.permutation(64) for _ in range(100)])).mean()
        by_work = makespan_lower_bound(forward[0], backward[0])
        bound = max(by_work, pairing_lower_bound(forward[0], backward[0]))
        given_order = np.arange(64)
        searches: dict[str, Callable[[], np.ndarray]] = {
            "constructed": lambda f=forward, b=backward, g=given_order: construct_order(f[0], b[0], g),
            **{
                f"{r} rounds": lambda f=forward, b=backward, g=given_order, r=r: reorder_microbatches(
                    f, b, g, r, np.random.default_rng(0)
                )
                for r in rounds_of
            },
        }
        for name, search in searches.items():
            search_s, order = least_seconds(search, 2)
            span, before = makespans_1f1b(forward, backward, np.stack([order, given_order]))
            assert name == "constructed" or span <= before, "worse than the given order"
            removed[name].append(float((chance - span) / (chance - bound)))
            of_work[name].append(float((chance - span) / (chance - by_work)))
            seconds[name].append(search_s)
    for name in removed:
        search_ms = float(np.median(seconds[name])) * 1e3
        share = float(np.mean(removed[name]))
        print(
            f"  ordering 64 x 10, encoder {weight:g}, {name}: {search_ms:.1f} ms, removes {share:.3f} of the cost of a "
            f"random order over the pairing bound, {np.mean(of_work[name]):.3f} over the bound of the work alone"
        )
        if name == "2 rounds":  # those of training
            target(f"ordering 64 x 10, encoder {weight:g}: ms", search_ms, 10)
            target(f"ordering 64 x 10, encoder {weight:g}: share removed", share, 0.9, at_least=True)


def ordering_chunks(stages: int, chunks: int, num: int) -> None:
    """Order microbatches of an interleaved LLM behind an encoder that takes as long, with gamma distributed times."""
    meshes = (
        UnitMesh("vision", 1, 1, 1, (0,), num),
        UnitMesh("llm", 1, stages, 1, tuple(range(1, stages + 1)), num, chunks),
    )
    ids = [StageId("vision", 0), *(StageId("llm", i) for i in range(stages * chunks))]
    unit = {mesh.unit: mesh for mesh in meshes}
    graph = StageGraph(
        meshes,
        tuple(Stage(sid, (0, 1), (unit[sid.unit].tp_group(sid.index, 0),), trainable=True) for sid in ids),
        tuple(Edge(source, destination) for source, destination in pairwise(ids)),
    )
    counts = {"vision": num, "llm": num}
    table = build_schedule_table(
        graph, SchedulePlan(num_microbatches=counts), dict.fromkeys(ids, (SequenceCost(1), SequenceCost(2)))
    )
    assert table is not None
    recurrence = ScheduleRecurrence(table, counts)
    saved = []
    seconds = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        uneven = 0.9 * chunks * rng.gamma(1 / 0.36, 0.36, num)
        costs = np.array([[t.cost.linear * (uneven if t.unit == "vision" else np.ones(num)) for t in table.tasks]])
        chance = recurrence.makespans(costs, np.stack([rng.permutation(num) for _ in range(50)])).mean()
        forward, backward = (seconds_of_ranks[None] for seconds_of_ranks in recurrence.rank_seconds(costs[0]))
        search_s, order = least_seconds(
            lambda f=forward, b=backward, c=costs: reorder_microbatches(
                f, b, np.arange(num), 2, np.random.default_rng(0), score=lambda orders: recurrence.makespans(c, orders)
            ),
            2,
        )
        saved.append(1 - float(recurrence.makespans(costs, order[None])[0]) / chance)
        seconds.append(search_s)
    num_actions = sum(len(actions.split()) for actions in table.actions)
    print(
        f"  ordering {num} microbatches over {stages} ranks of {chunks} chunks ({num_actions} actions): "
        f"{np.median(seconds) * 1e3:.0f} ms, {np.mean(saved):.1%} off a step in random order"
    )


def ordering_plan(settings: Sequence[str]) -> None:
    """Simulate steps of a planned run with and without an order in time."""
    recipe = load_recipe(Path(__file__).parents[1] / "recipes" / "whatif" / "internvl_26b.yaml", settings).recipe
    index = build_index(recipe)
    ranks = recipe.cluster.ranks
    assert ranks is not None
    chosen = plan_recipe(
        recipe,
        index.lengths,
        world_size=ranks,
        hardware="h100-80g",
        recipe_sha256="",
        request=PlanRequest(num_alternatives=1),
    )
    targets = derive_step_targets(recipe, chosen, index.lengths)
    stream = GroupStream.of(recipe, index)
    dp = {name: unit.dp for name, unit in chosen.units.items()}
    counts = chosen.schedule.num_microbatches
    shares = []
    for step in range(6):
        with_order, without = (
            simulate_plan(
                recipe, chosen, stream.batch(step, recipe.train.global_batch, dp, counts, step_targets)
            ).step_time_s
            for step_targets in (targets, replace(targets, pipeline=(), schedule_table=None))
        )
        shares.append(with_order / without)
    print(
        f"  ordering steps of {recipe.name} on {ranks} GPUs, {chosen.placement}, {chosen.schedule.kind}: "
        f"{1 - np.mean(shares):.1%} off on average, {1 - max(shares):.1%} off at worst"
    )


def mixture(folder: Path, num: int) -> np.ndarray:
    """(num, 3) LLM tokens, image tiles, audio tokens: 17.5% each of AI2D, ChartQA, COCO and speech; 30% text alone."""
    rng = np.random.default_rng(0)
    sources = _sources(folder)
    kind = mixture_kinds(rng, num)
    tokens = np.zeros((num, 3), dtype=np.int64)
    for k, table in enumerate(sources):
        (rows,) = np.nonzero(kind == k)
        tokens[rows, : table.shape[1]] = table[rng.integers(len(table), size=len(rows))]
    (texts,) = np.nonzero(kind == 4)
    tokens[texts, TOKENS] = np.clip(rng.lognormal(5.5, 1.0, len(texts)), 16, 0.985 * MAX_GROUP_TOKENS)
    return tokens


def mixture_kinds(rng: np.random.Generator, num: int) -> np.ndarray:
    """(num,) the source of each sample of the mixture: AI2D, ChartQA, COCO, speech, text; `rng` as it starts there."""
    return rng.choice(5, num, p=[0.175] * 4 + [0.3])


def _sources(folder: Path) -> list[np.ndarray]:
    """(n, 2 or 3) LLM tokens, image tiles, audio tokens of AI2D, ChartQA, COCO and speech."""
    coco = columns_of(folder / "coco_captions_val2017.csv", "width", "height", "caption_words", "captions")
    speech = columns_of(folder / "librilight_10h.csv", "duration_ms", "words")
    coco_tiles = np.array([num_tiles(width, height) for width, height, _, _ in coco])
    audio = np.ceil(speech[:, 0] / 1000 * 25)
    return [
        columns_of(folder / "ai2d_train_12k.csv", "llm_tokens", "image_tiles"),
        columns_of(folder / "chartqa_train_18k.csv", "llm_tokens", "image_tiles"),
        np.stack([256 * coco_tiles + np.round(1.33 * coco[:, 2] / coco[:, 3]) + 40, coco_tiles], axis=1),
        np.stack([audio + np.round(1.33 * speech[:, 1]) + 40, np.zeros(len(audio)), audio], axis=1),
    ]


def num_tiles(width: float, height: float, max_tiles: int = 6) -> int:
    """Count the 448-pixel tiles of InternVL's dynamic preprocessing, thumbnail included."""
    grids = sorted(
        ((i, j) for i in range(1, max_tiles + 1) for j in range(1, max_tiles + 1) if i * j <= max_tiles),
        key=lambda g: g[0] * g[1],
    )
    best = (1, 1)
    for grid in grids:
        nearer = abs(width / height - grid[0] / grid[1]) - abs(width / height - best[0] / best[1])
        if nearer < 0 or (nearer == 0 and width * height > 0.5 * 448 * 448 * grid[0] * grid[1]):
            best = grid
    count = best[0] * best[1]
    return count + (count > 1)


def columns_of(path: Path, *names: str) -> np.ndarray:
    """Return (n, len(names)) columns of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return np.array([[float(row[name]) for name in names] for row in csv.DictReader(file)])


def _isf_budgets(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the published default budgets."""
    longest = int(tokens[:, TOKENS].max())
    tiles = int(longest * tokens[:, TILES].sum() / tokens[:, TOKENS].sum())
    return np.array([longest, tiles]), np.array([longest - 128, tiles])


def _steps(loads: np.ndarray, replicas: int) -> np.ndarray:
    """Arrange whole steps of `replicas` groups."""
    whole = len(loads) // replicas * replicas
    return loads[:whole].reshape(-1, replicas, *loads.shape[1:])


def _fill(groups: SampleGroups, tokens: np.ndarray, which: np.ndarray) -> str:
    return f"{groups.loads(tokens)[which, TOKENS].mean() / MAX_GROUP_TOKENS:.0%} full"


def least_seconds(work: Callable[[], T], times: int = 3) -> tuple[float, T]:
    """Run `work` several times; return the least processor seconds, and its result."""
    best = float("inf")
    for _ in range(times):
        start = time.process_time()
        result = work()
        best = min(best, time.process_time() - start)
    return best, result


def target(name: str, value: float, limit: float, at_least: bool = False) -> None:
    """Print whether a figure meets its target."""
    met = value >= limit if at_least else value <= limit
    print(f"{'met   ' if met else 'MISSED'} {name}: {value:.5g} ({'at least' if at_least else 'at most'} {limit:g})")


if __name__ == "__main__":
    main()
