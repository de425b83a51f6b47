"""What the recipe fixes never makes a plan faster: the free search finds what each fixed search does.

Problems are drawn from published models on 12 to 64 GPUs, where all assignments are too many to try, and one on about a
thousand. scripts/bench_fixed_sizes.py draws pairs of degrees there.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from tests.planning.fixed_sizes import (
    CLOSE,
    LARGE_BATCH,
    LARGE_RECIPE,
    LARGE_SIZES,
    STRATEGIES,
    Degrees,
    large_degrees,
    least_step,
    problem_of,
    steps_of_fixed,
)

NUM_DRAWS = 8  # of one fixed degree, and as many of two
DEGREES = {"tp": (1, 2, 4), "pp": (1, 2, 3, 4), "dp": (1, 2, 4, 8, 12, 16)}
UNITS = {
    "internvl_26b": ("vision", "llm"),
    "qwen2_vl_7b": ("vision", "llm"),
    "mmscale_7b": ("vision", "llm", "generator"),
}


def drawn_degrees(name: str, rng: np.random.Generator) -> Iterator[Degrees]:
    """Draw some single degrees of units, and some pairs."""
    single = [((unit, degree), size) for unit in UNITS[name] for degree, sizes in DEGREES.items() for size in sizes]
    for index in rng.permutation(len(single))[:NUM_DRAWS]:
        yield dict([single[index]])
    pairs = [(first, second) for first, second in product(single, single) if first[0] < second[0]]
    for index in rng.permutation(len(pairs))[:NUM_DRAWS]:
        yield dict(pairs[index])


CASES = [(placement, seed) for placement in STRATEGIES for seed in range(20)]
MINUTES = 60  # at most, of one draw: each takes up to seventeen searches


def tier(placement: str, seed: int) -> list[pytest.MarkDecorator]:
    """Return the marks of a draw; searches of `colocated` take longer."""
    return [pytest.mark.slow if placement == "disaggregated" and seed < 2 else pytest.mark.long]


@pytest.mark.timeout(60 * MINUTES)
@pytest.mark.parametrize(
    ("placement", "seed"), [pytest.param(*case, marks=tier(*case), id=f"{case[0]}-{case[1]}") for case in CASES]
)
def test_no_fixed_degree_and_no_pair_of_them_beats_the_free_search(placement: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    name = str(rng.choice(list(UNITS)))
    num_ranks, global_batch = int(rng.choice([12, 16, 24, 32, 48, 64])), int(rng.choice([48, 64, 128]))
    free_s = least_step(placement, problem_of(name, placement, num_ranks, global_batch, {}))
    steps = steps_of_fixed(name, placement, num_ranks, global_batch, drawn_degrees(name, rng))
    missed = {str(fixed): free_s / fixed_s for fixed, fixed_s in steps if fixed_s * CLOSE < free_s}
    assert not missed, (name, num_ranks, global_batch, free_s, missed)


@pytest.mark.long
@pytest.mark.timeout(60 * MINUTES)
@pytest.mark.parametrize("num_ranks", LARGE_SIZES)
def test_no_fixed_degree_beats_the_free_search_on_a_thousand_ranks(num_ranks: int) -> None:
    case = LARGE_RECIPE, "disaggregated", num_ranks, LARGE_BATCH
    free_s = least_step("disaggregated", problem_of(*case, {}))
    steps = steps_of_fixed(*case, (dict([degree]) for degree in large_degrees(num_ranks)))
    missed = {str(fixed): free_s / fixed_s for fixed, fixed_s in steps if fixed_s * CLOSE < free_s}
    assert not missed, (free_s, missed)
