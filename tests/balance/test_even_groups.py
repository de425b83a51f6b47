"""Exchange samples between the groups of a step: no sample is lost, no group overflows, no step gets worse."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import BalancedLoad, IntArray, ItemLengths, SampleLengths, SequenceCost, StepTargets
from mmtrain.balance.even_groups import even_out_groups
from mmtrain.balance.imbalance import sample_above_mean_load
from mmtrain.balance.step_targets import SampleWork


def _imbalance(groups: list[IntArray], loads: np.ndarray, weights: list[float], replicas: int) -> list[float]:
    """Return for each run of `replicas` groups the weighted sum of largest over mean loads; loads by sample number."""
    sums = np.array([loads[group].sum(axis=0) for group in groups]).reshape(-1, replicas, loads.shape[1])
    mean = sums.mean(axis=1)
    shares = np.divide(sums.max(axis=1), mean, out=np.zeros_like(mean), where=mean > 0)
    imbalance: list[float] = (shares @ np.array(weights)).tolist()
    return imbalance


@given(
    st.integers(0, 10_000), st.sampled_from([2, 3, 5]), st.integers(1, 4), st.integers(1, 3), st.sampled_from([3, 12])
)
def test_no_run_gets_worse_and_no_sample_leaves_it(seed: int, replicas: int, runs: int, q: int, max_size: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, max_size, replicas * runs)
    numbers = rng.permutation(3 * sizes.sum())[: sizes.sum()]  # sample numbers are not positions
    groups = np.split(numbers, np.cumsum(sizes)[:-1])
    tokens, loads = rng.integers(1, 20, (3 * sizes.sum(), 2)), rng.integers(0, 50, (3 * sizes.sum(), q))
    budgets = np.max([tokens[group].sum(axis=0) for group in groups], axis=0)
    weights = rng.random(q).tolist()
    order = np.concatenate(groups)
    balanced = even_out_groups(groups, tokens[order], budgets, loads[order], weights, replicas)
    assert all(len(group) and (tokens[group].sum(axis=0) <= budgets).all() for group in balanced)
    for lo in range(0, len(groups), replicas):
        before, after = (np.sort(np.concatenate(part[lo : lo + replicas])).tolist() for part in (groups, balanced))
        assert before == after
    for before, after in zip(*(_imbalance(part, loads, weights, replicas) for part in (groups, balanced)), strict=True):
        assert after <= before + 1e-9
    again = even_out_groups(groups, tokens[order], budgets, loads[order], weights, replicas)
    assert all(np.array_equal(a, b) for a, b in zip(balanced, again, strict=True))


@given(st.lists(st.integers(1, 30), min_size=6, max_size=8), st.integers(0, 100))
def test_three_groups_come_near_the_best_partition(costs: list[int], seed: int) -> None:
    loads = np.array(costs)[:, None]
    best = min(
        max(np.bincount(choice, weights=costs, minlength=3))
        for choice in itertools.product(range(3), repeat=len(costs))
        if len(set(choice)) == 3
    )
    order = np.random.default_rng(seed).permutation(len(costs))
    groups = [order[:2], order[2:4], order[4:]]
    balanced = even_out_groups(groups, np.ones_like(loads)[order], np.array([9]), loads[order], [1.0], 3)
    assert max(loads[group].sum() for group in balanced) <= 1.12 * best + 1


def test_groups_stay_without_a_second_replica_or_a_load() -> None:
    groups = [np.array([4, 1]), np.array([2])]
    ones = np.ones((3, 1), dtype=np.int64)
    for loads, replicas in ((ones, 1), (ones[:, :0], 2)):
        balanced = even_out_groups(groups, ones, np.array([5]), loads, [1.0] * loads.shape[1], replicas)
        assert [group.tolist() for group in balanced] == [[4, 1], [2]]


def make_lengths(rng: np.random.Generator, n: int) -> SampleLengths:
    counts = rng.integers(0, 4, n)
    sizes = rng.integers(1, 30, counts.sum())
    first = np.concatenate([[0], np.cumsum(counts)])
    tokens = rng.integers(1, 99, n)
    return SampleLengths(tokens, tokens, {"vision": ItemLengths(first, sizes, np.ones_like(sizes), sizes, sizes)})


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_sample_work_applies_costs_to_samples_and_their_items(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = make_lengths(rng, n)
    items = lengths.items["vision"]
    samples = rng.integers(0, n, 2 * n)  # some twice, some never
    llm, vision = SequenceCost(3, 2), SequenceCost(7, 1)
    targets = StepTargets((BalancedLoad({"vision": vision}), BalancedLoad({"llm": llm, "vision": vision})))
    loads = SampleWork(lengths, samples).loads(targets)
    for sample, (alone, summed) in zip(samples.tolist(), loads.tolist(), strict=True):
        sizes = items.tokens[items.first[sample] : items.first[sample + 1]].tolist()
        assert alone == sum(7 * size + size**2 for size in sizes)
        text = int(lengths.tokens[sample])
        assert summed == alone + 3 * text + 2 * text**2


@pytest.mark.parametrize(
    ("loads", "replicas", "expected"),
    [
        ([[5], [1], [1], [1]], 2, (0, 1.25)),  # the mean is 4
        ([[4], [2], [1], [1]], 2, None),  # as much as the mean is no obstacle
        ([[1, 0], [1, 9], [1, 1]], 2, (1, 1.8)),  # in the second load
        ([[0], [0]], 2, None),
        ([[3]], 1, None),
    ],
)
def test_the_sample_that_keeps_a_step_uneven_is_balanced(
    loads: list[list[int]], replicas: int, expected: tuple[int, float] | None
) -> None:
    assert sample_above_mean_load(np.array(loads), replicas) == expected
    assert sample_above_mean_load(np.zeros((3, 0), dtype=np.int64), 2) is None
