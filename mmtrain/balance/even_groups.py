"""The groups of one step, made even for the replicas of a plan by exchanging samples between them."""

from collections.abc import Sequence

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.local_search import CANDIDATES_PER_GROUP, SearchObjective, local_search
from mmtrain.balance.matched import num_search_rounds
from mmtrain.balance.steps import EXTRA_SAMPLES_PER_GROUP

ROUNDS_OF_A_ROW = 128  # a load; by itself a row ends when nothing is left to gain, among many it waits for the last


def even_out_groups(
    groups: Sequence[IntArray],
    tokens: IntArray,
    budgets: IntArray,
    loads: IntArray | FloatArray,
    weights: Sequence[float] | FloatArray,
    num_replicas: int,
) -> list[IntArray]:
    """Exchange samples between groups that run side by side, until their loads are as even as that can make them.

    groups: sample numbers of each group of a step; each run of `num_replicas` of them is computed side by side, and
    nothing leaves its run. tokens (k, m) and loads (k, q) are of the samples in the order in which `groups` name them.
    budgets: (m,) what no group may pass. weights: (q,) what a share of each load's mean is worth.

    Returns groups of the same samples. The weighted sum of the largest loads over their means is never larger than
    before, in any run. The same arguments give the same groups.
    """
    num_loads = loads.shape[1]
    if num_replicas < 2 or num_loads == 0:
        return list(groups)
    samples = np.concatenate(groups)
    sizes = np.array([len(group) for group in groups])
    num_places = max(int(sizes.max()) + EXTRA_SAMPLES_PER_GROUP, CANDIDATES_PER_GROUP)
    members = np.full((len(groups), num_places), len(samples), dtype=np.int64)
    members[np.arange(num_places) < sizes[:, None]] = np.arange(len(samples))
    columns = np.concatenate([tokens, loads], axis=1).astype(np.float64)
    aim = SearchObjective(
        np.concatenate([columns, np.zeros((1, columns.shape[1]))]),
        budgets,
        np.eye(num_loads, columns.shape[1], len(budgets)),
        np.asarray(weights, dtype=np.float64),
    )
    rounds = max(num_search_rounds(num_replicas), ROUNDS_OF_A_ROW * num_replicas // len(groups)) * num_loads
    found = local_search(members.reshape(-1, num_replicas, num_places), aim, rounds).reshape(-1, num_places)
    return [samples[group[group < len(samples)]] for group in found]
