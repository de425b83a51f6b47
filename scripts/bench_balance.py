"""Print every measure of balancing beside its target: `python -m scripts.bench_balance --lengths DIR`.

Run it from the root of a checkout; it uses tools of the tests. DIR holds ai2d_train_12k.csv, chartqa_train_18k.csv
(image_tiles, llm_tokens), coco_captions_val2017.csv (width, height, captions, caption_words) and librilight_10h.csv
(duration_ms, words). Times are processor seconds of one core, the least of two or three runs.
"""

import csv
import time
from collections.abc import Callable
from pathlib import Path

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
from mmtrain.balance.assign import longest_first
from mmtrain.balance.dispatch.node_placement import off_node_bytes, rearrange_across_nodes
from mmtrain.balance.grouping.methods import token_targets
from mmtrain.balance.grouping.pack_groups import group_across_devices, group_by_isf, group_by_length, group_randomly
from mmtrain.balance.ordering.makespan_1f1b import makespans_1f1b
from mmtrain.balance.ordering.reordering import reorder_microbatches
from mmtrain.data import GroupStream
from scripts.drawn_lengths import drawn_sets
from scripts.measurements import Report, arguments, least_seconds, start
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
MAX_FINDING_MS, MAX_VARIANCE_OVER_CHANCE, MIN_FILL = 10, 1.2, 0.985
STEP_TARGETS = {  # dist ratios of tiles and tokens: of a step, and of a microbatch
    (8, 8): ((0.003, 0.002), (0.01, 0.005)),
    (64, 8): ((0.01, 0.003), (0.01, 0.005)),
    (256, 8): ((0.02, 0.02),),
    (1024, 8): ((0.02, 0.02),),
}
ENCODER_WEIGHTS = (0.9, 1.0)  # of a pipeline's first stage, beside the others
TILE_PATCHES = 1024  # tokens that a vision unit sees of a tile of 448 pixels
TRAINING_ROUNDS = 2  # of the search for an order, as a run makes them


def main() -> None:
    """Print every measure beside its target."""
    parser = arguments(__doc__)
    parser.add_argument("--lengths", type=Path, required=True, metavar="DIR", help="folder of the length files")
    parser.add_argument("--no-milp", action="store_true", help="leave out the exact node-wise optimum (a minute)")
    parser.add_argument("--only-steps", action="store_true", help="only the steps that training reads")
    parser.add_argument("--drawn", action="store_true", help="only steps of sets that nothing was tuned to")
    options = parser.parse_args()
    if options.drawn:
        drawn_steps(start("Steps of drawn sets", options), options.lengths)
        return
    report = start("Steps that training reads" if options.only_steps else "Balancing", options)
    tokens = mixture(options.lengths, NUM_SAMPLES)
    if not options.only_steps:
        grouping(report, tokens)
    report.targets()
    sets = {"mixture": (tokens, mixture_kinds(np.random.default_rng(0), len(tokens))), **other_sets(options.lengths)}
    for name, (other, kind) in sets.items():
        report.figure(f"{name}: mean LLM tokens / tiles / audio tokens", str(other.mean(axis=0).round(2).tolist()))
        for size in TRAINING_SIZES if name == "mixture" else OTHER_TRAINING_SIZES:
            train_size(report, name, other, kind, size)
    if options.only_steps:
        return
    isf_speed(report, mixture(options.lengths, 1_200_000))
    post_and_nodes(report, tokens, exact=not options.no_milp)
    for weight in ENCODER_WEIGHTS:
        ordering(report, weight)


def grouping(report: Report, tokens: np.ndarray) -> None:
    """Print OmniBal's Table 3 for the mixture; `train_size` measures what `matched` makes of it."""
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
    dist_columns = "dist ratio tiles / tokens / audio", "summed"
    report.table("method", "replicas", "groups", "mean batch", "fill", "pad ratio", *dist_columns, "seconds")
    for replicas in (8, 64):
        for name, method in by_method.items():
            seconds, groups = least_seconds(lambda method=method, r=replicas: method(r), 2)
            loads = groups.loads(tokens)
            over = max_over_mean(_steps(loads @ LOADS_SUMMED[0], replicas)) - 1
            filled = loads[:, TOKENS].mean() / MAX_GROUP_TOKENS
            is_padded = name in ("random", "length", "device")
            padding = f"{pad_ratio(tokens[:, TOKENS], groups):.3f}" if is_padded else "-"
            cells = [len(groups), f"{groups.sizes.mean():.2f}", f"{filled:.3f}", padding]
            report.row(name, replicas, *cells, _ratios(_steps(loads, replicas)), f"{over:.5f}", f"{seconds:.2f}")
    report.line()


