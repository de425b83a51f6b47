"""Matched grouping of a whole epoch, window after window, as the stream of groups makes it lazily."""

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.grouping import GroupingSizes, SampleGroups
from mmtrain.balance.local_search import num_search_pairs
from mmtrain.balance.slack_packing import pack_with_slack
from mmtrain.balance.steps import assemble_steps


def group_matched(
    sizes: GroupingSizes, order: IntArray, window: int, num_replicas: int, rng: np.random.Generator
) -> SampleGroups:
    """Group the samples of `order` (k,), and arrange the groups in steps of `num_replicas` that are even.

    Every sample is used once, and none moves further than `window` places from where the shuffle put it. Raises
    ValueError for a sample above a budget alone.
    """
    parts: list[SampleGroups] = [SampleGroups(np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64))]
    num_before = 0
    for start in range(0, len(order), window):
        groups = pack_with_slack(sizes.tokens, sizes.budgets, order[start : start + window], roomy=True)
        parts.append(assemble_steps(groups, sizes, num_replicas, num_search_pairs(num_replicas), rng, num_before))
        num_before += len(groups)
    num_samples = np.concatenate([part.sizes for part in parts])
    return SampleGroups(np.concatenate([[0], np.cumsum(num_samples)]), np.concatenate([p.samples for p in parts]))


def sizes_for(tokens: IntArray, budgets: IntArray, load_matrix: FloatArray) -> GroupingSizes:
    """Loads of equal weight over `tokens` (n, m) under budgets (m,)."""
    return GroupingSizes(tokens, budgets, load_matrix, np.ones(len(load_matrix)))
