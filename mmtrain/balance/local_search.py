"""Balance the groups of a step by local search: exchange samples between groups until no exchange helps."""

from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray

CANDIDATES_PER_GROUP = 8  # samples of each of two groups that one round considers
MAX_PARTNER_GROUPS = 40  # the smallest groups of a step have the most room; a round with others rarely helps
MAX_ROUNDS_PER_LOAD = 256
PAIR_BALANCE_WEIGHT = 0.3  # weight of the pair's own balance: without it ties for the largest group block all progress
NO_SAMPLE = CANDIDATES_PER_GROUP  # index of an empty candidate

# A group offers two of its candidates, one, or none: exchanging a large image for a small one and a text balances
# images while it leaves tokens alone, which single swaps cannot.
OFFERS = np.array(list(combinations_with_replacement(range(CANDIDATES_PER_GROUP + 1), 2)), dtype=np.int64)
OFFERS = OFFERS[(OFFERS[:, 0] != OFFERS[:, 1]) | (OFFERS[:, 0] == NO_SAMPLE)]


@dataclass(frozen=True)
class SearchObjective:
    """The loads that the search balances, and the budgets that no group may pass."""

    sizes: FloatArray  # (n + 1, c) of each sample; the last row, all zeros, stands for an empty place
    budgets: IntArray  # (m,) what a group may hold under the first m columns
    load_matrix: FloatArray  # (q, c): sizes @ load_matrix.T are the q loads to balance
    weights: FloatArray  # (q,) what a share of a load's mean counts


@dataclass(frozen=True)
class _Steps:
    """All steps side by side, so that one round improves every step at once. The arrays change in place."""

    members: IntArray  # (S, N, K) samples of each group, then empty places
    used: FloatArray  # (S, N, c) sum of each group's sizes
    loads: FloatArray  # (S, N, q) loads to balance, in shares of the step's mean
    scale: FloatArray  # (S, q) 1 / that mean


def num_search_rounds(num_replicas: int) -> int:
    """Return the rounds for each load: more groups side by side have more to balance, up to a limit of time."""
    return min(4 * num_replicas, MAX_ROUNDS_PER_LOAD)


