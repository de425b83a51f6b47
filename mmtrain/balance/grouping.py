"""Packing samples into groups: best fit inside windows of the shuffled order (the packing half of matched grouping)."""

from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch import IntArray


@dataclass(frozen=True)
class Groups:
    """Groups in the order they are trained on; group i holds `samples[first[i]:first[i + 1]]`."""

    first: IntArray  # (G + 1,)
    samples: IntArray  # (n,)

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, i: int) -> IntArray:
        return self.samples[self.first[i] : self.first[i + 1]]


def pack(tokens: IntArray, budgets: IntArray, order: IntArray, window: int) -> Groups:
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
    members = [_emission_order(_pack_window(tokens[part], budgets), part) for part in parts]
    groups = [group for window_groups in members for group in window_groups]
    sizes = np.array([0, *map(len, groups)], dtype=np.int64)
    samples = np.concatenate(groups) if groups else np.empty(0, dtype=np.int64)
    return Groups(np.cumsum(sizes), samples.astype(np.int64))


def _pack_window(tokens: IntArray, budgets: IntArray) -> IntArray:
    """Best-fit decreasing; returns (k,) the group of each sample, groups numbered as they were opened."""
    share = (tokens / budgets).max(axis=1)
    room = np.empty((len(budgets), len(tokens)), dtype=np.int64)  # (m, groups) contiguous per budget: one scan each
    group = np.empty(len(tokens), dtype=np.int64)
    num_open = 0
    slack = np.empty(len(tokens), dtype=np.float64)  # room left in a group, as a sum of shares; the fit to minimise
    for i in np.argsort(-share, kind="stable"):
        size = tokens[i]
        best = _best_fit(room[:, :num_open], slack[:num_open], size)
        if best is None:
            best, num_open = num_open, num_open + 1
            room[:, best] = budgets
        room[:, best] -= size
        slack[best] = (room[:, best] / budgets).sum()
        group[i] = best
    return group


def _best_fit(room: IntArray, slack: np.ndarray, size: IntArray) -> int | None:
    """The open group that has room for `size` and the least slack, the oldest of equals; None if none has room."""
    if not len(slack):
        return None
    fits = room[0] >= size[0]
    for budget in range(1, len(size)):
        fits &= room[budget] >= size[budget]
    best = int(np.where(fits, slack, np.inf).argmin())
    return best if fits[best] else None


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
