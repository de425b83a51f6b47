"""Steps drawn at random and matched inside: as random as chance, every sample kept, rows of alike groups."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import dist_ratio
from mmtrain.balance.even_groups import match_step
from mmtrain.balance.local_search import CANDIDATES_PER_GROUP, SearchObjective
from mmtrain.balance.pair_exchange import exchange_in_pairs
from mmtrain.balance.row_targets import order_rows, row_targets
from mmtrain.balance.step_matching import draw_steps


@pytest.mark.parametrize("step_size", [8, 48, 64])
def test_steps_vary_as_chance_would_make_them_and_divide_evenly(step_size: int) -> None:
    rng = np.random.default_rng(0)
    tiles = np.clip(rng.normal(12, 3, 64 * step_size).round(), 0, 20).astype(np.int64)
    steps = [
        tiles[draw_steps(1024 * tiles, step_size, 0, np.random.default_rng(seed))].reshape(-1, step_size)
        for seed in range(20)
    ]
    means = np.stack(steps).mean(axis=2)
    assert 0.8 < means.var() / (tiles.var() / step_size) < 1.2
    divisor = {8: 4, 48: 16, 64: 16}[step_size]
    assert (np.stack(steps).sum(axis=2) % divisor == 0).mean() > 0.95


@given(st.integers(0, 1000), st.integers(0, 40), st.integers(1, 12), st.integers(0, 30))
def test_every_group_is_in_one_step(seed: int, num_groups: int, step_size: int, num_before: int) -> None:
    load = np.random.default_rng(seed).integers(0, 6, num_groups)
    order = draw_steps(load, step_size, num_before, np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(num_groups))


@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2**30]))
def test_matching_keeps_samples_and_budgets(seed: int, num_rows: int, num_replicas: int, cost: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, num_rows * num_replicas)
    samples = rng.permutation(int(sizes.sum()))
    groups = np.split(samples, np.cumsum(sizes)[:-1])
    tokens = np.stack([rng.integers(1, 12, len(samples)), rng.integers(0, 4, len(samples))], axis=1)
    loads = tokens[:, ::-1] * cost
    matched, again = (match_step(groups, tokens, np.array([48, 12]), loads, [0.7, 0.3], num_replicas) for _ in range(2))
    assert [group.tolist() for group in matched] == [group.tolist() for group in again]
    assert len(matched) == len(groups)
    assert all(len(group) for group in matched)
    assert sorted(np.concatenate(matched).tolist()) == sorted(samples.tolist())
    tokens_of_sample = tokens[np.argsort(samples)]
    assert all((tokens_of_sample[group].sum(axis=0) <= [48, 12]).all() for group in matched)


def test_rows_of_a_random_step_are_alike() -> None:
    rng = np.random.default_rng(1)
    tiles = rng.choice([0, 1, 3, 5, 7], 64 * 5, p=[0.48, 0.1, 0.08, 0.2, 0.14])
    tokens = np.stack([256 * tiles + rng.integers(40, 300, len(tiles)), tiles], axis=1)
    groups = np.split(np.arange(len(tiles)), 64)
    budgets = np.array([int(max(tokens[group, 0].sum() for group in groups)), 1000])
    matched = match_step(groups, tokens, budgets, tokens[:, ::-1], [0.7, 0.3], 8)
    before, after = (
        dist_ratio(np.stack([tokens[group].sum(axis=0) for group in step]).reshape(8, 8, 2))
        for step in (groups, matched)
    )
    assert (after < [0.01, 0.02]).all()
    assert (before > [0.1, 0.3]).all()


@given(st.integers(0, 10_000))
def test_a_round_makes_the_best_exchange_of_a_pair(seed: int) -> None:
    """Compare with every exchange of at most two samples each way."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 9, (6, 2)).astype(np.float64)
    padded = np.concatenate([sizes, np.zeros((1, 2))])
    members = np.full((1, 2, CANDIDATES_PER_GROUP), 6)
    members[0, 0, :3], members[0, 1, :3] = [0, 1, 2], [3, 4, 5]
    objective = SearchObjective(padded, np.array([22, 1000]), np.eye(2), np.array([0.7, 0.3]))
    mean = np.maximum(sizes.sum(axis=0) / 2, 1e-9)

    def squares(groups: list[list[int]]) -> float:
        loads = np.stack([sizes[group].sum(axis=0) for group in groups])
        return float((((loads - mean) / mean) ** 2 @ objective.weights).sum())

    first, second = [0, 1, 2], [3, 4, 5]
    offers = [[list(c) for k in range(3) for c in itertools.combinations(group, k)] for group in (first, second)]
    best = squares([first, second])
    for giving, taking in itertools.product(*offers):
        after = [
            [*(s for s in first if s not in giving), *taking],
            [*(s for s in second if s not in taking), *giving],
        ]
        if all(sizes[group, 0].sum() <= 22 for group in after):
            best = min(best, squares(after))
    exchanged = exchange_in_pairs(members, objective, 1)[0]
    assert squares([group[group < 6].tolist() for group in exchanged]) == pytest.approx(best, abs=1e-6)


def test_a_row_with_a_text_that_fills_a_group_gets_few_images() -> None:
    load = np.repeat([0, 5, 4], [16, 20, 1])  # of samples
    tokens = np.repeat([300, 100, 4000], [16, 20, 1])
    group_load = np.array([0, 5, 8, 12, 13, 14, 24, 24])
    targets = row_targets(group_load, load, tokens, 2)
    assert targets.tolist() == np.sort(targets).tolist()
    assert (targets[::2] == targets[1::2]).all()
    assert targets[0] < targets[2]


def test_rows_divide_evenly_where_groups_of_one_more_image_permit() -> None:
    counts = np.repeat([3, 4, 5], [5, 6, 5])
    order = order_rows(1024 * counts[:, None], 1024, 4)
    assert sorted(order.tolist()) == list(range(16))
    assert (counts[order].reshape(4, 4).sum(axis=1) % 4 == 0).all()
