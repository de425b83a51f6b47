"""Spread rows of groups over the replicas of a step: one group of every row each, and equal loads in all."""

from itertools import combinations

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray

# Of a pair of replicas, all ways to exchange groups are tried up to this many rows; beyond, exchanges of one or two
# rows, which are as many ways for a few dozen rows.
MAX_ROWS_IN_ALL_WAYS = 8
MAX_ROWS_IN_PAIRS = 64
# Of meetings of all replicas in pairs; not tuned: it bounds the time of large steps.
ROUNDS = 24
PAIRS_AT_A_TIME = 64  # their arrays fit into a core's cache


def assign_rows(
    group_loads: IntArray, weights: FloatArray, num_replicas: int, num_rows: int
) -> tuple[IntArray, IntArray]:
    """Return (G,) the replica and (G,) the row of each group, such that the loads of all replicas are nearly equal.

    group_loads: (G, q) whole numbers; each run of `num_replicas` groups is a row, of which every replica gets one.
    weights: (q,) what a share of each load's mean counts. Raises ValueError unless rows and replicas make up G.

    First the groups of a row go to the replicas one by one, the heaviest to the one with the least load (MMScale's
    reordering across replicas, arXiv 2408.04275), rows of uneven groups before rows of even ones. Then pairs of
    replicas exchange their groups of some rows: those with which both are nearest to each other in all loads.
    """
    num_groups = num_replicas * num_rows
    if len(group_loads) != num_groups:
        raise ValueError(f"{len(group_loads)} groups for {num_replicas} replicas of {num_rows} microbatches")
    mean = np.maximum(group_loads.mean(axis=0), 1.0)
    size = np.zeros(num_groups)
    for column, weight in zip((group_loads / mean).T, weights.tolist(), strict=True):
        size += weight * column
    group = _longest_to_least_loaded(size.reshape(num_rows, num_replicas))
    if num_rows > 1 and num_replicas > 1:
        scale = weights / mean**2
        group = _exchange(group, group_loads.astype(np.float64), scale)
    replica = np.empty(num_groups, dtype=np.int64)
    replica[group] = np.arange(num_replicas)
    return replica, np.repeat(np.arange(num_rows, dtype=np.int64), num_replicas)


def _longest_to_least_loaded(size: FloatArray) -> IntArray:
    """Return (rows, R) the group that each replica gets of each row; size: (rows, R) of groups."""
    num_replicas = size.shape[1]
    group = np.empty(size.shape, dtype=np.int64)
    loads = np.zeros(num_replicas)
    spread = size.max(axis=1) - size.min(axis=1)
    for row in np.argsort(-spread, kind="stable").tolist():
        least_loaded = np.argsort(loads, kind="stable")
        group[row, least_loaded] = row * num_replicas + np.argsort(-size[row], kind="stable")
        loads += size.ravel()[group[row]]
    return group


def _exchange(group: IntArray, group_loads: FloatArray, scale: FloatArray) -> IntArray:
    """Return (rows, R) groups of replicas after exchanges that lower the sum of `scale` (q,) times squared loads.

    In every round each replica meets another one. Loads are whole numbers, so that their sums are exact: machines that
    add up in another order make the same exchanges.
    """
    group = group.copy()
    num_rows, num_replicas = group.shape
    ways = _ways_to_exchange(num_rows)
    num_loads = group_loads.shape[1]
    num_idle = 0  # rounds without an exchange
    for turn in range(ROUNDS):
        shift, load = divmod(turn, num_loads)
        ascending = np.argsort(group_loads[group, load].sum(axis=0), kind="stable")
        low, high = _meeting(num_replicas, shift)
        is_made = False
        for start in range(0, len(low), PAIRS_AT_A_TIME):
            some = slice(start, start + PAIRS_AT_A_TIME)
            is_made |= _exchange_pairs(group, group_loads, scale, (ascending[high[some]], ascending[low[some]]), ways)
        num_idle = 0 if is_made else num_idle + 1
        if num_idle == num_replicas * num_loads:  # every replica has met every other
            break
    return group


def _meeting(num_replicas: int, shift: int) -> tuple[IntArray, IntArray]:
    """Return the pairs (P,) of places that meet: at first the lowest with the highest; in as many shifts, all pairs."""
    places = np.arange(num_replicas)
    partners = (num_replicas - 1 + shift - places) % num_replicas
    low = np.flatnonzero(places < partners)
    return low, partners[low]


def _exchange_pairs(
    group: IntArray, group_loads: FloatArray, scale: FloatArray, pairs: tuple[IntArray, IntArray], ways: FloatArray
) -> bool:
    """Make the best exchange of each pair of replicas in `group` (rows, R); return whether there was any."""
    high, low = pairs
    difference = group_loads[group[:, high]] - group_loads[group[:, low]]  # (rows, P, q)
    squares = np.zeros((len(ways), len(high)))
    for load, factor in enumerate(scale.tolist()):
        squares += factor * (ways @ difference[:, :, load]) ** 2
    best = squares.argmin(axis=0)
    is_better = squares[best, np.arange(len(high))] < squares[0]
    if not is_better.any():
        return False
    high, low = high[is_better], low[is_better]
    is_exchanged = ways[best[is_better]].T < 0
    of_high, of_low = group[:, high], group[:, low]
    group[:, high] = np.where(is_exchanged, of_low, of_high)
    group[:, low] = np.where(is_exchanged, of_high, of_low)
    return True


def _ways_to_exchange(num_rows: int) -> FloatArray:
    """Return (ways, rows) of 1 and, in rows whose groups two replicas exchange, -1; the first way exchanges nothing."""
    if num_rows <= MAX_ROWS_IN_ALL_WAYS:
        bits = np.arange(2 ** (num_rows - 1))[:, None] >> np.arange(num_rows)  # all rows exchanged change nothing
        return np.where(bits & 1, -1.0, 1.0)
    rows = range(num_rows)
    exchanged: list[tuple[int, ...]] = [(), *((row,) for row in rows)]
    if num_rows <= MAX_ROWS_IN_PAIRS:
        exchanged += combinations(rows, 2)
    ways: FloatArray = np.ones((len(exchanged), num_rows))
    for way, chosen in zip(ways, exchanged, strict=True):
        way[list(chosen)] = -1
    return ways
