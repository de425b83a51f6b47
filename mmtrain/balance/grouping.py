"""Which samples share a group: ISF, the fixed-size baselines, and packing by best fit inside a shuffled window.

Every function here uses each sample of its order exactly once and is a pure function of its arguments and the random
generator it is handed.
"""

from bisect import insort
from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch_meta import IntArray


@dataclass(frozen=True)
class SampleGroups:
    """Groups in the order they are trained on; group i holds `samples[first[i]:first[i + 1]]`."""

    first: IntArray  # (G + 1,)
    samples: IntArray  # (n,)

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, i: int) -> IntArray:
        return self.samples[self.first[i] : self.first[i + 1]]

    @property
    def sizes(self) -> IntArray:
        """(G,) samples in each group."""
        return np.diff(self.first)

    def loads(self, tokens: IntArray) -> IntArray:
        """(G, m) what each group sums to, of `tokens` (n, m)."""
        if not len(self):
            return np.empty((0, tokens.shape[1]), dtype=np.int64)
        sums: IntArray = np.add.reduceat(tokens[self.samples], self.first[:-1], axis=0)
        return sums

    def reordered(self, order: IntArray) -> "SampleGroups":
        """The groups `order` (k,) names, in that order; each keeps its samples as they are."""
        sizes = self.sizes[order]
        first = np.concatenate([[0], np.cumsum(sizes)])
        within = np.arange(first[-1]) - np.repeat(first[:-1], sizes)
        return SampleGroups(first, self.samples[np.repeat(self.first[order], sizes) + within])


def group_by_isf(
    tokens: IntArray, budgets: IntArray, fill: IntArray, rounds: int, rng: np.random.Generator
) -> SampleGroups:
    """Iterative sampling and filtering (OmniBal): fill groups from a shuffle, keep the full ones, shuffle the rest.

    tokens: (n, m) sizes under m budgets. budgets: (m,); a group closes before the sample that would pass one of them.
    fill: (m,); a closed group is kept if it reaches any of these, else its samples return to the pool. After `rounds`
    rounds what is left is grouped as it falls, so that every sample is used exactly once: nothing is dropped, and the
    last groups are as empty as chance makes them. A sample above a budget alone becomes a group of its own.

    Groups come out in random order. The published defaults: budgets = (longest sample, that times tiles per token),
    fill = (longest sample - 128, the tile budget).
    """
    columns = [np.ascontiguousarray(column) for column in tokens.T]
    pool = np.arange(len(tokens), dtype=np.int64)
    parts: list[SampleGroups] = []
    for _ in range(rounds):
        order = rng.permutation(pool)
        groups, loads = _fill_in_order(columns, budgets, order)
        full = (loads >= fill[:, None]).any(axis=0)
        kept = np.repeat(full, groups.sizes)
        parts.append(SampleGroups(np.concatenate([[0], np.cumsum(groups.sizes[full])]), order[kept]))
        pool = order[~kept]
    parts.append(_fill_in_order(columns, budgets, rng.permutation(pool))[0])
    together = _concatenate(parts)
    return together.reordered(rng.permutation(len(together)))


def group_randomly(tokens: IntArray, budgets: IntArray, batch: int, rng: np.random.Generator) -> SampleGroups:
    """Baseline: mini-batches of `batch` samples as they fall, what a plain data loader does.

    tokens: (n, m), budgets: (m,); a mini-batch that would pass a budget closes before it is full.
    """
    return _batches(tokens, budgets, batch, rng.permutation(len(tokens)))


def group_by_length(
    tokens: IntArray, budgets: IntArray, batch: int, window: int, rng: np.random.Generator
) -> SampleGroups:
    """Baseline: mini-batches of samples of similar length, sorted inside shuffled windows; little padding.

    tokens: (n, m), the length first. Mini-batches close early at a budget (m,). They come out in random order, so the
    replicas of a step are as uneven as lengths are.
    """
    order = _sorted_in_windows(tokens[:, 0], rng.permutation(len(tokens)), window)
    groups = _batches(tokens, budgets, batch, order)
    return groups.reordered(rng.permutation(len(groups)))


