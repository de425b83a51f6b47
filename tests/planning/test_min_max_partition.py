"""The exact partition against exhaustive search."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.planning.layer_costs.min_max_partition import min_max_partition, min_max_span_partition

COSTS = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9)


def all_partitions(num_layers: int, num_chunks: int) -> list[tuple[int, ...]]:
    return [(0, *bounds, num_layers) for bounds in combinations(range(1, num_layers), num_chunks - 1)]


def objective(costs: list[float], bounds: tuple[int, ...]) -> tuple[float, float]:
    runs = [sum(costs[lo:hi]) for lo, hi in pairwise(bounds)]
    return max(runs), sum(run**2 for run in runs)


@given(COSTS, st.integers(1, 9))
def test_no_partition_is_better(costs: list[float], parts: int) -> None:
    partition = min_max_partition(costs, parts)
    if parts > len(costs):
        assert partition is None
        return
    assert partition is not None
    assert objective(costs, partition) == pytest.approx(
        min(objective(costs, cuts) for cuts in all_partitions(len(costs), parts))
    )


@given(COSTS.filter(lambda c: len(c) > 1), st.integers(1, 4), st.randoms(use_true_random=False))
def test_only_allowed_partitions_are_returned(costs: list[float], parts: int, random: "np.random.RandomState") -> None:
    size = len(costs) + 1
    allowed = np.array([[[random.random() < 0.6 for _ in range(size)] for _ in range(size)] for _ in range(parts)])
    fitting = [
        cuts
        for cuts in (all_partitions(len(costs), parts) if parts <= len(costs) else [])
        if all(allowed[p, lo, hi] for p, (lo, hi) in enumerate(pairwise(cuts)))
    ]
    partition = min_max_partition(costs, parts, allowed)
    if not fitting:
        assert partition is None
    else:
        assert partition in fitting
        assert objective(costs, partition) == pytest.approx(min(objective(costs, cuts) for cuts in fitting))


@given(COSTS, COSTS, st.integers(1, 5))
def test_other_costs_may_be_evened(costs: list[float], evened: list[float], parts: int) -> None:
    """Of the partitions whose most expensive run costs least, return one with least squares of the other costs."""
    size = min(len(costs), len(evened))
    costs, evened = costs[:size], evened[:size]
    spans = [
        np.array([[sum(values[lo:hi]) for hi in range(size + 1)] for lo in range(size + 1)])
        for values in (costs, evened)
    ]
    partition = min_max_span_partition(spans[0][None], parts, evened=spans[1][None])
    if parts > size:
        assert partition is None
        return
    assert partition is not None

    def rank(cuts: tuple[int, ...]) -> tuple[float, float]:
        return objective(costs, cuts)[0], objective(evened, cuts)[1]

    assert rank(partition) == min(map(rank, all_partitions(size, parts)))
