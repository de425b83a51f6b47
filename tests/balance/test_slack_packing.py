"""Packing of a window against first-fit decreasing, on lengths of many shapes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance.grouping.slack_packing import ROOMY_SLACK, SLACKS, pack_with_slack
from tests.balance.first_fit import first_fit_decreasing

BUDGET = 4096
SHAPES = {
    "heavy tail": lambda rng, n: rng.lognormal(5, 1.6, n),
    "Pareto": lambda rng, n: 30 * (1 + rng.pareto(1.1, n)),
    "two peaks": lambda rng, n: np.where(rng.random(n) < 0.5, rng.normal(300, 40, n), rng.normal(2200, 150, n)),
    "near equal": lambda rng, n: rng.normal(900, 15, n),
    "tiny": lambda rng, n: rng.integers(8, 64, n),
    "a third": lambda rng, n: rng.integers(1300, 1500, n),
    "a half": lambda rng, n: rng.integers(2000, 2060, n),
}


def _draw(shape: str, seed: int, n: int) -> np.ndarray:
    tokens: np.ndarray = np.clip(SHAPES[shape](np.random.default_rng(seed), n), 1, BUDGET).astype(np.int64)
    return tokens


def _first_fit(sizes: list[int], budget: int) -> int:
    """First-fit decreasing group by group."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [g for g, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[fitting[0]] -= size
        else:
            rooms.append(budget - size)
    return len(rooms)


@given(st.lists(st.integers(1, 50), max_size=40))
def test_first_fit_by_a_tree_is_first_fit(sizes: list[int]) -> None:
    assert first_fit_decreasing(np.array(sizes, dtype=np.int64), 50) == _first_fit(sizes, 50)


@pytest.mark.parametrize("with_images", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_window_needs_hardly_more_groups_than_first_fit_decreasing(shape: str, with_images: bool) -> None:
    tokens = _draw(shape, 0, 3000)
    images = np.arange(3000) % 5 if with_images else np.zeros(3000, dtype=np.int64)
    groups = pack_with_slack(np.stack([tokens, images], axis=1), np.array([BUDGET, 10**6]), np.arange(3000))
    num_by_size = first_fit_decreasing(tokens, BUDGET)
    assert len(groups) <= num_by_size * (1 + max(extra for _, extra in SLACKS)) + 1
    roomy = pack_with_slack(np.stack([tokens, images], axis=1), np.array([BUDGET, 10**6]), np.arange(3000), roomy=True)
    assert len(groups) <= len(roomy) <= num_by_size * (1 + ROOMY_SLACK[1]) + 1


@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 10_000), st.integers(0, 200), st.integers(1, 3))
def test_every_sample_is_packed_once_within_every_budget(shape: str, seed: int, n: int, m: int) -> None:
    tokens = np.stack([_draw(shape, seed + column, n) for column in range(m)], axis=1)
    budgets = np.full(m, BUDGET)
    groups = pack_with_slack(tokens, budgets, np.random.default_rng(seed).permutation(n))
    assert sorted(groups.samples.tolist()) == list(range(n))
    assert (groups.sizes > 0).all()
    assert (groups.loads(tokens) <= budgets).all()


def test_slack_that_no_group_can_spare_is_not_taken() -> None:
    tokens = np.full((400, 1), BUDGET // 2)
    assert len(pack_with_slack(tokens, np.array([BUDGET]), np.arange(400))) == 200


def test_a_sample_above_the_budget_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="above a budget"):
        pack_with_slack(np.array([[11]]), np.array([10]), np.array([0]))