def group_across_devices(
    tokens: IntArray, budgets: IntArray, batch: int, num_replicas: int, window: int, rng: np.random.Generator
) -> SampleGroups:
    """Baseline: the samples at one place of all replicas' mini-batches are of similar length; much padding.

    tokens: (n, m), the length first. A step's mini-batches close together, when `batch` samples are in each or one of
    them could pass a budget (m,). Groups come in step order, `num_replicas` at a time. Samples that do not fill a step
    form the last groups.
    """
    ordered = _sorted_in_windows(tokens[:, 0], rng.permutation(len(tokens)), window)
    num_rows = len(ordered) // (num_replicas * batch) * batch
    rows = rng.permutation(ordered[: num_rows * num_replicas].reshape(num_rows, num_replicas))
    steps = _batches(tokens[rows].max(axis=1), budgets, batch, np.arange(num_rows, dtype=np.int64))
    dealt = [rows[steps[i]].T.ravel() for i in range(len(steps))]
    last = _batches(tokens, budgets, batch, ordered[num_rows * num_replicas :])
    sizes = np.concatenate([np.repeat(steps.sizes, num_replicas), last.sizes])
    return SampleGroups(
        np.concatenate([[0], np.cumsum(sizes)]), np.concatenate([*dealt, last.samples]).astype(np.int64)
    )


def pack_groups(tokens: IntArray, budgets: IntArray, order: IntArray, window: int) -> SampleGroups:
    """Pack the samples of `order` into groups that stay within every budget.

    tokens: (n, m) sizes of each sample under m budgets. budgets: (m,). order: (k,) rows of `tokens` in shuffled
    order; a row that occurs twice is packed twice. No sample moves further than its window of `window` places, so
    that the stream stays as random as the shuffle. A sample above a budget alone is the caller's error.

    Inside a window the largest samples go first, each into the group it leaves least room in. Groups come out in an
    order drawn from the shuffle, independent of their size; inside a group samples keep their order.
    """
    if len(order) and (tokens[order] > budgets).any():
        raise ValueError("a sample is above a budget alone")
    parts = [order[lo : lo + window] for lo in range(0, len(order), window)]
    members = [
        _emission_order(best_fit(tokens[part], budgets, _largest_first(tokens[part], budgets)), part) for part in parts
    ]
    groups = [group for window_groups in members for group in window_groups]
    sizes = np.array([0, *map(len, groups)], dtype=np.int64)
    samples = np.concatenate(groups) if groups else np.empty(0, dtype=np.int64)
    return SampleGroups(np.cumsum(sizes), samples.astype(np.int64))


def _largest_first(tokens: IntArray, budgets: IntArray) -> IntArray:
    """Rows by the share of a budget they fill."""
    order: IntArray = np.argsort(-(tokens / budgets).max(axis=1), kind="stable")
    return order


def best_fit(tokens: IntArray, budgets: IntArray, order: IntArray) -> IntArray:
    """Put the rows of `tokens` (k, m), in `order`, each into the group it leaves least room in; returns (k,) groups.

    Groups are numbered as they were opened. No group passes a budget (m,), no row may be above one alone.
    "Least room" counts under the budget that the window as a whole presses hardest; the others only bound. Open
    groups wait in one list for each amount of room under it, and one integer with a bit for each non-empty list finds
    the least room that suffices without looking at the groups.
    """
    tight = int((tokens.sum(axis=0) / budgets).argmax())
    if (np.delete(tokens.sum(axis=0) - budgets, tight) <= 0).all():  # the others bind nothing
        return _best_fit_of_one(tokens[:, tight], int(budgets[tight]), order)
    group = np.empty(len(tokens), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(int(budgets[tight]) + 1)]
    rooms = 0
    left: list[list[int]] = []  # room of each group under every budget
    sizes, whole = tokens.tolist(), budgets.tolist()
    for i in order.tolist():
        size = sizes[i]
        best = _least_room(with_room, rooms >> size[tight], size, left, tight)
        if best is None:
            best = len(left)
            left.append(list(whole))
        else:
            heap = with_room[left[best][tight]]
            heap.remove(best)
            if not heap:
                rooms ^= 1 << left[best][tight]
        left[best] = [room - part for room, part in zip(left[best], size, strict=True)]
        room = left[best][tight]
        insort(with_room[room], best)
        rooms |= 1 << room
        group[i] = best
    return group


