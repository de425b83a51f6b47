"""The imbalance metrics against their formulas, and the bound against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import SampleGroups, dist_ratio, max_over_mean, pad_ratio
from mmtrain.balance.grouping.imbalance import imbalance_bound, sample_above_mean_load


def test_padding_of_two_mini_batches_by_hand() -> None:
    lengths = np.array([10, 5, 4, 4])
    groups = SampleGroups(np.array([0, 2, 4]), np.array([0, 1, 2, 3]))
    assert pad_ratio(lengths, groups) == pytest.approx((5 / 20 + 0) / 2)


@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_ratios_follow_their_formulas(seed: int, steps: int, replicas: int, modalities: int) -> None:
    loads = np.random.default_rng(seed).integers(0, 5, (steps, replicas, modalities))
    for j, ratio in enumerate(dist_ratio(loads)):
        ratios = []
        for step in loads[:, :, j].tolist():
            largest = max(step)
            ratios.append(sum(largest - load for load in step) / (largest * replicas) if largest else 0.0)
        assert ratio == pytest.approx(sum(ratios) / steps)
    summed = loads.sum(axis=2)
    expected = [max(step) / (sum(step) / replicas) if any(step) else 1.0 for step in summed.tolist()]
    assert max_over_mean(summed) == pytest.approx(np.mean(expected))


@given(st.integers(0, 1000), st.integers(1, 3), st.integers(1, 3))
def test_no_arrangement_of_a_step_goes_below_its_bound(seed: int, steps: int, replicas: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 3, steps * replicas)
    groups = SampleGroups(np.concatenate([[0], np.cumsum(sizes)]), rng.permutation(sizes.sum()))
    tokens = rng.choice([0, 1, 2, 9], sizes.sum())
    bound = imbalance_bound(groups, tokens, replicas)
    ratios = []
    exceeding = 0
    excess = {}
    for step in range(steps):
        members = groups.samples[groups.first[step * replicas] : groups.first[(step + 1) * replicas]]
        best = 1.0
        for choice in itertools.product(range(replicas), repeat=len(members)):
            loads = np.bincount(choice, weights=tokens[members], minlength=replicas)
            best = min(best, float(dist_ratio(loads[None, :, None])[0]))
        mean = tokens[members].sum() / replicas
        exceeding += int(tokens[members].max() > mean)
        ratios.append(best)
        excess |= {int(i): float(tokens[i] / mean) if mean else 0.0 for i in members}
    assert bound.dist_ratio <= np.mean(ratios) + 1e-9
    assert bound.steps == pytest.approx(exceeding / steps)
    assert (bound.sample is None) == (exceeding == 0)
    if bound.sample is not None:
        assert excess[bound.sample] == pytest.approx(max(excess.values()))


def test_no_groups_have_no_padding() -> None:
    none = np.empty(0, dtype=np.int64)
    assert pad_ratio(none, SampleGroups(np.zeros(1, dtype=np.int64), none)) == 0.0


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
