"""Balance the groups of one step for the replicas of a plan by exchanging samples between them."""

from collections.abc import Sequence

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.local_search import (
    CANDIDATES_PER_GROUP,
    SearchObjective,
    local_search,
    num_search_rounds,
)
from mmtrain.balance.pair_exchange import exchange_in_pairs
from mmtrain.balance.row_targets import load_unit, order_rows, row_targets
from mmtrain.balance.steps import EXTRA_SAMPLES_PER_GROUP

MIN_ROUNDS_OF_SINGLE_ROW = 128  # for each load; a single row ends by itself, among many rows it waits for the last
# For each load, measured by scripts/bench_balance.py at 8 x 8 and 64 x 8: twice as many gain a tenth.
ROUNDS_TO_MEAN = 12
ROUNDS_TO_ROW_TARGETS = 16
ROUNDS_IN_ROWS = 4
LAST_ROUNDS_IN_ROWS = 16


def even_out_groups(
    groups: Sequence[IntArray],
    tokens: IntArray,
    budgets: IntArray,
    loads: IntArray | FloatArray,
    weights: Sequence[float] | FloatArray,
    num_replicas: int,
) -> list[IntArray]:
    """Exchange samples between groups that run side by side, until their loads are as even as exchanges can make them.

    groups: sample numbers of each group of a step; replicas compute each run of `num_replicas` groups side by side, and
    no sample leaves its run. tokens (k, m) and loads (k, q) belong to the samples in the order in which `groups` name
    them. budgets: (m,) what no group may pass. weights: (q,) what a share of each load's mean counts.

    Returns groups of the same samples. The weighted sum of the largest loads over their means is in no run larger than
    before. The same arguments give the same groups.
    """
    if num_replicas < 2 or loads.shape[1] == 0:
        return list(groups)
    samples, members, objective = _as_members(groups, tokens, budgets, loads, weights)
    min_rounds = MIN_ROUNDS_OF_SINGLE_ROW * num_replicas // len(groups)
    rounds = max(num_search_rounds(num_replicas), min_rounds) * loads.shape[1]
    rows = members.reshape(-1, num_replicas, members.shape[1])
    return _as_groups(local_search(rows, objective, rounds), samples)


def match_step(
    groups: Sequence[IntArray],
    tokens: IntArray,
    budgets: IntArray,
    loads: IntArray,
    weights: Sequence[float] | FloatArray,
    num_replicas: int,
) -> list[IntArray]:
    """Exchange samples between all groups of a step, and order the groups in rows that are alike.

    Takes what `even_out_groups` takes, but samples may leave their row, and loads are whole numbers. Groups come near
    the mean of the step first. Then rows with groups that cannot get there (long texts) get targets of their own, and
    in the end samples are exchanged inside the rows.
    """
    num_loads = loads.shape[1]
    if num_loads == 0 or len(groups) < 2:
        return list(groups)
    samples, members, objective = _as_members(groups, tokens, budgets, loads, weights)
    members = exchange_in_pairs(members[None], objective, ROUNDS_TO_MEAN * num_loads)[0]
    if num_replicas < 2:
        return _as_groups(members, samples)
    unit = load_unit(loads[:, 0])
    members = members[_group_loads(members, objective)[:, 0].argsort(kind="stable")]
    group_loads = _group_loads(members, objective)
    targets = np.broadcast_to(group_loads.mean(axis=0), group_loads.shape).copy()
    targets[:, 0] = row_targets(group_loads[:, 0], loads[:, 0], tokens[:, 0], num_replicas)
    members = exchange_in_pairs(members[None], objective, ROUNDS_TO_ROW_TARGETS * num_loads, targets[None])[0]
    members = members[order_rows(_group_loads(members, objective), unit, num_replicas)]
    rows = members.reshape(-1, num_replicas, members.shape[1])
    rows = exchange_in_pairs(rows, objective, ROUNDS_IN_ROWS * num_loads)
    return _as_groups(local_search(rows, objective, LAST_ROUNDS_IN_ROWS * num_loads), samples)


def _as_members(
    groups: Sequence[IntArray],
    tokens: IntArray,
    budgets: IntArray,
    loads: IntArray | FloatArray,
    weights: Sequence[float] | FloatArray,
) -> tuple[IntArray, IntArray, SearchObjective]:
    """Return the samples (k,), the places (G, K) of each group as rows of them, and the objective of a search."""
    samples = np.concatenate(groups)
    sizes = np.array([len(group) for group in groups])
    num_places = max(int(sizes.max()) + EXTRA_SAMPLES_PER_GROUP, CANDIDATES_PER_GROUP)
    members = np.full((len(groups), num_places), len(samples), dtype=np.int64)
    members[np.arange(num_places) < sizes[:, None]] = np.arange(len(samples))
    columns = np.concatenate([tokens, loads], axis=1).astype(np.float64)
    objective = SearchObjective(
        sizes=np.concatenate([columns, np.zeros((1, columns.shape[1]))]),
        budgets=budgets,
        load_matrix=np.eye(loads.shape[1], columns.shape[1], len(budgets)),
        weights=np.asarray(weights, dtype=np.float64),
    )
    return samples, members, objective


def _as_groups(members: IntArray, samples: IntArray) -> list[IntArray]:
    """Return the samples of each group of `members` (..., K)."""
    return [samples[group[group < len(samples)]] for group in members.reshape(-1, members.shape[-1])]


def _group_loads(members: IntArray, objective: SearchObjective) -> IntArray:
    """Return (G, q) the loads of the groups `members` (G, K)."""
    loads: IntArray = (objective.sizes[members].sum(axis=1) @ objective.load_matrix.T).astype(np.int64)
    return loads
