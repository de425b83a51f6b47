"""Samples change places between the groups of one step until its replicas are as even as that can make them."""

from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray

CANDIDATES_PER_GROUP = 8  # samples of each of two groups that one round considers
PARTNERS = 40  # the smallest groups of a step have the most to take; beyond these a round is rarely of use
TIE = 0.3  # weight of the pair's own evenness: without it ties for the largest block all progress
NOTHING = CANDIDATES_PER_GROUP  # stands for no sample in an offer

# Each group offers any one or two of its candidates, or nothing: swapping a large image for a small one and a text
# evens out images while leaving tokens alone, which single swaps cannot.
OFFERS = np.array(list(combinations_with_replacement(range(CANDIDATES_PER_GROUP + 1), 2)), dtype=np.int64)
OFFERS = OFFERS[(OFFERS[:, 0] != OFFERS[:, 1]) | (OFFERS[:, 0] == NOTHING)]


@dataclass(frozen=True)
class SearchObjective:
    """What exchange may not pass, and what it evens out."""

    sizes: FloatArray  # (n + 1, c) of each sample; the last, all zeros, stands for an empty place
    budgets: IntArray  # (m,) what a group may hold under the first m columns
    even: FloatArray  # (q, c): sizes @ even.T are the q loads to even out
    weights: FloatArray  # (q,) what a share of a load's mean is worth


@dataclass(frozen=True)
class _Steps:
    """All steps side by side, so that one round improves every step at once. The arrays change in place."""

    members: IntArray  # (S, N, K) samples of each group, then empty places
    used: FloatArray  # (S, N, c) sum of each group's sizes
    loads: FloatArray  # (S, N, q) loads to even out, in shares of the step's mean
    scale: FloatArray  # (S, q) 1 / that mean


def local_search(members: IntArray, aim: SearchObjective, rounds: int) -> IntArray:
    """Even out the groups of each step by moving samples between them.

    members: (S, N, K >= CANDIDATES) sample numbers of the N groups of S steps, len(aim.sizes) - 1 in the empty places,
    which come last. Returns such an array. Aims at the least sum_j weights_j * max_over_groups(load_j) / mean(load_j)
    of every step and never returns a larger one; passes no budget and empties no group. Pure: no randomness.

    Each round pairs, in every step, the group that is largest in one of the loads with one of the smallest ones, and
    makes the best exchange of at most two samples each way, if that helps.
    """
    num_steps, num_groups, _ = members.shape
    if num_steps == 0 or num_groups < 2:
        return members
    used = aim.sizes[members].sum(axis=2)
    mean = (used @ aim.even.T).mean(axis=1)
    scale = np.divide(1.0, mean, out=np.zeros_like(mean), where=mean > 0)
    steps = _Steps(members.copy(), used, (used @ aim.even.T) * scale[:, None], scale)
    before = steps.loads.max(axis=1) @ aim.weights
    partners = min(num_groups - 1, PARTNERS)
    offered = -(-int((members != len(aim.sizes) - 1).sum(axis=2).max()) // CANDIDATES_PER_GROUP)  # turns until all were
    idle = 0
    for number in range(rounds):
        turn, by = divmod(number, len(aim.even))
        order = np.argsort(steps.loads[:, :, by], axis=1, kind="stable")
        moved = _exchange_pairs(steps, order[:, -1], order[:, turn % partners], aim, turn)
        idle = 0 if moved else idle + 1
        if idle == offered * partners * len(aim.even):  # whoever could help has been asked
            break
    worse = steps.loads.max(axis=1) @ aim.weights > before + 1e-9
    return np.where(worse[:, None, None], members, steps.members)


def _exchange_pairs(steps: _Steps, high: IntArray, low: IntArray, aim: SearchObjective, turn: int) -> bool:
    """In every step s make the best exchange between groups high[s] and low[s], if it helps; whether any was made."""
    rows, empty = np.arange(len(high)), len(aim.sizes) - 1
    offer_high = _offers(steps.members[rows, high], empty, turn)  # (S, O, 2) samples
    offer_low = _offers(steps.members[rows, low], empty, turn)
    size_high, size_low = (aim.sizes[offer].sum(axis=2) for offer in (offer_high, offer_low))  # (S, O, m)
    top, bottom = steps.loads[rows, high], steps.loads[rows, low]  # (S, q)
    others = steps.loads.copy()
    others[rows, high] = others[rows, low] = 0
    floor = others.max(axis=1)  # (S, q) what the other groups impose
    after = np.zeros((len(rows), len(OFFERS), len(OFFERS)))
    for j, (row, weight) in enumerate(zip(aim.even, aim.weights, strict=True)):
        shift = ((size_high @ row)[:, :, None] - (size_low @ row)[:, None]) * steps.scale[:, j, None, None]
        after += weight * _worth(
            top[:, j, None, None] - shift, bottom[:, j, None, None] + shift, floor[:, j, None, None]
        )
    for j, budget in enumerate(aim.budgets):
        moved = size_high[:, :, None, j] - size_low[:, None, :, j]
        room_high, room_low = budget - steps.used[rows, high, j], budget - steps.used[rows, low, j]
        after[(moved > room_low[:, None, None]) | (-moved > room_high[:, None, None])] = np.inf
    flat = after.reshape(len(rows), -1)
    best = flat.argmin(axis=1)
    now = _worth(top, bottom, floor) @ aim.weights
    better = np.flatnonzero(flat[rows, best] < now - 1e-9).tolist()
    for s in better:
        i, j = divmod(int(best[s]), len(OFFERS))
        _move(steps, s, (int(high[s]), int(low[s])), (offer_high[s, i], offer_low[s, j]), aim)
    return bool(better)


def _worth(top: FloatArray, bottom: FloatArray, floor: FloatArray) -> FloatArray:
    """The step's maximum given the loads of two groups, and a part of the pair's own unevenness."""
    worth: FloatArray = np.maximum(np.maximum(top, bottom), floor) + TIE * np.abs(top - bottom)
    return worth


def _offers(members: IntArray, empty: int, turn: int) -> IntArray:
    """(S, O, 2) samples in each offer of a group. Large groups consider a part of their samples, which rotates."""
    count = (members != empty).sum(axis=1)[:, None]
    begin = np.where(count > CANDIDATES_PER_GROUP, turn * CANDIDATES_PER_GROUP, 0)
    places = (begin + np.arange(CANDIDATES_PER_GROUP)) % np.maximum(count, CANDIDATES_PER_GROUP)
    candidates = np.full((len(members), CANDIDATES_PER_GROUP + 1), empty, dtype=np.int64)
    candidates[:, :CANDIDATES_PER_GROUP] = np.take_along_axis(members, places, axis=1)
    return candidates[:, OFFERS]


def _move(
    steps: _Steps, step: int, pair: tuple[int, int], offers: tuple[IntArray, IntArray], aim: SearchObjective
) -> None:
    """Exchange the offers of two groups of a step, unless that empties one."""
    empty = len(aim.sizes) - 1
    gone, come = offers
    after = []
    for group, out, into in ((pair[0], gone, come), (pair[1], come, gone)):
        members = steps.members[step, group]
        samples = [x for x in members.tolist() if x != empty and x not in out] + [
            x for x in into.tolist() if x != empty
        ]
        if not 0 < len(samples) <= len(members):
            return
        after.append(samples + [empty] * (len(members) - len(samples)))
    for group, members in zip(pair, after, strict=True):
        steps.members[step, group] = members
        steps.used[step, group] = aim.sizes[members].sum(axis=0)
        steps.loads[step, group] = (steps.used[step, group] @ aim.even.T) * steps.scale[step]
