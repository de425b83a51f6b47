"""Whether fixed degrees of units make a plan of about a thousand GPUs faster than the free search.

    python -m scripts.bench_fixed_sizes                          # single degrees, on 960, 1,152 and 1,296 GPUs
    python -m scripts.bench_fixed_sizes --pairs 300              # 300 pairs for each of them, drawn with a fixed seed
    python -m scripts.bench_fixed_sizes --ranks 1152 --pairs 20  # the first of these

The recipe is MMScale's 7B model (recipes/whatif/papers/mmscale_7b.yaml) with its batch, `disaggregated`. A row says how
many searches found a plan, how many of these were faster by more than 1%, and the worst. Run it in the root of a
checkout.
"""

import gc
import sys
import time
from itertools import product

import numpy as np

from scripts.measurements import arguments, start
from tests.planning.fixed_sizes import (
    CLOSE,
    LARGE_BATCH,
    LARGE_RECIPE,
    LARGE_SIZES,
    Degrees,
    large_degrees,
    least_step,
    problem_of,
    steps_of_fixed,
)


def draws(num_ranks: int, num_pairs: int | None) -> list[Degrees]:
    """Return all single degrees, or this many pairs of degrees."""
    single = large_degrees(num_ranks)
    if num_pairs is None:
        return [dict([degree]) for degree in single]
    pairs = [pair for pair in product(single, single) if pair[0][0] < pair[1][0]]
    return [dict(pairs[i]) for i in np.random.default_rng(num_ranks).permutation(len(pairs))[:num_pairs]]


def name(fixed: Degrees) -> str:
    """Name fixed degrees as a recipe does."""
    return ", ".join(f"{unit}.{degree}={size}" for (unit, degree), size in fixed.items()) or "-"


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=LARGE_SIZES)
    parser.add_argument("--pairs", type=int, help="pairs of degrees for each number of GPUs; without, single degrees")
    options = parser.parse_args()
    gc.disable()  # as `mmtrain plan` does
    report = start("Fixed degrees against the free search", options)
    report.table(
        "GPUs", "free step, s", "searches", "with a plan", "faster by over 1%", "least / free", "of", "search, s"
    )
    for num_ranks in options.ranks:
        case = LARGE_RECIPE, "disaggregated", num_ranks, LARGE_BATCH
        start_s = time.process_time()
        free_s = least_step("disaggregated", problem_of(*case, {}))
        chosen = draws(num_ranks, options.pairs)
        steps = [step for step in steps_of_fixed(*case, chosen) if step[1] < float("inf")]
        least, least_s = min(steps, key=lambda step: step[1], default=({}, float("inf")))
        num_faster = sum(step_s * CLOSE < free_s for _, step_s in steps)
        mean_s = (time.process_time() - start_s) / (1 + len(chosen))
        ratio = f"{least_s / free_s:.4f}"
        report.row(num_ranks, f"{free_s:.4g}", len(chosen), len(steps), num_faster, ratio, name(least), f"{mean_s:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
