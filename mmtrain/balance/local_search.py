"""Balance the groups of a step by local search: exchange samples between groups until no exchange helps."""

from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray

CANDIDATES_PER_GROUP = 8  # samples of each of two groups that one round considers
MAX_PARTNER_GROUPS = 40  # the smallest groups of a step have the most room; a round with others rarely helps
# Measured by scripts/bench_balance.py at 64 x 1: one pair in a round takes five times as long for the same evenness.
MAX_PAIRS_PER_LOAD = 384
PAIRS_PER_GROUP = 6
GROUPS_PER_PAIR = 16  # of a step: in larger steps a round exchanges between several pairs, up to
MAX_PAIRS_PER_ROUND = 4
MAX_IDLE_PAIRS = 48  # of all loads in a row that find no exchange; after its part a load has no more rounds
PAIR_BALANCE_WEIGHT = 0.3  # weight of the pair's own balance: without it ties for the largest group block all progress
MIN_GAIN = 1e-9  # of the objective: less is rounding
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
    limits: list[tuple[int, int]]  # (column, budget) of the budgets that not all samples of a step would keep to


def num_search_pairs(num_replicas: int) -> int:
    """Return the pairs to try for each load: more groups side by side have more to balance, up to a limit of time."""
    return min(PAIRS_PER_GROUP * num_replicas, MAX_PAIRS_PER_LOAD)


def local_search(members: IntArray, objective: SearchObjective, max_pairs: int) -> IntArray:
    """Balance the groups of each step by exchanging samples between them.

    members: (S, N, K >= CANDIDATES_PER_GROUP) sample numbers of the N groups of S steps; empty places come last and
    hold len(objective.sizes) - 1. max_pairs: of groups that are tried in each step for each load. Returns such an
    array. The search reduces sum_j weights_j * max_over_groups(load_j) / mean(load_j) of every step and never returns a
    larger one; it passes no budget and empties no group. It uses no random numbers.

    Each round pairs, in every step, the groups that are largest in one of the loads with some of the smallest groups,
    and makes the best exchange of at most two samples each way, if that helps. With several pairs the others still have
    their loads of before, so a round may gain less than its pairs do.
    """
    num_steps, num_groups, _ = members.shape
    if num_steps == 0 or num_groups < 2:
        return members
    used = objective.sizes[members].sum(axis=2)
    mean = (used @ objective.load_matrix.T).mean(axis=1)
    scale = np.divide(1.0, mean, out=np.zeros_like(mean), where=mean > 0)
    totals = used.sum(axis=1).max(axis=0)
    limits = [(column, budget) for column, budget in enumerate(objective.budgets.tolist()) if totals[column] > budget]
    steps = _Steps(members.copy(), used, (used @ objective.load_matrix.T) * scale[:, None], scale, limits)
    before = steps.loads.max(axis=1) @ objective.weights
    num_pairs = min(max(num_groups // GROUPS_PER_PAIR, 1), MAX_PAIRS_PER_ROUND)
    num_partners = min(num_groups - num_pairs, MAX_PARTNER_GROUPS)
    largest_group = int((members != len(objective.sizes) - 1).sum(axis=2).max())
    num_turns_of_candidates = -(-largest_group // CANDIDATES_PER_GROUP)  # until every sample was a candidate
    num_loads = len(objective.load_matrix)
    max_idle_rounds = min(-(-MAX_IDLE_PAIRS // (num_pairs * num_loads)), num_partners) * num_turns_of_candidates
    num_idle_rounds = dict.fromkeys(range(num_loads), 0)
    for turn in range(-(-max_pairs // num_pairs)):
        partners = (turn + np.arange(num_pairs)) % num_partners
        for load in [load for load, num_idle in num_idle_rounds.items() if num_idle < max_idle_rounds]:
            ascending = np.argsort(steps.loads[:, :, load], axis=1, kind="stable")
            high, low = ascending[:, : -num_pairs - 1 : -1], ascending[:, partners]
            is_improved = _exchange_pairs(steps, high, low, objective, turn)
            num_idle_rounds[load] = 0 if is_improved else num_idle_rounds[load] + 1
    worse = steps.loads.max(axis=1) @ objective.weights > before + MIN_GAIN
    return np.where(worse[:, None, None], members, steps.members)


def _exchange_pairs(steps: _Steps, high: IntArray, low: IntArray, objective: SearchObjective, turn: int) -> bool:
    """In every step make the best exchange of each pair of groups if it helps; high, low: (S, P), all different.

    Returns whether any exchange was made.
    """
    rows = np.repeat(np.arange(len(high)), high.shape[1])
    pair, empty = np.arange(len(rows)), len(objective.sizes) - 1
    high, low = high.ravel(), low.ravel()
    offer_high = offered_samples(steps.members[rows, high], empty, turn)  # (S P, O, 2) samples
    offer_low = offered_samples(steps.members[rows, low], empty, turn)
    size_high, size_low = (objective.sizes[offer].sum(axis=2) for offer in (offer_high, offer_low))  # (S P, O, c)
    load_high, load_low = steps.loads[rows, high], steps.loads[rows, low]  # (S P, q)
    others = steps.loads[rows]
    others[pair, high] = others[pair, low] = 0
    largest_other = others.max(axis=1)  # (S P, q)
    after = np.zeros((len(rows), len(OFFERS), len(OFFERS)))
    for j, (row, weight) in enumerate(zip(objective.load_matrix, objective.weights, strict=True)):
        scale = 2 * steps.scale[rows, j, None]
        shift = ((size_high @ row) * scale)[:, :, None] - ((size_low @ row) * scale)[:, None]
        both, apart = load_high[:, j] + load_low[:, j], load_high[:, j] - load_low[:, j]
        after += weight * _penalty(both[:, None, None], apart[:, None, None] - shift, largest_other[:, j, None, None])
    for j, budget in steps.limits:
        moved = size_high[:, :, None, j] - size_low[:, None, :, j]
        room_high, room_low = budget - steps.used[rows, high, j], budget - steps.used[rows, low, j]
        np.copyto(after, np.inf, where=moved > room_low[:, None, None])
        np.copyto(after, np.inf, where=moved < -room_high[:, None, None])
    flat = after.reshape(len(rows), -1)
    best = flat.argmin(axis=1)
    before = _penalty(load_high + load_low, load_high - load_low, largest_other) @ objective.weights
    improved = np.flatnonzero(flat[pair, best] < before - MIN_GAIN).tolist()
    for s in improved:
        i, j = divmod(int(best[s]), len(OFFERS))
        _exchange(steps, int(rows[s]), (int(high[s]), int(low[s])), (offer_high[s, i], offer_low[s, j]), objective)
    return bool(improved)


def _penalty(both: FloatArray, apart: FloatArray, largest_other: FloatArray) -> FloatArray:
    """Return the step's largest load and a part of a pair's own imbalance, given the sum and difference of its loads.

    Works in the memory of `apart`.
    """
    difference = np.abs(apart, out=apart)
    penalty: FloatArray = difference + both
    penalty /= 2
    np.maximum(penalty, largest_other, out=penalty)
    difference *= PAIR_BALANCE_WEIGHT
    penalty += difference
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
