"""Balance the groups of one step for the replicas of a plan by exchanging samples between them."""

from collections.abc import Sequence

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.local_search import (
    CANDIDATES_PER_GROUP,
    SearchObjective,
    local_search,
    num_search_pairs,
)
from mmtrain.balance.steps import EXTRA_SAMPLES_PER_GROUP

MIN_PAIRS_OF_SINGLE_ROW = 128  # for each load; a single row ends by itself, among many rows it waits for the last


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
    min_pairs = MIN_PAIRS_OF_SINGLE_ROW * num_replicas // len(groups)
    max_pairs = max(num_search_pairs(num_replicas), min_pairs)
    rows = members.reshape(-1, num_replicas, members.shape[1])
    return _as_groups(local_search(rows, objective, max_pairs), samples)


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
