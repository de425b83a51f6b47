"""The exact partition against every partition there is."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.plan.search.min_max_partition import min_max_partition

COSTS = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9)


def every_partition(num_layers: int, parts: int) -> list[tuple[int, ...]]:
    return [(0, *cuts, num_layers) for cuts in combinations(range(1, num_layers), parts - 1)]


def worth(costs: list[float], cuts: tuple[int, ...]) -> tuple[float, float]:
    runs = [sum(costs[lo:hi]) for lo, hi in pairwise(cuts)]
    return max(runs), sum(run**2 for run in runs)


@given(COSTS, st.integers(1, 9))
def test_no_partition_is_better(costs: list[float], parts: int) -> None:
    found = min_max_partition(costs, parts)
    if parts > len(costs):
        assert found is None
        return
    assert found is not None
    assert worth(costs, found) == pytest.approx(min(worth(costs, cuts) for cuts in every_partition(len(costs), parts)))


@given(COSTS.filter(lambda c: len(c) > 1), st.integers(1, 4), st.randoms(use_true_random=False))
def test_what_is_not_allowed_is_not_done(costs: list[float], parts: int, random: "np.random.RandomState") -> None:
    size = len(costs) + 1
    allowed = np.array([[[random.random() < 0.6 for _ in range(size)] for _ in range(size)] for _ in range(parts)])
    fitting = [
        cuts
        for cuts in (every_partition(len(costs), parts) if parts <= len(costs) else [])
        if all(allowed[p, lo, hi] for p, (lo, hi) in enumerate(pairwise(cuts)))
    ]
    found = min_max_partition(costs, parts, allowed)
    if not fitting:
        assert found is None
    else:
        assert found in fitting
        assert worth(costs, found) == pytest.approx(min(worth(costs, cuts) for cuts in fitting))
