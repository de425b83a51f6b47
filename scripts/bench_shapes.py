"""Print how balancing holds on lengths of many shapes, beside bounds: `python -m scripts.bench_shapes --lengths DIR`.

Run it from the root of a checkout. DIR holds the files that `bench_balance` reads. `--only post` runs a part alone.
Times are processor seconds of one core, the least of two runs.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np

from mmtrain.balance import BatchCost, rebalance
from mmtrain.balance.dispatch.node_placement import off_node_bytes, rearrange_across_nodes
from mmtrain.balance.grouping.slack_packing import pack_with_slack
from scripts.bench_balance import TILES, TOKENS, WINDOW, columns_of, mixture, num_tiles
from scripts.measurements import Report, arguments, least_seconds, start
from tests.balance.first_fit import first_fit_decreasing
from tests.balance.sender_bound import largest_sender_bound, single_node_bound

Draw = Callable[[np.random.Generator, int], np.ndarray]
TAILS: dict[str, Draw] = {  # lengths of samples
    "log-normal, sigma 1": lambda rng, n: rng.lognormal(5.5, 1.0, n),
    "log-normal, sigma 2": lambda rng, n: rng.lognormal(5.0, 2.0, n),
    "Pareto 1.1": lambda rng, n: 50 * (1 + rng.pareto(1.1, n)),
    "one in 1,000 huge": lambda rng, n: np.where(rng.random(n) < 0.999, rng.integers(1, 20, n), 100_000),
    "huge on all ranks but one": lambda rng, n: np.where(np.arange(n) < n // 60 - 1, 10**7, rng.integers(1, 9, n)),
    "near equal": lambda rng, n: rng.integers(990, 1011, n),
}
NUM_SAMPLES = 70_000
SHAPES: dict[str, Draw] = {  # LLM tokens of samples, clipped to the largest group
    "log-normal, sigma 1.6": lambda rng, n: rng.lognormal(5, 1.6, n),
    "Pareto 1.1": lambda rng, n: 30 * (1 + rng.pareto(1.1, n)),
    "two peaks": lambda rng, n: np.where(rng.random(n) < 0.5, rng.normal(300, 40, n), rng.normal(2200, 150, n)),
    "near equal": lambda rng, n: rng.normal(900, 15, n),
    "tiny": lambda rng, n: rng.integers(8, 64, n),
    "uniform": lambda rng, n: rng.integers(1, 4097, n),
    "a third": lambda rng, n: rng.integers(1300, 1500, n),
    "a quarter, a half and tiny": lambda rng, n: rng.choice(
        [rng.integers(1000, 1050, n), rng.integers(2000, 2100, n), rng.integers(20, 60, n)]
    ),
    "whole tiles and a text": lambda rng, n: 256 * rng.integers(1, 7, n) + rng.integers(20, 90, n),
}
SEQ_LENS = (4096, 32_768)
MAX_GROUPS_OVER_FIRST_FIT = 0.003
POST_BALANCING_RANKS = 2560
SAMPLES_PER_RANK = 60
NODE_SHAPES: dict[tuple[str, int], Draw] = {  # pieces of each rank
    ("log-normal pieces, sigma 1,", 60): lambda rng, n: rng.lognormal(6, 1, n).clip(max=8192),
    ("heavy-tailed pieces, sigma 2,", 60): lambda rng, n: rng.lognormal(5, 2, n),
    ("large pieces", 6): lambda rng, n: rng.lognormal(8, 0.7, n),
    ("large pieces", 3): lambda rng, n: rng.lognormal(8, 0.7, n),
}
RANKS_PER_NODE = 8
NUM_NODE_SEEDS = 3


def main() -> None:
    """Print the parts that are asked for."""
    parts: dict[str, Callable[[Report, Path], None]] = {"fill": fill, "post": post_balancing, "nodes": node_wise}
    parser = arguments(__doc__)
    parser.add_argument("--lengths", type=Path, required=True, metavar="DIR", help="folder of the length files")
    parser.add_argument("--only", choices=parts, help="one part alone")
    options = parser.parse_args()
    report = start("Balancing of other lengths", options)
    report.targets()
    for name, part in parts.items():
        if options.only in (None, name):
            part(report, options.lengths)


def length_sets(folder: Path) -> dict[str, np.ndarray]:
    """Return (n, 2) the LLM tokens and image tiles of the real sets, of the mixture, and of the sets that are drawn."""
    coco = columns_of(folder / "coco_captions_val2017.csv", "width", "height", "caption_words", "captions")
    tiles = np.array([num_tiles(width, height) for width, height, _, _ in coco])
    speech = columns_of(folder / "librilight_10h.csv", "duration_ms", "words")
    speech_tokens = np.ceil(speech[:, 0] / 40) + np.round(1.33 * speech[:, 1]) + 40
    rng = np.random.default_rng(0)
    sets = {
        "ai2d_train_12k": columns_of(folder / "ai2d_train_12k.csv", "llm_tokens", "image_tiles"),
        "chartqa_train_18k": columns_of(folder / "chartqa_train_18k.csv", "llm_tokens", "image_tiles"),
        "coco_captions_val2017": np.stack([256 * tiles + np.round(1.33 * coco[:, 2] / coco[:, 3]) + 40, tiles], axis=1),
        "librilight_10h": np.stack([speech_tokens, np.zeros(len(speech))], axis=1),
        "mixture": mixture(folder, NUM_SAMPLES)[:, [TOKENS, TILES]],
        **{name: np.stack([draw(rng, NUM_SAMPLES), np.zeros(NUM_SAMPLES)], axis=1) for name, draw in SHAPES.items()},
    }
    sets = {name: np.ceil(tokens).astype(np.int64) for name, tokens in sets.items()}
    for tokens in sets.values():
        tokens[:, 0] = tokens[:, 0].clip(min=1)
    return sets


def fill(report: Report, folder: Path) -> None:
    """Compare the groups of matched grouping with those of first-fit decreasing, by windows and over the whole set."""
    for (name, all_tokens), seq_len in product(length_sets(folder).items(), SEQ_LENS):
        tokens = np.minimum(all_tokens, seq_len)
        order = np.random.default_rng(1).permutation(len(tokens))
        windows = [order[start : start + WINDOW] for start in range(0, len(order), WINDOW)]
        by_window = sum(first_fit_decreasing(tokens[part, 0], seq_len) for part in windows)
        whole = first_fit_decreasing(tokens[:, 0], seq_len)
        for num_units in (1, 2) if tokens[:, 1].any() else (1,):
            budgets = np.array([seq_len, tokens[:, 1].sum()])[:num_units]
            units = np.ascontiguousarray(tokens[:, :num_units])
            seconds, num_groups = least_seconds(
                lambda u=units, b=budgets, w=windows: sum(len(pack_with_slack(u, b, part)) for part in w), 2
            )
            share = float(tokens[:, 0].sum() / seq_len / num_groups)
            label = (
                f"{name}, {'tokens' if num_units == 1 else 'tokens and tiles'}, groups of {seq_len}: fill {share:.4f} "
                f"in {seconds:.2f} s, {num_groups / whole - 1:+.2%} of the whole set's first-fit decreasing"
            )
            report.target(f"{label}; by windows", num_groups / by_window - 1, MAX_GROUPS_OVER_FIRST_FIT)


def post_balancing(report: Report, _lengths: Path) -> None:
    """Time post-balancing, and compare the largest load with the lower bound."""
    num = POST_BALANCING_RANKS
    for name, draw in TAILS.items():
        lengths = np.ceil(draw(np.random.default_rng(0), num * SAMPLES_PER_RANK)).astype(np.int64)
        source = np.arange(len(lengths)) % num
        for cost in (BatchCost(), BatchCost(quadratic=1e-4)):
            seconds, rank = least_seconds(lambda c=cost, x=lengths, s=source: rebalance(x, s, num, c), 2)
            loads = cost.of_ranks(lengths, rank, num)
            bound = max(float(loads.mean()), float(cost.of_samples(lengths).max()))
            label = f"post-balancing {cost.kind} (quadratic {cost.quadratic:g}), {name}"
            report.target(f"{label}: milliseconds", seconds * 1e3, 45)
            report.target(f"{label}: largest load over its bound", float(loads.max()) / bound, 1.01)


def node_wise(report: Report, _lengths: Path) -> None:
    """Compare the largest sender of node-wise rearrangement with two lower bounds."""
    num = POST_BALANCING_RANKS
    for seed, ((name, per_rank), draw) in product(range(NUM_NODE_SEEDS), NODE_SHAPES.items()):
        sizes = np.clip(draw(np.random.default_rng(seed), num * per_rank), 1, 2**20).astype(np.int64)
        source = np.repeat(np.arange(num), per_rank)
        batch = rebalance(sizes, source, num, BatchCost())
        seconds, replica = least_seconds(
            lambda s=source, b=batch, x=sizes: rearrange_across_nodes(s, b, x, num, RANKS_PER_NODE)
        )
        worst = float(off_node_bytes(source, batch, sizes, replica, RANKS_PER_NODE).max())
        shared = largest_sender_bound(source, batch, sizes, num, RANKS_PER_NODE, worst)
        bound = single_node_bound(source, batch, sizes, num, RANKS_PER_NODE, shared)
        label = f"node-wise, {num} ranks, {per_rank} {name} each, seed {seed}"
        report.target(f"{label}: milliseconds", seconds * 1e3, 50)
        report.target(f"{label}: largest sender over the bound", worst / bound - 1, 0.02 if per_rank > 10 else 0.05)
        over = bound / shared - 1, worst / shared - 1
        report.figure(
            f"{label}: the bound / the largest sender over linear programming's", f"{over[0]:.2%} / {over[1]:.2%}"
        )


if __name__ == "__main__":
    main()