def train_size(report: Report, name: str, tokens: np.ndarray, kind: np.ndarray, size: tuple[int, int]) -> None:
    """Arrange steps of one size, replicas and the microbatches of each, and print how even and how random they are.

    kind: (n,) the source of each sample.
    """
    lengths = _lengths(tokens)
    tile = {
        "llm": SequenceCost(TILE_PATCHES),
        "vision": SequenceCost(300),
        "audio": SequenceCost(TILE_PATCHES),
    }  # tile : token = 300 : 1
    replicas, microbatches = size
    grouping = Grouping(MAX_GROUP_TOKENS, WINDOW, replicas * microbatches)
    seconds, stream = least_seconds(lambda: GroupStream(lengths, grouping, 0), 1)
    far, _ = least_seconds(lambda: stream.groups(10**6 * grouping.global_batch, grouping.global_batch), 1)
    label = f"{name}, {replicas} x {microbatches}"
    report.figure(f"{label}: the stream starts", f"{seconds:.2f} s")
    report.target(f"{label}: finding step 1,000,000, ms", far * 1e3, MAX_FINDING_MS)
    apart = token_targets(lengths, grouping)
    in_all, side_by_side = _arranged(report, f"{label}, units apart", apart, tokens, stream, size)
    for what, loads, limits in zip(
        ("step", "microbatch"), (in_all, side_by_side), STEP_TARGETS.get(size, ()), strict=False
    ):
        report.target(f"{label}, a {what}: dist ratio of image tiles", dist_ratio(loads)[TILES], limits[0])
        report.target(f"{label}, a {what}: dist ratio of LLM tokens", dist_ratio(loads)[TOKENS], limits[1])
    _arranged(report, f"{label}, summed", StepTargets((BalancedLoad(tile),)), tokens, stream, size)
    if stream.groups_per_epoch >= 10 * grouping.global_batch:
        _randomness(report, label, tokens, kind, stream, replicas * microbatches)


def drawn_steps(report: Report, folder: Path) -> None:
    """Print how even steps of drawn sets are, beside their groups dealt by longest processing time."""
    columns = ("step, tiles / tokens / audio", "by longest first", "microbatch", "share of a tile")
    report.table("set", "replicas x microbatches", *columns)
    for name, (tokens, _) in drawn_sets(_sources(folder), OTHER_SAMPLES).items():
        lengths = _lengths(tokens)
        for replicas, microbatches in OTHER_TRAINING_SIZES:
            grouping = Grouping(MAX_GROUP_TOKENS, WINDOW, replicas * microbatches)
            stream = GroupStream(lengths, grouping, 0)
            targets = token_targets(lengths, grouping)
            slots, _ = _arranged_slots(targets, tokens, stream, (replicas, microbatches))
            in_all = slots.sum(axis=1)
            dealt = np.stack([_longest_first(groups.reshape(-1, 3), replicas) for groups in slots])
            mean = in_all[:, :, TILES].mean(axis=1)
            whole = float((1 - mean / np.maximum(np.ceil(mean), 1)).mean()) if mean.any() else 0.0
            ratios = _ratios(in_all), _ratios(dealt), _ratios(slots.reshape(-1, replicas, 3))
            report.row(name, f"{replicas} x {microbatches}", *ratios, f"{whole:.4f}")


