"""Decide which samples share a group: ISF, the fixed-size baselines, and packing by best fit in a shuffled window.

Every function here uses each sample of its order exactly once (ISF can leave out its remainder), and depends on nothing
but its arguments, the random generator among them.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from operator import gt

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray, SampleTokens
from mmtrain.balance.check_lengths import check_lengths


@dataclass(frozen=True)
class SampleGroups:
    """Groups in the order in which they are trained on; group i holds `samples[first[i]:first[i + 1]]`."""

    first: IntArray  # (G + 1,)
    samples: IntArray  # (n,)

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, i: int) -> IntArray:
        return self.samples[self.first[i] : self.first[i + 1]]

    @property
    def sizes(self) -> IntArray:
        """Count (G,) the samples in each group."""
        return np.diff(self.first)

    def loads(self, tokens: IntArray | SampleTokens) -> IntArray:
        """Return (G, m) the sum over each group of `tokens` (n, m)."""
        if not len(self):
            return np.empty((0, tokens.shape[1]), dtype=np.int64)
        sums: IntArray = np.add.reduceat(tokens[self.samples], self.first[:-1], axis=0)
        return sums

    def reordered(self, order: IntArray) -> "SampleGroups":
        """Return the groups that `order` (k,) names, in that order; each keeps its samples as they are."""
        sizes = self.sizes[order]
        first = np.concatenate([[0], np.cumsum(sizes)])
        within = np.arange(first[-1]) - np.repeat(first[:-1], sizes)
        return SampleGroups(first, self.samples[np.repeat(self.first[order], sizes) + within])


@dataclass(frozen=True)
class GroupingSizes:
    """What grouping counts of every sample, what bounds it, and which loads are to be balanced."""

    tokens: IntArray | SampleTokens  # (n, m) of each sample under each budget, the LLM's first
    budgets: IntArray  # (m,) that no group may pass
    load_matrix: FloatArray  # (q, m): `tokens @ load_matrix.T` are the loads to balance, the coarsest first
    weights: FloatArray  # (q,) what a share of each load's mean counts
    batch: int = 1  # samples in a mini-batch of the methods that count samples


def group_by_isf(
    tokens: IntArray,
    budgets: IntArray,
    fill: IntArray,
    rounds: int,
    rng: np.random.Generator,
    keep_remainder: bool = True,
) -> SampleGroups:
    """Group by iterative sampling and filtering (ISF, OmniBal, arXiv 2407.20761).

    Fill groups from a shuffle, keep the full ones, shuffle the samples of the others again.

    tokens: (n, m) sizes under m budgets. budgets: (m,); a group closes before the sample that would pass one of them.
    fill: (m,); a closed group is kept if it reaches any of these, else its samples return to the pool. After `rounds`
    rounds the samples that are left are grouped in the order of one more shuffle. So every sample is used exactly once,
    and the last groups are as empty as chance makes them. A sample above a budget alone becomes a group of its own.
    keep_remainder: False leaves these last groups out, unless there are no others.

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
        in_full_group = np.repeat(full, groups.sizes)
        parts.append(SampleGroups(np.concatenate([[0], np.cumsum(groups.sizes[full])]), order[in_full_group]))
        pool = order[~in_full_group]
    if keep_remainder or not any(len(part) for part in parts):
        parts.append(_fill_in_order(columns, budgets, rng.permutation(pool))[0])
    together = _concatenate(parts)
    return together.reordered(rng.permutation(len(together)))


def group_randomly(
    tokens: IntArray, budgets: IntArray, batch: int, rng: np.random.Generator, pad: bool = False
) -> SampleGroups:
    """Form mini-batches of `batch` samples in random order, as a plain data loader does (baseline).

    tokens: (n, m), budgets: (m,); a mini-batch that would pass a budget closes before it is full. pad: the first budget
    counts all samples of a mini-batch as long as its longest.
    """
    return _batches(tokens, budgets, batch, rng.permutation(len(tokens)), pad)


def group_by_length(
    tokens: IntArray, budgets: IntArray, batch: int, window: int, rng: np.random.Generator, pad: bool = False
) -> SampleGroups:
    """Form mini-batches of samples of similar length, sorted inside shuffled windows; little padding (baseline).

    tokens: (n, m), the length first. Mini-batches close early at a budget (m,). They come out in random order, so the
    replicas of a step are as uneven as lengths are. pad: as for `group_randomly`.
    """
    order = _sorted_in_windows(tokens[:, 0], rng.permutation(len(tokens)), window)
    groups = _batches(tokens, budgets, batch, order, pad)
    return groups.reordered(rng.permutation(len(groups)))


