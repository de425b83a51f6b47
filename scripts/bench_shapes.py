"""Print how balancing holds on lengths of many shapes, beside bounds: `python -m scripts.bench_shapes --lengths DIR`.

Run it from the root of a checkout. DIR holds the files that `bench_balance` reads. `--only post` runs a part alone.
Times are processor seconds of one core, the least of two runs.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mmtrain.balance import BatchCost, rebalance
from scripts.bench_balance import least_seconds, target

Draw = Callable[[np.random.Generator, int], np.ndarray]
TAILS: dict[str, Draw] = {  # lengths of samples
    "log-normal, sigma 1": lambda rng, n: rng.lognormal(5.5, 1.0, n),
    "log-normal, sigma 2": lambda rng, n: rng.lognormal(5.0, 2.0, n),
    "Pareto 1.1": lambda rng, n: 50 * (1 + rng.pareto(1.1, n)),
    "one in 1,000 huge": lambda rng, n: np.where(rng.random(n) < 0.999, rng.integers(1, 20, n), 100_000),
    "huge on all ranks but one": lambda rng, n: np.where(np.arange(n) < n // 60 - 1, 10**7, rng.integers(1, 9, n)),
    "near equal": lambda rng, n: rng.integers(990, 1011, n),
}
POST_BALANCING_RANKS = 2560
SAMPLES_PER_RANK = 60


def main() -> None:
    """Print the parts that are asked for."""
    parts: dict[str, Callable[[Path], None]] = {"post": post_balancing}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, metavar="DIR", help="folder of the length files")
    parser.add_argument("--only", choices=parts, help="one part alone")
    options = parser.parse_args()
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()}-core {platform.machine()}, Python {platform.python_version()}"
    )
    for name, part in parts.items():
        if options.only in (None, name):
            part(options.lengths)


def post_balancing(_lengths: Path) -> None:
    """Time post-balancing by two keys and by one, and compare the largest load with the lower bound."""
    num = POST_BALANCING_RANKS
    for name, draw in TAILS.items():
        lengths = np.ceil(draw(np.random.default_rng(0), num * SAMPLES_PER_RANK)).astype(np.int64)
        source = np.arange(len(lengths)) % num
        for cost in (BatchCost(), BatchCost("two_key"), BatchCost("two_key", quadratic=1e-4)):
            seconds, moved = least_seconds(lambda c=cost, x=lengths, s=source: rebalance(x, s, num, c), 2)
            loads = cost.of_ranks(lengths, moved.dest_rank, num)
            bound = max(float(loads.mean()), float(cost.of_samples(lengths).max()))
            label = f"post-balancing {cost.kind} (quadratic {cost.quadratic:g}), {name}"
            target(f"{label}: milliseconds", seconds * 1e3, 45)
            target(f"{label}: largest load over its bound", float(loads.max()) / bound, 1.01)


if __name__ == "__main__":
    main()