def _best_fit_of_one(sizes: IntArray, budget: int, order: IntArray) -> IntArray:
    """`best_fit` under one budget: the same groups in a third of the time."""
    group = np.empty(len(sizes), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(budget + 1)]
    bits = [1 << room for room in range(budget + 1)]
    rooms, opened = 0, 0
    chosen = []
    for size in sizes[order].tolist():
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            groups = with_room[room]
            best = groups.pop(0)
            if not groups:
                rooms ^= bits[room]
        else:
            best, room = opened, budget
            opened += 1
        there = with_room[room - size]
        if there:
            insort(there, best)
        else:
            there.append(best)
            rooms |= bits[room - size]
        chosen.append(best)
    group[order] = chosen
    return group


def _least_room(
    with_room: list[list[int]], candidates: int, size: list[int], left: list[list[int]], tight: int
) -> int | None:
    """The open group with the least sufficient room, the oldest of equals; None if none has room.

    candidates: bit r is set if some group has room r + size[tight] under the tight budget.
    """
    while candidates:
        lowest = candidates & -candidates
        for group in with_room[lowest.bit_length() - 1 + size[tight]]:
            if all(room >= part for room, part in zip(left[group], size, strict=True)):
                return group
        candidates ^= lowest
    return None


def _emission_order(group: IntArray, part: IntArray) -> list[IntArray]:
    """Collect each group's samples and shuffle the groups.

    The ranks of the window's first sample numbers serve as the permutation: as random as the shuffle they come from,
    and unrelated to the sizes that decided when a group was opened.
    """
    num_groups = int(group.max()) + 1
    by_group = part[np.argsort(group, kind="stable")]
    cuts = np.cumsum(np.bincount(group, minlength=num_groups))[:-1]
    members = np.split(by_group, cuts)
    return [members[i] for i in np.argsort(part[:num_groups], kind="stable")]


def _concatenate(parts: list[SampleGroups]) -> SampleGroups:
    """All groups of `parts`, in order."""
    sizes = np.concatenate([part.sizes for part in parts])
    return SampleGroups(np.concatenate([[0], np.cumsum(sizes)]), np.concatenate([part.samples for part in parts]))


def _fill_in_order(columns: list[IntArray], budgets: IntArray, order: IntArray) -> tuple[SampleGroups, IntArray]:
    """Close a group before the sample that would pass a budget; returns the groups and their loads (m, G).

    columns: m arrays (n,) of sizes. Where a group that starts at place s ends depends on s alone, so it is looked up
    for all s at once, and the groups are the chain 0 -> end(0) -> end(end(0)) ...
    """
    num = len(order)
    upto = np.zeros((len(columns), num + 1), dtype=np.int64)  # sums of the first 0, 1, ... samples
    for sums, column in zip(upto, columns, strict=True):
        np.cumsum(column.take(order), out=sums[1:])
    ends = np.full(num, num, dtype=np.int64)
    for sums, budget in zip(upto, budgets, strict=True):
        over = np.flatnonzero(sums[ends] > sums[:-1] + budget)  # only these end earlier for this budget's sake
        ends[over] = np.searchsorted(sums, sums[over] + budget, side="right") - 1
    end_of = memoryview(np.maximum(ends, np.arange(1, num + 1)).data)
    chain, place = [0], 0
    while place < num:
        place = end_of[place]
        chain.append(place)
    groups = SampleGroups(np.array(chain, dtype=np.int64), order)
    return groups, np.diff(upto[:, groups.first], axis=1)


def _batches(tokens: IntArray, budgets: IntArray, batch: int, order: IntArray) -> SampleGroups:
    """Consecutive mini-batches of `batch` samples, fewer where a budget would be passed and at the end."""
    columns = [*(np.ascontiguousarray(column) for column in tokens.T), np.ones(len(tokens), dtype=np.int64)]
    return _fill_in_order(columns, np.append(budgets, batch), order.astype(np.int64))[0]


def _sorted_in_windows(lengths: IntArray, order: IntArray, window: int) -> IntArray:
    """`order` with each run of `window` samples sorted by length."""
    return order[np.lexsort((lengths[order], np.arange(len(order)) // window))]
