"""Bring many groups at once nearer to target loads: pair groups, and make the best exchange of every pair.

Sums are taken element by element, so that machines whose libraries add up in another order make the same exchanges.
"""

import math
from itertools import combinations

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray

PAIRS_AT_A_TIME = 64  # their arrays fit into a core's cache
# Places of each of two groups in a round, and partners of a group in a round of few groups, which takes little longer
# than one. Later rounds try others. With more groups than `PAIRS_AT_A_TIME` has room for, one partner each in more
# rounds gains more.
MAX_TRIED = 8
MAX_RELIEVED_SHARE = 1 / 16  # of the groups: with more that have too much, targets do not suit the samples
STRIDE_OF_OTHERS = 13  # groups by which partners shift from one handing on to the next
FIRST_LIMIT_WEIGHT = 2**-6  # of what a group is above a budget, beside loads: at 1, images move for a few tokens
PARTNERS_TO_DOUBLE_WEIGHT = 18
ROUNDING = 1e-9  # of shares of the mean load, of their squares, and of whole units


class GroupTable:
    """Samples in groups, what each group has more than its target, and exchanges between pairs of groups."""

    def __init__(
        self,
        group: IntArray,
        num_groups: int,
        loads: FloatArray,
        targets: FloatArray,
        weights: FloatArray,
    ) -> None:
        """Put each sample into its group.

        group: (k,) of each sample. loads: (k, q) of each sample. targets: (G, q) of each group. weights: (q,), or
        (G, q) by group, of the squared excess over the targets, whose weighted sum exchanges lower.
        """
        self._empty = len(group)
        self._loads = np.append(loads.T, np.zeros((loads.shape[1], 1)), axis=1)  # (q, k + 1)
        self._weights = np.broadcast_to(weights, targets.shape).T
        self._limits: list[tuple[FloatArray, FloatArray, int]] = []
        self._sizes = np.bincount(group, minlength=num_groups)
        num_places = max(int(self._sizes.max()) + 2, MAX_TRIED)  # the largest group may grow by an exchange
        self.members = np.full((num_groups, num_places), self._empty, dtype=np.int64)
        self.members[np.arange(num_places) < self._sizes[:, None]] = np.argsort(group, kind="stable")
        self.excess: FloatArray = np.stack(
            [column[self.members].sum(axis=1) - target for column, target in zip(self._loads, targets.T, strict=True)]
        )  # (q, G)
        self._offers_of_turn: dict[tuple[int, int], IntArray] = {}
        self._work_space: tuple[FloatArray, FloatArray] | None = None

    def raise_targets(self, load: int, change: FloatArray) -> None:
        """Raise the targets of one load by `change` (G,)."""
        self.excess[load] -= change

    def limit(self, tokens: IntArray, budget: int) -> None:
        """Let no exchange raise a group's `tokens` (k,) above the budget, or any further above it."""
        column = np.append(tokens, 0).astype(np.float64)
        self._limits.append((column, column[self.members].sum(axis=1), budget))

    @property
    def is_within_limits(self) -> bool:
        """Whether every group has a sample and keeps to the budgets."""
        return bool(self._sizes.min() > 0) and all((used <= budget).all() for _, used, budget in self._limits)

    def groups(self) -> list[IntArray]:
        """Return the samples of each group."""
        return [row[row < self._empty] for row in self.members]

    def group_of_samples(self) -> IntArray:
        """Return (k,) the group of each sample."""
        group = np.empty(self._empty + 1, dtype=np.int64)
        group[self.members] = np.arange(len(self.members))[:, None]
        return group[:-1]

    def bring_to_targets(
        self, load: int, tolerance: float, rounds: int, num_exchanged: int, passes_on: bool = False
    ) -> None:
        """Exchange samples between the groups that are furthest above and below their target of one load.

        A round pairs the groups whose excess passes `tolerance`, the largest with the smallest, and shifts the partners
        from round to round; few groups try several partners each, which count as rounds. num_exchanged: places (1 or 2)
        of each group in an exchange. passes_on: whether every second round hands the whole excess of a group on to one
        without: among coarse loads, the samples of another group often fit where these did not.
        """
        num_groups = len(self.members)
        num_tried = 0  # partners of a group
        for turn in range(rounds):
            excess = self.excess[load]
            is_off = np.abs(excess) > tolerance
            if num_groups < 2 or not is_off.any() or num_tried >= rounds:
                return
            if passes_on and turn % 2:
                partners = np.flatnonzero(~is_off)
                partners = partners[np.argsort(-self._sizes[partners], kind="stable")]
                partners = partners[: max(len(partners) // 2, 1)]
                off = np.flatnonzero(is_off)[: len(partners)]
                num_pairs = len(off)
                partners = np.roll(partners, -(turn // 2) * num_pairs)
                self._exchange(off[:num_pairs], partners[:num_pairs], turn, num_exchanged, passed_load=load)
                continue
            num_pairs = max(int((excess > tolerance).sum()), int((excess < -tolerance).sum()))
            num_pairs = min(num_pairs, num_groups // 2)
            ascending = np.argsort(excess, kind="stable")
            low = ascending[: num_groups // 2]
            if passes_on or num_pairs * MAX_TRIED > PAIRS_AT_A_TIME:
                low = np.roll(low, -(turn // 2 if passes_on else num_tried))[:num_pairs]
            else:
                low = _partners(low, num_pairs, num_tried)
            self._exchange(ascending[::-1][:num_pairs], low, turn, num_exchanged)
            num_tried += len(low) // num_pairs

    def relieve(self, load: int, tolerance: float, rounds: int) -> None:
        """Take from the few groups that have too much of a load, for which their row would wait.

        They give to groups below their target, each to several of them at a time; in every third round they hand their
        excess on to others instead, from where exchanges may fit. Does nothing where many groups have too much.
        """
        for turn in range(rounds):
            excess = self.excess[load]
            high = np.flatnonzero(excess > tolerance)
            low = np.flatnonzero(excess < -tolerance)
            if not 0 < len(high) <= MAX_RELIEVED_SHARE * len(excess):
                return
            shift = turn - turn // 3  # other partners and places in every round but those that hand on
            if len(low) and turn % 3 < 2:
                low = low[np.argsort(excess[low], kind="stable")]
                num_pairs = min(len(high), len(low), PAIRS_AT_A_TIME)
                given = np.roll(high, -shift)[:num_pairs]
                self._exchange(given, _partners(low, num_pairs, shift), shift, num_exchanged=2)
                continue
            others = np.flatnonzero(np.abs(excess) <= tolerance)
            num_pairs = min(len(high), len(others), PAIRS_AT_A_TIME)
            if num_pairs:
                partners = _partners(others, num_pairs, turn * STRIDE_OF_OTHERS)
                self._exchange(high[:num_pairs], partners, shift, num_exchanged=2, passed_load=load)

    def bring_within_limits(self, rounds: int) -> None:
        """Bring groups above a budget below it by exchanges that do the loads little harm; later rounds allow more."""
        for number, (_, used, budget) in enumerate(self._limits):
            num_tried = 0  # partners of a group
            for turn in range(rounds):
                num_pairs = min(int((used > budget).sum()), len(used) // 2)
                if num_pairs == 0 or num_tried >= rounds:
                    break
                ascending = np.argsort(used, kind="stable")
                low = _partners(ascending[: len(used) // 2], num_pairs, num_tried)
                weight = FIRST_LIMIT_WEIGHT * 2 ** (num_tried / PARTNERS_TO_DOUBLE_WEIGHT)
                self._exchange(ascending[::-1][:num_pairs], low, turn, num_exchanged=2, limit=(number, weight))
                num_tried += len(low) // num_pairs

    def _exchange(
        self,
        high: IntArray,
        low: IntArray,
        turn: int,
        num_exchanged: int,
        passed_load: int | None = None,
        limit: tuple[int, float] | None = None,
    ) -> None:
        """Make the best exchange of each group of `high` (P,) with one of its partners; no group is in two exchanges.

        low: (P * K,) the partners of each group, those of the first group first. passed_load: a load of which each
        `high` hands its whole excess on to `low`; other loads may become worse. limit: the number of one that each
        `high` passes, and what passing it counts beside the squares of the excess, in shares of the budget.
        """
        if len(high) == 0:
            return
        offers = [self._offers(shift, num_exchanged) for shift in (turn, turn // 2)]
        num_partners = len(low) // len(high)
        pairs = np.repeat(high, num_partners), low
        groups_at_a_time = PAIRS_AT_A_TIME // num_partners * num_partners
        for start in range(0, len(low), groups_at_a_time):
            some = slice(start, start + groups_at_a_time)
            self._exchange_some((pairs[0][some], pairs[1][some]), num_partners, offers, passed_load, limit)

    def _exchange_some(
        self,
        pairs: tuple[IntArray, IntArray],
        num_partners: int,
        offers: list[IntArray],
        passed_load: int | None,
        limit: tuple[int, float] | None,
    ) -> None:
        """Make the best exchange of each run of `num_partners` pairs; offers: places (O, num_exchanged) of both."""
        high, low = pairs
        given, taken = self.members[high[:, None, None], offers[0]], self.members[low[:, None, None], offers[1]]
        change, scratch = self._change_of_squares(pairs, given, taken)  # given, taken: (P, O, places)
        if passed_load is not None:
            moved = _moved(self._loads[passed_load], given, taken, scratch)
            excess = self.excess[passed_load]
            moved -= (excess[high] - excess[low])[:, None, None]
            np.copyto(change, np.inf, where=np.abs(moved, out=moved) > ROUNDING)
        for number, (column, used, budget) in enumerate(self._limits):
            moved = _moved(column, given, taken, scratch)
            room_high, room_low = (budget - used[groups][:, None, None] for groups in (high, low))
            if limit is not None and number == limit[0]:
                change += (np.maximum(-room_high - moved, 0) + room_high) * (limit[1] / budget)
            np.copyto(change, np.inf, where=moved > np.maximum(room_low, 0))
            np.copyto(change, np.inf, where=moved < -np.maximum(room_high, 0))
        flat = change.reshape(len(high) // num_partners, -1)
        best = flat.argmin(axis=1)
        least = flat[np.arange(len(flat)), best]
        partner, best = np.divmod(best, change[0].size)
        number_of_pair = np.arange(len(flat)) * num_partners + partner
        high, low = high[number_of_pair], low[number_of_pair]
        i, j = np.divmod(best, len(offers[1]))
        leaving, entering = given[number_of_pair, i], taken[number_of_pair, j]
        growth = (leaving == self._empty).sum(axis=1) - (entering == self._empty).sum(axis=1)  # of `high`
        is_made = least < (-ROUNDING if passed_load is None else np.inf)
        is_made &= (self._sizes[high] + growth > 0) & (self._sizes[low] - growth > 0)
        if is_made.any():
            places = offers[0][i[is_made]], offers[1][j[is_made]]
            self._apply((high[is_made], low[is_made]), places, leaving[is_made], entering[is_made], growth[is_made])

    def _change_of_squares(
        self, pairs: tuple[IntArray, IntArray], given: IntArray, taken: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return (P, O, O') half of what exchanges add to the weighted squares of the excess, and scratch space.

        A group of weight v and excess e that gives s = a - b adds v (s^2 / 2 - s e), one that takes it adds
        v (s^2 / 2 + s e). With w the mean of the weights and d = v e - v' e', both add w s^2 - s d: a part of a, a part
        of b, and -2 w a b. Both arrays are valid until the next call.
        """
        high, low = pairs
        weights_high, weights_low = self._weights[:, high], self._weights[:, low]  # (q, P)
        difference = (weights_high * self.excess[:, high] - weights_low * self.excess[:, low])[:, :, None]
        weight = (weights_high + weights_low)[:, :, None] / 2
        a, b = _sum(self._loads[:, given]), _sum(self._loads[:, taken])  # (q, P, O)
        of_given = (a * (weight * a - difference)).sum(axis=0)
        of_taken = (b * (weight * b + difference)).sum(axis=0)
        change, products = self._arrays_of_shape((len(given), given.shape[1], taken.shape[1]))
        scaled = 2 * weight * a
        np.multiply(scaled[0][:, :, None], b[0][:, None], out=products)
        for load in range(1, len(a)):
            np.multiply(scaled[load][:, :, None], b[load][:, None], out=change)
            products += change
        np.add(of_given[:, :, None], of_taken[:, None], out=change)
        change -= products
        return change, products

    def _arrays_of_shape(self, shape: tuple[int, int, int]) -> tuple[FloatArray, FloatArray]:
        """Return two arrays in memory that all exchanges share, since new memory costs time."""
        size = math.prod(shape)
        if self._work_space is None or len(self._work_space[0]) < size:
            self._work_space = np.empty(size), np.empty(size)
        first, second = self._work_space
        return first[:size].reshape(shape), second[:size].reshape(shape)

    def _apply(
        self,
        pairs: tuple[IntArray, IntArray],
        places: tuple[IntArray, IntArray],
        leaving: IntArray,
        entering: IntArray,
        growth: IntArray,
    ) -> None:
        """Exchange the samples `leaving` (P, places) of the first groups for `entering` of the second.

        growth: (P,) samples that each first group has more afterwards.
        """
        high, low = pairs
        self.members[high[:, None], places[0]] = entering
        self.members[low[:, None], places[1]] = leaving
        self._sizes[high] += growth
        self._sizes[low] -= growth
        gain = _sum(self._loads[:, entering]) - _sum(self._loads[:, leaving])
        self.excess[:, high] += gain
        self.excess[:, low] -= gain
        for column, used, _ in self._limits:
            gain = _sum(column[entering]) - _sum(column[leaving])
            used[high] += gain
            used[low] -= gain

    def _offers(self, turn: int, num_exchanged: int) -> IntArray:
        """(O, num_exchanged) places that a group offers together in a round."""
        num_places = self.members.shape[1]
        first = turn * MAX_TRIED % num_places
        offers = self._offers_of_turn.get((first, num_exchanged))
        if offers is None:
            tried = (first + np.arange(min(num_places, MAX_TRIED))) % num_places
            offers = tried[np.array(list(combinations(range(len(tried)), num_exchanged)))]
            self._offers_of_turn[first, num_exchanged] = offers
        return offers


def _partners(low: IntArray, num_pairs: int, turn: int) -> IntArray:
    """Choose (num_pairs * K,) partners for groups, those of the first group first; later turns choose others.

    low: at least `num_pairs` groups, those that should be chosen first in front.
    """
    num_partners = max(min(MAX_TRIED, PAIRS_AT_A_TIME // num_pairs, len(low) // num_pairs), 1)
    chosen = np.roll(low, -turn)[: num_pairs * num_partners]
    return chosen.reshape(num_partners, num_pairs).T.ravel()


def _moved(column: FloatArray, given: IntArray, taken: IntArray, out: FloatArray) -> FloatArray:
    """Write into `out` (P, O, O') what exchanges move to the other group: offers (P, O, places), (P, O', places)."""
    moved: FloatArray = np.subtract(_sum(column[given])[:, :, None], _sum(column[taken])[:, None], out=out)
    return moved


def _sum(values: FloatArray) -> FloatArray:
    """Add the last axis, which has one or two places."""
    total: FloatArray = values[..., 0] if values.shape[-1] == 1 else values[..., 0] + values[..., 1]
    return total