def local_search(members: IntArray, objective: SearchObjective, rounds: int) -> IntArray:
    """Balance the groups of each step by exchanging samples between them.

    members: (S, N, K >= CANDIDATES_PER_GROUP) sample numbers of the N groups of S steps; empty places come last and
    hold len(objective.sizes) - 1. Returns such an array. The search reduces sum_j weights_j * max_over_groups(load_j) /
    mean(load_j) of every step and never returns a larger one; it passes no budget and empties no group. It uses no
    random numbers.

    Each round pairs, in every step, the group that is largest in one of the loads with one of the smallest groups, and
    makes the best exchange of at most two samples each way, if that helps.
    """
    num_steps, num_groups, _ = members.shape
    if num_steps == 0 or num_groups < 2:
        return members
    used = objective.sizes[members].sum(axis=2)
    mean = (used @ objective.load_matrix.T).mean(axis=1)
    scale = np.divide(1.0, mean, out=np.zeros_like(mean), where=mean > 0)
    steps = _Steps(members.copy(), used, (used @ objective.load_matrix.T) * scale[:, None], scale)
    before = steps.loads.max(axis=1) @ objective.weights
    num_loads = len(objective.load_matrix)
    num_partners = min(num_groups - 1, MAX_PARTNER_GROUPS)
    largest_group = int((members != len(objective.sizes) - 1).sum(axis=2).max())
    num_turns_of_candidates = -(-largest_group // CANDIDATES_PER_GROUP)  # until every sample was a candidate
    num_idle_rounds = 0
    for number in range(rounds):
        turn, load = divmod(number, num_loads)
        ascending = np.argsort(steps.loads[:, :, load], axis=1, kind="stable")
        moved = _exchange_pairs(steps, ascending[:, -1], ascending[:, turn % num_partners], objective, turn)
        num_idle_rounds = 0 if moved else num_idle_rounds + 1
        if num_idle_rounds == num_turns_of_candidates * num_partners * num_loads:  # every partner was tried
            break
    worse = steps.loads.max(axis=1) @ objective.weights > before + 1e-9
    return np.where(worse[:, None, None], members, steps.members)


def _exchange_pairs(steps: _Steps, high: IntArray, low: IntArray, objective: SearchObjective, turn: int) -> bool:
    """In every step s make the best exchange between groups high[s] and low[s], if it helps; say if any was made."""
    rows, empty = np.arange(len(high)), len(objective.sizes) - 1
    offer_high = offered_samples(steps.members[rows, high], empty, turn)  # (S, O, 2) samples
    offer_low = offered_samples(steps.members[rows, low], empty, turn)
    size_high, size_low = (objective.sizes[offer].sum(axis=2) for offer in (offer_high, offer_low))  # (S, O, m)
    load_high, load_low = steps.loads[rows, high], steps.loads[rows, low]  # (S, q)
    others = steps.loads.copy()
    others[rows, high] = others[rows, low] = 0
    largest_other = others.max(axis=1)  # (S, q)
    after = np.zeros((len(rows), len(OFFERS), len(OFFERS)))
    for j, (row, weight) in enumerate(zip(objective.load_matrix, objective.weights, strict=True)):
        shift = ((size_high @ row)[:, :, None] - (size_low @ row)[:, None]) * steps.scale[:, j, None, None]
        after += weight * _penalty(
            load_high[:, j, None, None] - shift, load_low[:, j, None, None] + shift, largest_other[:, j, None, None]
        )
    for j, budget in enumerate(objective.budgets):
        moved = size_high[:, :, None, j] - size_low[:, None, :, j]
        room_high, room_low = budget - steps.used[rows, high, j], budget - steps.used[rows, low, j]
        after[(moved > room_low[:, None, None]) | (-moved > room_high[:, None, None])] = np.inf
    flat = after.reshape(len(rows), -1)
    best = flat.argmin(axis=1)
    before = _penalty(load_high, load_low, largest_other) @ objective.weights
    improved = np.flatnonzero(flat[rows, best] < before - 1e-9).tolist()
    for s in improved:
        i, j = divmod(int(best[s]), len(OFFERS))
        _exchange(steps, s, (int(high[s]), int(low[s])), (offer_high[s, i], offer_low[s, j]), objective)
    return bool(improved)


def _penalty(load_high: FloatArray, load_low: FloatArray, largest_other: FloatArray) -> FloatArray:
    """The step's largest load given those of two groups, and a part of the pair's own imbalance."""
    largest = np.maximum(np.maximum(load_high, load_low), largest_other)
    penalty: FloatArray = largest + PAIR_BALANCE_WEIGHT * np.abs(load_high - load_low)
    return penalty


def offered_samples(members: IntArray, empty: int, turn: int) -> IntArray:
    """(S, O, 2) samples in each offer of a group. Large groups consider a part of their samples, which rotates."""
    count = (members != empty).sum(axis=1)[:, None]
    start = np.where(count > CANDIDATES_PER_GROUP, turn * CANDIDATES_PER_GROUP, 0)
    places = (start + np.arange(CANDIDATES_PER_GROUP)) % np.maximum(count, CANDIDATES_PER_GROUP)
    candidates = np.full((len(members), CANDIDATES_PER_GROUP + 1), empty, dtype=np.int64)
    candidates[:, :CANDIDATES_PER_GROUP] = np.take_along_axis(members, places, axis=1)
    return candidates[:, OFFERS]


def _exchange(
    steps: _Steps,
    step: int,
    pair: tuple[int, int],
    offers: tuple[IntArray, IntArray],
    objective: SearchObjective,
) -> None:
    """Exchange the offers of two groups of a step, unless that empties one."""
    empty = len(objective.sizes) - 1
    after = []
    for group, leaving, entering in ((pair[0], offers[0], offers[1]), (pair[1], offers[1], offers[0])):
        members = steps.members[step, group]
        samples = [sample for sample in members.tolist() if sample != empty and sample not in leaving]
        samples += [sample for sample in entering.tolist() if sample != empty]
        if not 0 < len(samples) <= len(members):
            return
        after.append(samples + [empty] * (len(members) - len(samples)))
    for group, new_members in zip(pair, after, strict=True):
        steps.members[step, group] = new_members
        steps.used[step, group] = objective.sizes[new_members].sum(axis=0)
        steps.loads[step, group] = (steps.used[step, group] @ objective.load_matrix.T) * steps.scale[step]