def _longest_first(groups: np.ndarray, replicas: int) -> np.ndarray:
    """Return (replicas, 3) loads after groups (G, 3) went, for each load anew, to the least loaded replica."""
    loads = np.zeros((replicas, 3), dtype=np.int64)
    for column, of_groups in zip(loads.T, groups.T, strict=True):
        descending = np.sort(of_groups)[::-1]
        np.add.at(column, longest_first(descending.tolist(), replicas), descending)
    return loads


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
    report: Report, label: str, targets: StepTargets, tokens: np.ndarray, stream: GroupStream, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Arrange an epoch's steps for `targets`, and print how even they are.

    size: replicas and their microbatches. Returns (steps, replicas, 3) and (microbatches of all steps, replicas, 3) the
    LLM tokens, tiles and audio tokens of each replica.
    """
    slots, step_ms = _arranged_slots(targets, tokens, stream, size)
    replicas, _ = size
    side_by_side = slots.reshape(-1, replicas, 3)
    in_all = slots.sum(axis=1)
    for what, loads in (("microbatch", side_by_side), ("step", in_all)):
        report.figure(f"{label}, a {what}: dist ratio of tiles / tokens / audio", _ratios(loads))
        report.figure(f"{label}, a {what}: summed", f"{max_over_mean(loads @ LOADS_SUMMED[0]) - 1:.5f}")
    report.figure(f"{label}: milliseconds of a step", f"{step_ms:.0f}")
    fill = side_by_side[:, :, TOKENS].mean() / MAX_GROUP_TOKENS
    report.target(f"{label}: fill of all groups", float(fill), MIN_FILL, at_least=True)
    return in_all, side_by_side


def _arranged_slots(
    targets: StepTargets, tokens: np.ndarray, stream: GroupStream, size: tuple[int, int]
) -> tuple[np.ndarray, float]:
    """Return (steps, microbatches, replicas, 3) what replicas have in steps of an epoch, and milliseconds of a step."""
    replicas, microbatches = size
    dp = {"llm": replicas, "vision": replicas, "audio": replicas}
    num_steps = min(
        max(stream.groups_per_epoch // (replicas * microbatches), 1),
        MAX_ARRANGED_STEPS,
        max(MAX_ARRANGED_GROUPS // (replicas * microbatches), 1),
    )
    slots = np.zeros((num_steps, microbatches, replicas, 3), dtype=np.int64)
    start_s = time.process_time()
    for step in range(num_steps):
        meta = stream.batch(step, replicas * microbatches, dp, dict.fromkeys(dp, microbatches), targets)
        np.add.at(slots[step], (meta.index, meta.replica), tokens[meta.sample_id])
    return slots, (time.process_time() - start_s) / num_steps * 1e3


def _randomness(
    report: Report, label: str, tokens: np.ndarray, kind: np.ndarray, stream: GroupStream, step_size: int
) -> None:
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
    label = f"{label}, {len(steps)} steps, +-{(2 / len(steps)) ** 0.5:.0%}"
    for column, name in enumerate(names, 1):
        if chance[column] > 1e-6 * found[0] + 1e-6:
            ratio = float(found[column] / chance[column])
            report.target(f"{label}: variance of {name} over chance's", ratio, MAX_VARIANCE_OVER_CHANCE)
    spread = steps[:, 0].std() / steps[:, 0].mean()
    report.figure(f"{label}: LLM tokens of a step vary by", f"{spread:.2%}")


def _ratios(loads: np.ndarray) -> str:
    ratio = dist_ratio(loads)
    return f"{ratio[TILES]:.4f} / {ratio[TOKENS]:.4f} / {ratio[AUDIO]:.3f}"


def _lengths(tokens: np.ndarray) -> SampleLengths:
    """Return the lengths of samples with (n, 3) LLM tokens, tiles and audio tokens."""
    return SampleLengths(
        tokens[:, TOKENS],
        tokens[:, TOKENS] // 2,
        {"audio": item_lengths(tokens[:, AUDIO]), "vision": item_lengths(TILE_PATCHES * tokens[:, TILES])},
    )


def item_lengths(counts: np.ndarray) -> ItemLengths:
    """Make one item for each sample that has any."""
    sizes = counts[counts > 0]
    return ItemLengths(np.concatenate([[0], np.cumsum(counts > 0)]), sizes, np.ones_like(sizes), sizes, sizes)


def isf_speed(report: Report, many: np.ndarray) -> None:
    """Time ISF."""
    for tokens, limit in ((many[:NUM_SAMPLES], 0.2), (many, 2.0)):
        two = np.ascontiguousarray(tokens[:, :2])
        budgets, fill = _isf_budgets(tokens)
        seconds, _ = least_seconds(
            lambda two=two, b=budgets, f=fill: group_by_isf(two, b, f, 10, np.random.default_rng(0))
        )
        report.target(f"isf, 10 rounds, two budgets: seconds for {len(tokens)} samples", seconds, limit)


def post_and_nodes(report: Report, tokens: np.ndarray, exact: bool) -> None:
    """Measure post-balancing and node-wise rearrangement, with `exact` against a mixed-integer program."""
    num, per = 2560, 60
    lengths = np.random.default_rng(3).choice(tokens[:, TOKENS], num * per)
    source = np.repeat(np.arange(num), per)
    for cost in (BatchCost(), BatchCost(quadratic=1e-4), BatchCost("padded")):
        seconds, balanced = least_seconds(lambda cost=cost: rebalance(lengths, source, num, cost))
        loads, before = (cost.of_ranks(lengths, rank, num) for rank in (balanced, source))
        label = f"post-balancing {num} x {per}, {cost.kind} (quadratic {cost.quadratic:g})"
        report.figure(f"{label}: max/mean before", f"{before.max() / before.mean():.4f}")
        report.figure(f"{label}: largest cost over the one before", f"{loads.max() / before.max():.3f}")
        figures = {"milliseconds": (seconds * 1e3, 40), "max/mean": (float(loads.max() / loads.mean()), 1.001)}
        for what, (value, limit) in figures.items():
            if cost == BatchCost():
                report.target(f"{label}: {what}", value, limit)
            else:
                report.figure(f"{label}: {what}", f"{value:.5g}")
    batch = rebalance(lengths, source, num, BatchCost())
    seconds, replica = least_seconds(lambda: rearrange_across_nodes(source, batch, lengths, num, 8))
    before, after = (off_node_bytes(source, batch, lengths, r, 8) for r in (np.arange(num), replica))
    report.target(f"node-wise, {num} replicas, 320 nodes: milliseconds", seconds * 1e3, 50)
    report.figure("its off-node LLM tokens, largest sender", f"{before.max()} -> {after.max()}")
    report.figure("the same, all senders", f"{before.sum()} -> {after.sum()}")
    for num, per_node, per in ((16, 4, 60), (32, 8, 60), (64, 8, 8), (64, 8, 60)) if exact else ():
        lengths = np.random.default_rng(num + per).choice(tokens[:, TOKENS], num * per)
        source = np.repeat(np.arange(num), per)
        batch = rebalance(lengths, source, num, BatchCost())
        replica = rearrange_across_nodes(source, batch, lengths, num, per_node)
        worst = off_node_bytes(source, batch, lengths, replica, per_node).max()
        best, proven = _milp(source, batch, lengths, num, per_node)
        label = f"node-wise, {num} replicas x {per}: largest sender over the MILP's"
        report.target(f"{label} (proven >= {proven:.0f} of {best:.0f})", float(worst / best), 1.01)


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


def ordering(report: Report, weight: float) -> None:
    """Order 64 microbatches over 10 stages; the first is an encoder, whose times are gamma distributed.

    weight: mean time of the encoder, of that of any other stage.
    """
    removed, seconds = [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        forward = np.ones((1, 10, 64))
        forward[0, 0] = rng.gamma(1 / 0.36, weight * 0.36, 64)
        backward = 2 * forward
        chance = makespans_1f1b(forward, backward, np.stack([rng.permutation(64) for _ in range(100)])).mean()
        both = forward[0], backward[0]
        bound = max(makespan_lower_bound(*both), pairing_lower_bound(*both))
        given_order = np.arange(64)
        search_s, order = least_seconds(
            lambda f=forward, b=backward, g=given_order: reorder_microbatches(
                f, b, g, TRAINING_ROUNDS, np.random.default_rng(0)
            ),
            2,
        )
        span, before = makespans_1f1b(forward, backward, np.stack([order, given_order]))
        assert span <= before, "worse than the given order"
        removed.append(float((chance - span) / (chance - bound)))
        seconds.append(search_s)
    label = f"ordering 64 x 10, encoder {weight:g}"
    report.target(f"{label}: ms", float(np.median(seconds)) * 1e3, 10)
    report.target(f"{label}: share of a random order's cost removed", float(np.mean(removed)), 0.9, at_least=True)


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


if __name__ == "__main__":
    main()
