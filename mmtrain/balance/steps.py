"""Assemble steps: decide which groups run side by side on the replicas, so that no replica waits long for another."""

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.grouping import GroupingSizes, SampleGroups
from mmtrain.balance.local_search import CANDIDATES_PER_GROUP, SearchObjective, local_search
from mmtrain.balance.modality_free_steps import form_modality_free_steps

EXTRA_SAMPLES_PER_GROUP = 2  # places that a group has for more samples than the largest group


def assemble_steps(
    groups: SampleGroups,
    sizes: GroupingSizes,
    num_replicas: int,
    max_pairs: int,
    rng: np.random.Generator,
    num_before: int = 0,
) -> SampleGroups:
    """Order the groups of one window into steps of `num_replicas` near-equal groups, and put the steps in random order.

    sizes: of the samples that `groups` name. max_pairs: of groups that the local search tries in a step for each load,
    to exchange samples; 0 leaves every group as it is. num_before: groups in the stream before these; if they end
    inside a step, the first ones complete it.

    Returns the groups in the order of training. The first and the last groups may fill only part of a step: they run
    beside groups of another window, so these are the groups nearest to the average.
    """
    loads_per_token = sizes.load_matrix
    if max_pairs:
        coarsest = sizes.tokens @ loads_per_token[0]
        groups = form_modality_free_steps(groups, sizes.tokens, sizes.budgets, coarsest, num_replicas)
    loads = groups.loads(sizes.tokens) @ loads_per_token.T
    head, steps, tail = _cut_into_steps(loads, -num_before % num_replicas, num_replicas)
    ordered = groups.reordered(np.concatenate([head, rng.permutation(steps).ravel(), tail]))
    if max_pairs == 0 or not steps.size:
        return ordered
    in_steps = np.arange(steps.size).reshape(steps.shape) + len(head)
    empty_place = np.zeros((1, sizes.tokens.shape[1]), dtype=np.int64)
    objective = SearchObjective(
        np.concatenate([sizes.tokens, empty_place]).astype(np.float64),
        sizes.budgets,
        loads_per_token,
        sizes.weights,
    )
    return _balance_uneven_steps(ordered, in_steps, objective, max_pairs)


def _cut_into_steps(loads: FloatArray, num_missing: int, num_replicas: int) -> tuple[IntArray, IntArray, IntArray]:
    """Split the groups of a window into those that complete the step before it, whole steps (S, N), and a rest.

    loads: (G, q), the coarsest first. num_missing: groups that the step before still needs. Groups equal in the first
    load form steps among themselves, sorted by the other loads; the groups that remain are sorted and cut.
    """
    groups = np.lexsort(loads.T[::-1])
    num_head = min(num_missing, len(groups))
    num_outside = num_head + (len(groups) - num_head) % num_replicas
    mean = np.maximum(loads[groups].mean(axis=0), 1e-9) if len(groups) else 1.0
    nearest = np.argsort(np.abs(loads[groups] / mean - 1).sum(axis=1), kind="stable")[:num_outside]
    outside, groups = groups[nearest], np.delete(groups, nearest)
    _, first, size = np.unique(loads[groups, 0], return_index=True, return_counts=True)
    within = np.arange(len(groups)) - np.repeat(first, size)
    in_full_steps = within < np.repeat(size // num_replicas * num_replicas, size)
    steps = np.concatenate([groups[in_full_steps], groups[~in_full_steps]]).reshape(-1, num_replicas)
    return outside[:num_head], steps, outside[num_head:]


def _balance_uneven_steps(
    groups: SampleGroups, steps: IntArray, objective: SearchObjective, max_pairs: int
) -> SampleGroups:
    """Exchange samples inside the steps (S, N) of group numbers that are less even than the mean step.

    Most steps are even as they were cut, and time is better spent on those that are not.
    """
    empty, sizes = len(objective.sizes) - 1, groups.sizes
    loads = np.add.reduceat(objective.sizes[groups.samples], groups.first[:-1], axis=0) @ objective.load_matrix.T
    mean = loads[steps].mean(axis=1)
    imbalance = ((loads[steps].max(axis=1) - mean) / np.where(mean > 0, mean, 1)) @ objective.weights
    steps = steps[imbalance > imbalance.mean()]
    num_places = max(int(sizes.max()) + EXTRA_SAMPLES_PER_GROUP, CANDIDATES_PER_GROUP)
    members = np.full((len(groups), num_places), empty, dtype=np.int64)
    members[np.arange(num_places) < sizes[:, None]] = groups.samples
    members[steps] = local_search(members[steps], objective, max_pairs)
    filled = members != empty
    return SampleGroups(np.concatenate([[0], np.cumsum(filled.sum(axis=1))]), members[filled])
