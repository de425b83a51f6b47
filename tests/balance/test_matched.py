"""Matched grouping: tight packing in a shuffled window, steps without a modality, and even steps."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import SampleGroups, dist_ratio, max_over_mean
from mmtrain.balance.local_search import CANDIDATES_PER_GROUP, SearchObjective, local_search
from mmtrain.balance.modality_free_steps import form_modality_free_steps
from mmtrain.balance.slack_packing import pack_with_slack
from tests.balance.matched_epoch import group_matched, sizes_for


@given(st.integers(0, 10_000), st.integers(0, 90), st.integers(1, 3), st.integers(1, 5), st.integers(5, 40))
def test_every_sample_once_within_budgets_and_window(seed: int, n: int, m: int, replicas: int, window: int) -> None:
    rng = np.random.default_rng(seed)
    budgets = rng.integers(12, 40, m)
    tokens = rng.integers(0, 12, (n, m))
    order = rng.permutation(n)

    groups, again = (
        group_matched(sizes_for(tokens, budgets, np.eye(m)), order, window, replicas, np.random.default_rng(seed))
        for _ in range(2)
    )

    assert sorted(groups.samples.tolist()) == list(range(n))
    assert (groups.sizes > 0).all()
    assert (groups.loads(tokens) <= budgets).all()
    place = np.empty(n, dtype=np.int64)
    place[order] = np.arange(n)
    assert (np.abs(place[groups.samples] - np.arange(n)) < window).all()
    assert groups.samples.tolist() == again.samples.tolist()
    assert groups.first.tolist() == again.first.tolist()


def _mixture(n: int, shares: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25)) -> np.ndarray:
    """Make LLM tokens and image tiles of texts and of images of three kinds."""
    rng = np.random.default_rng(0)
    tiles = rng.choice([0, 1, 3, 5], n, p=shares)
    text = np.where(tiles > 0, rng.integers(40, 300, n), np.clip(rng.lognormal(5.5, 1, n), 16, 4000).astype(int))
    return np.stack([256 * tiles + text, tiles], axis=1)


def test_steps_are_full_and_even_on_a_mixture() -> None:
    tokens = _mixture(20_000)
    budgets = np.array([4096, 64])
    order = np.random.default_rng(1).permutation(20_000)
    apart, cost = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[1.0, 300.0]])
    groups = group_matched(sizes_for(tokens, budgets, apart), order, 8192, 8, np.random.default_rng(2))
    loads = groups.loads(tokens)
    assert loads[:, 0].mean() > 0.98 * 4096
    token_ratio, tile_ratio = dist_ratio(loads[: len(loads) // 8 * 8].reshape(-1, 8, 2))
    assert token_ratio < 0.003
    assert tile_ratio < 0.01
    loads = group_matched(sizes_for(tokens, budgets, cost), order, 8192, 8, np.random.default_rng(2)).loads(tokens)
    assert max_over_mean((loads @ cost[0])[: len(loads) // 8 * 8].reshape(-1, 8)) < 1.003


@given(st.integers(0, 10_000), st.integers(2, 8))
def test_groups_without_a_modality_come_to_fill_whole_steps(seed: int, replicas: int) -> None:
    rng = np.random.default_rng(seed)
    num = 24
    budgets = np.array([100, 8])
    sizes = rng.integers(1, 4, num)
    first = np.concatenate([[0], np.cumsum(sizes)])
    tiles = np.where(rng.random(first[-1]) < 0.5, 0, rng.integers(1, 3, first[-1]))
    tokens = np.stack([5 * tiles + rng.integers(8, 20, first[-1]), tiles], axis=1)
    groups = SampleGroups(first, rng.permutation(first[-1]))

    after = form_modality_free_steps(groups, tokens, budgets, tokens[:, 1].astype(float), replicas)

    assert after.first.tolist() == groups.first.tolist()
    assert sorted(after.samples.tolist()) == sorted(groups.samples.tolist())
    num_free, num_free_after = ((g.loads(tokens)[:, 1] == 0).sum() for g in (groups, after))
    assert num_free_after % replicas == 0 or after.samples.tolist() == groups.samples.tolist()
    assert num_free <= num_free_after < num_free + replicas
    over = groups.loads(tokens) > budgets
    assert (after.loads(tokens)[~over] <= np.broadcast_to(budgets, over.shape)[~over]).all()


def test_some_windows_more_have_whole_steps_without_a_modality() -> None:
    tokens = _mixture(16_384, (0.7, 0.2, 0.05, 0.05))
    budgets = np.array([4096, 64])
    num_loose: list[tuple[int, int]] = []  # groups without tiles outside whole steps of 16, before and after
    for window in np.split(np.random.default_rng(1).permutation(16_384), 8):
        groups = pack_with_slack(tokens, budgets, window)
        cleared = form_modality_free_steps(groups, tokens, budgets, tokens[:, 1].astype(float), 16)
        before, after = (int((g.loads(tokens)[:, 1] == 0).sum()) % 16 for g in (groups, cleared))
        num_loose.append((before, after))
    assert sum(after == 0 for _, after in num_loose) > sum(before == 0 for before, _ in num_loose)
    assert all(after in (0, before) for before, after in num_loose)


def test_steps_come_in_no_order_of_size() -> None:
    tokens = _mixture(20_000)
    sizes = sizes_for(tokens, np.array([4096, 64]), np.array([[0.0, 1.0], [1.0, 0.0]]))
    order = np.random.default_rng(1).permutation(20_000)
    groups = group_matched(sizes, order, 20_000, 8, np.random.default_rng(2))
    tiles = groups.loads(tokens)[:, 1]
    assert abs(np.corrcoef(np.arange(len(tiles)), tiles)[0, 1]) < 0.15


def test_a_sample_above_the_budget_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="above a budget"):
        pack_with_slack(np.array([[11]]), np.array([10]), np.array([0]))


@given(st.integers(0, 10_000), st.integers(2, 3), st.integers(1, 2))
def test_local_search_never_worsens_a_step_and_loses_no_sample(seed: int, replicas: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 4, (4, replicas))
    n = int(counts.sum())
    sizes = np.concatenate([rng.integers(0, 20, (n, m)), np.zeros((1, m), dtype=np.int64)]).astype(np.float64)
    members = np.full((4, replicas, CANDIDATES_PER_GROUP), n)
    members[np.arange(CANDIDATES_PER_GROUP) < counts[..., None]] = np.arange(n)
    objective = SearchObjective(sizes, np.full(m, 60), np.eye(m), np.ones(m))

    after = local_search(members, objective, 40)

    for before, improved in zip(members, after, strict=True):
        assert sorted(before.ravel().tolist()) == sorted(improved.ravel().tolist()), "samples stay in their step"
        assert ((improved != n).sum(axis=1) > 0).all()
        loads_before = sizes[before].sum(axis=1)
        loads_improved = sizes[improved].sum(axis=1)
        scale = np.maximum(loads_before.mean(axis=0), 1)
        assert (loads_improved.max(axis=0) / scale).sum() <= (loads_before.max(axis=0) / scale).sum() + 1e-9
        assert (loads_improved <= 60).all()


@given(st.lists(st.integers(1, 30), min_size=4, max_size=7))
def test_local_search_of_two_groups_is_near_the_best_split(sizes: list[int]) -> None:
    n = len(sizes)
    padded = np.array([*sizes, 0], dtype=np.float64)[:, None]
    members = np.full((1, 2, CANDIDATES_PER_GROUP), n)
    members[0, 0, : n - 1], members[0, 1, 0] = np.arange(n - 1), n - 1
    after = local_search(members, SearchObjective(padded, np.array([1000]), np.eye(1), np.ones(1)), 30)
    best = min(max(sum(part), sum(sizes) - sum(part)) for k in range(1, n) for part in itertools.combinations(sizes, k))
    assert padded[after[0]].sum(axis=1).max() <= 1.2 * best