def group_across_devices(
    tokens: IntArray,
    budgets: IntArray,
    batch: int,
    num_replicas: int,
    window: int,
    rng: np.random.Generator,
    pad: bool = False,
) -> SampleGroups:
    """Give all replicas' mini-batches samples of similar length at the same position; much padding (baseline).

    tokens: (n, m), the length first. A step's mini-batches close together, when `batch` samples are in each or one of
    them could pass a budget (m,). Groups come in step order, `num_replicas` at a time. Samples that do not fill a step
    form the last groups. pad: as for `group_randomly`.
    """
    ordered = _sorted_in_windows(tokens[:, 0], rng.permutation(len(tokens)), window)
    num_rows = len(ordered) // (num_replicas * batch) * batch
    rows = rng.permutation(ordered[: num_rows * num_replicas].reshape(num_rows, num_replicas))
    steps = _batches(tokens[rows].max(axis=1), budgets, batch, np.arange(num_rows, dtype=np.int64), pad)
    by_step = [rows[steps[i]].T.ravel() for i in range(len(steps))]
    last = _batches(tokens, budgets, batch, ordered[num_rows * num_replicas :], pad)
    sizes = np.concatenate([np.repeat(steps.sizes, num_replicas), last.sizes])
    return SampleGroups(
        np.concatenate([[0], np.cumsum(sizes)]), np.concatenate([*by_step, last.samples]).astype(np.int64)
    )


def pack_groups(tokens: IntArray, budgets: IntArray, order: IntArray, window: int) -> SampleGroups:
    """Pack the samples of `order` into groups that stay within every budget.

    tokens: (n, m) sizes of each sample under m budgets. budgets: (m,). order: (k,) rows of `tokens` in shuffled
    order; a row that occurs twice is packed twice. No sample moves further than its window of `window` places, so that
    the stream stays as random as the shuffle. Raises ValueError for a sample above a budget alone, and for sizes
    that are not whole numbers from 0 to 2^40.

    Inside a window the largest samples go first, each into the group in which it leaves the least room. Groups come out
    in an order taken from the shuffle, independent of their size; inside a group samples keep their order.
    """
    check_lengths("tokens of samples", tokens)
    if len(order) and (tokens[order] > budgets).any():
        raise ValueError("a sample is above a budget alone")
    groups: list[IntArray] = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        group_of_sample = best_fit(tokens[part], budgets, _largest_first(tokens[part], budgets))
        groups += _in_shuffled_order(group_of_sample, part)
    sizes = np.array([0, *map(len, groups)], dtype=np.int64)
    samples = np.concatenate(groups) if groups else np.empty(0, dtype=np.int64)
    return SampleGroups(np.cumsum(sizes), samples.astype(np.int64))


def _largest_first(tokens: IntArray, budgets: IntArray) -> IntArray:
    """Order the rows by the largest share of a budget that each fills."""
    order: IntArray = np.argsort(-(tokens / budgets).max(axis=1), kind="stable")
    return order


def best_fit(tokens: IntArray, budgets: IntArray, order: IntArray) -> IntArray:
    """Put the rows of `tokens` (k, m), in `order`, each into the group in which it leaves the least room.

    Returns (k,) groups, numbered as they were opened. No group passes a budget (m,); no row may be above one alone.
    Room counts under the tight budget, the one that the window as a whole fills most; the others only bound. Groups are
    listed by their room under it, and a sorted list of the rooms that occur gives the least one that suffices without
    looking at the groups.
    """
    tight = int((tokens.sum(axis=0) / budgets).argmax())
    if (np.delete(tokens.sum(axis=0) - budgets, tight) <= 0).all():  # the other budgets bind nothing
        return _best_fit_of_one_budget(tokens[:, tight], int(budgets[tight]), order)
    group_of_row = np.empty(len(tokens), dtype=np.int64)
    groups_by_room: defaultdict[int, list[int]] = defaultdict(list)
    tight_rooms: list[int] = []  # of some group each, ascending
    rooms: list[list[int]] = []  # of each group under every budget
    sizes, empty_group = tokens.tolist(), budgets.tolist()
    for i in order.tolist():
        size = sizes[i]
        best = _group_with_least_room(groups_by_room, tight_rooms, size, rooms, tight)
        if best is None:
            best = len(rooms)
            rooms.append(list(empty_group))
        else:
            same_room = groups_by_room[rooms[best][tight]]
            same_room.remove(best)
            if not same_room:
                del groups_by_room[rooms[best][tight]]
                del tight_rooms[bisect_left(tight_rooms, rooms[best][tight])]
        rooms[best] = [room - part for room, part in zip(rooms[best], size, strict=True)]
        room = rooms[best][tight]
        if room not in groups_by_room:
            insort(tight_rooms, room)
        insort(groups_by_room[room], best)
        group_of_row[i] = best
    return group_of_row


def _best_fit_of_one_budget(sizes: IntArray, budget: int, order: IntArray) -> IntArray:
    """`best_fit` under one budget: the same groups in a third of the time, and in memory that no budget changes."""
    groups_by_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # of some group each, ascending
    num_groups = 0
    chosen = []
    for size in sizes[order].tolist():
        place = bisect_left(rooms, size)
        if place < len(rooms):
            room = rooms[place]
            same_room = groups_by_room[room]
            best = same_room.pop(0)
            if not same_room:
                del rooms[place], groups_by_room[room]
        else:
            best = num_groups
            room = budget
            num_groups += 1
        new_neighbors = groups_by_room[room - size]
        if not new_neighbors:
            insort(rooms, room - size)
        insort(new_neighbors, best)
        chosen.append(best)
    group_of_row = np.empty(len(sizes), dtype=np.int64)
    group_of_row[order] = chosen
    return group_of_row


