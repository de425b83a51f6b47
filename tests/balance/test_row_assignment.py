"""Rows of groups spread over replicas: near the best that trying everything finds, and the same on every machine."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import IntArray, dist_ratio
from mmtrain.balance.assign import longest_first
from mmtrain.balance.row_assignment import _longest_to_least_loaded, assign_rows

TILES_AND_TOKENS = np.array([0.8, 0.2])


def replica_loads(loads: IntArray, num_replicas: int, num_rows: int, weights: np.ndarray) -> IntArray:
    """Return (R, q) what each replica has after `assign_rows`, which must give it one group of every row."""
    replica, row = assign_rows(loads, weights, num_replicas, num_rows)
    assert sorted(zip(row.tolist(), replica.tolist(), strict=True)) == list(
        product(range(num_rows), range(num_replicas))
    )
    totals = np.zeros((num_replicas, loads.shape[1]), dtype=np.int64)
    np.add.at(totals, replica, loads)
    return totals


def squares(totals: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted squares of what replicas (R, q) have beyond the mean, in shares of the mean."""
    mean = totals.mean(axis=0)
    return float((weights * ((totals - mean) / mean) ** 2).sum())


def test_three_replicas_come_near_the_best_of_all_assignments() -> None:
    num_replicas, num_rows = 3, 4
    orders = [list(order) for order in permutations(range(num_replicas))]
    excess = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        loads = np.stack([rng.integers(1, 40, 12), rng.integers(500, 4097, 12)], axis=1)
        rows = loads.reshape(num_rows, num_replicas, 2)
        best = min(
            squares(sum(row[order] for row, order in zip(rows[1:], chosen, strict=True)) + rows[0], TILES_AND_TOKENS)
            for chosen in product(orders, repeat=num_rows - 1)
        )
        found = squares(replica_loads(loads, num_replicas, num_rows, TILES_AND_TOKENS), TILES_AND_TOKENS)
        excess.append(np.sqrt(found) - np.sqrt(best))
    assert np.median(excess) < 1e-9, "mostly the best there is"
    assert np.mean(excess) < 0.01


def uneven_groups(num_groups: int) -> IntArray:
    """Return (G, 2) tiles and tokens of groups, those with few tiles first, as `match_step` orders them."""
    rng = np.random.default_rng(num_groups)
    tiles = np.sort(rng.choice([0, 5, 7, 9, 10, 13, 24, 32], num_groups))
    return np.stack([tiles, rng.integers(3000, 4097, num_groups)], axis=1)


def test_tiles_are_as_even_as_with_the_longest_groups_first() -> None:
    """A replica has one group of every row here, and longest processing time first may give it any."""
    loads = uneven_groups(64)
    waiting = dist_ratio(replica_loads(loads, 8, 8, TILES_AND_TOKENS)[None])
    tiles = np.sort(loads[:, 0])[::-1]
    of_bins = np.bincount(longest_first(tiles.tolist(), 8), tiles, 8)
    assert waiting[0] <= dist_ratio(of_bins[None, :, None])[0] + 0.005, "a tile of 200"
    assert waiting[1] < 0.01


@pytest.mark.parametrize(("num_replicas", "num_rows"), [(8, 8), (64, 8), (4, 20), (3, 70)])
def test_exchanges_bring_replicas_nearer_to_each_other(num_replicas: int, num_rows: int) -> None:
    loads = uneven_groups(num_replicas * num_rows)
    size = (loads / loads.mean(axis=0) * TILES_AND_TOKENS).sum(axis=1)
    dealt = _longest_to_least_loaded(size.reshape(num_rows, num_replicas))
    before = squares(loads[dealt].sum(axis=0), TILES_AND_TOKENS)
    after = squares(replica_loads(loads, num_replicas, num_rows, TILES_AND_TOKENS), TILES_AND_TOKENS)
    assert after < before / 2


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_every_replica_has_one_group_of_each_row(seed: int, num_replicas: int, num_rows: int, num_loads: int) -> None:
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, 5, (num_replicas * num_rows, num_loads))
    totals = replica_loads(loads, num_replicas, num_rows, np.ones(num_loads))
    assert totals.sum(axis=0).tolist() == loads.sum(axis=0).tolist()


def test_equal_groups_stay_where_the_stream_has_them() -> None:
    replica, row = assign_rows(np.full((12, 1), 7), np.ones(1), num_replicas=4, num_rows=3)
    assert replica.tolist() == [0, 1, 2, 3] * 3
    assert row.tolist() == [0] * 4 + [1] * 4 + [2] * 4