def _group_with_least_room(
    groups_by_room: dict[int, list[int]],
    tight_rooms: list[int],
    size: list[int],
    rooms: list[list[int]],
    tight: int,
) -> int | None:
    """The group with the least sufficient room, the oldest one among equals; None if no group has room.

    tight_rooms: the rooms of all groups under the tight budget, ascending, each once.
    """
    for place in range(bisect_left(tight_rooms, size[tight]), len(tight_rooms)):
        for group in groups_by_room[tight_rooms[place]]:
            if all(room >= part for room, part in zip(rooms[group], size, strict=True)):
                return group
    return None


def _in_shuffled_order(group_of_sample: IntArray, part: IntArray) -> list[IntArray]:
    """Collect the samples of each group, and shuffle the groups.

    The ranks of the window's first sample numbers serve as the permutation. It is as random as the shuffle they come
    from, and unrelated to the sizes that decided when a group was opened.
    """
    num_groups = int(group_of_sample.max()) + 1
    by_group = part[np.argsort(group_of_sample, kind="stable")]
    ends = np.cumsum(np.bincount(group_of_sample, minlength=num_groups))[:-1]
    groups = np.split(by_group, ends)
    return [groups[i] for i in np.argsort(part[:num_groups], kind="stable")]


def _concatenate(parts: list[SampleGroups]) -> SampleGroups:
    """Join the groups of all parts, in order."""
    sizes = np.concatenate([part.sizes for part in parts])
    return SampleGroups(np.concatenate([[0], np.cumsum(sizes)]), np.concatenate([part.samples for part in parts]))


def _fill_in_order(columns: list[IntArray], budgets: IntArray, order: IntArray) -> tuple[SampleGroups, IntArray]:
    """Close a group before the sample that would pass a budget; return the groups and their loads (m, G).

    columns: m arrays (n,) of sizes. Where a group ends depends only on the place where it starts, so the end is looked
    up for all places at once, and the groups start at 0, end(0), end(end(0)) and so on.
    """
    num = len(order)
    sums_before = np.zeros((len(columns), num + 1), dtype=np.int64)  # of the first 0, 1, ... samples
    for sums, column in zip(sums_before, columns, strict=True):
        np.cumsum(column.take(order), out=sums[1:])
    ends = np.full(num, num, dtype=np.int64)
    for sums, budget in zip(sums_before, budgets, strict=True):
        too_full = np.flatnonzero(sums[ends] > sums[:-1] + budget)  # only these must end earlier for this budget
        ends[too_full] = np.searchsorted(sums, sums[too_full] + budget, side="right") - 1
    end_of = memoryview(np.maximum(ends, np.arange(1, num + 1)).data)
    starts = [0]
    while starts[-1] < num:
        starts.append(end_of[starts[-1]])
    groups = SampleGroups(np.array(starts, dtype=np.int64), order)
    return groups, np.diff(sums_before[:, groups.first], axis=1)


def _batches(tokens: IntArray, budgets: IntArray, batch: int, order: IntArray, pad: bool) -> SampleGroups:
    """Cut `order` into mini-batches of `batch` samples, fewer where a budget would be passed and at the end."""
    if pad:
        return _padded_batches(tokens, budgets, batch, order)
    columns = [*(np.ascontiguousarray(column) for column in tokens.T), np.ones(len(tokens), dtype=np.int64)]
    return _fill_in_order(columns, np.append(budgets, batch), order.astype(np.int64))[0]


def _padded_batches(tokens: IntArray, budgets: IntArray, batch: int, order: IntArray) -> SampleGroups:
    """Do what `_batches` does, but the first budget counts every sample of a mini-batch as its longest."""
    limits = budgets.tolist()
    starts = [0]
    longest, sums, size = 0, [0] * (len(limits) - 1), 0
    for place, (length, *others) in enumerate(tokens[order].tolist()):
        longest, size = max(longest, length), size + 1
        sums = [total + other for total, other in zip(sums, others, strict=True)]
        is_over = longest * size > limits[0] or any(map(gt, sums, limits[1:]))
        if size > 1 and (size > batch or is_over):
            starts.append(place)
            longest, sums, size = length, others, 1
    first = np.array([*starts, len(order)] if len(order) else [0], dtype=np.int64)
    return SampleGroups(first, order.astype(np.int64))


def _sorted_in_windows(lengths: IntArray, order: IntArray, window: int) -> IntArray:
    """Sort each run of `window` samples of `order` by length."""
    return order[np.lexsort((lengths[order], np.arange(len(order)) // window))]
