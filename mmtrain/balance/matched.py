"""Matched grouping: tight packing inside a shuffled window, and steps whose replicas are near equal."""

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.grouping import SampleGroups, best_fit
from mmtrain.balance.steps import assemble_steps

SLACK = 1 / 90  # share of a budget left free by packing: room for exchange, paid for with that much fill
TALL, SMALL = 0.5, 0.05  # shares of a budget: above the one a sample is packed first, below the other last
MOST_ROUNDS = 256


def group_matched(
    tokens: IntArray,
    budgets: IntArray,
    order: IntArray,
    window: int,
    even: FloatArray,
    num_replicas: int,
    rng: np.random.Generator,
) -> SampleGroups:
    """Group the samples of `order`, and lay the groups out in steps of `num_replicas` that are even.

    tokens: (n, m) sizes under m budgets (m,). order: (k,) rows of `tokens` in shuffled order; a row that occurs twice
    is used twice. even: (q, m): `tokens @ even.T` are the loads to even out among the replicas of a step, the coarsest
    first (see `assemble_steps`). Every sample is used once, none further than `window` places from where the shuffle
    put it. Raises ValueError for a sample above a budget alone.

    What ISF leaves to chance is searched for here: best fit inside the window fills groups to nearly all of their
    budget; groups alike run side by side; what unevenness is left is exchanged away. The price is randomness inside
    the window: which samples share a group depends on their sizes. Which steps come when does not.
    """
    groups, windows = pack_with_slack(tokens, budgets, order, window)
    rounds = num_search_rounds(num_replicas)
    return assemble_steps(groups, windows, tokens, budgets, even, num_replicas, rounds, rng)


def num_search_rounds(num_replicas: int) -> int:
    """Exchange rounds a load: more groups side by side have more to even out, up to a limit of time."""
    return min(4 * num_replicas, MOST_ROUNDS)


def pack_with_slack(tokens: IntArray, budgets: IntArray, order: IntArray, window: int) -> tuple[SampleGroups, IntArray]:
    """The first half of `group_matched`: groups, tight but for some slack, that `assemble_steps` can even out.

    Returns the groups, unordered inside each window of `window` places, and (W + 1,) where windows start among them.
    """
    if len(order) and (tokens[order] > budgets).any():
        raise ValueError("a sample is above a budget alone")
    samples, sizes, windows = [np.empty(0, dtype=np.int64)], [np.zeros(1, dtype=np.int64)], [0]
    for lo in range(0, len(order), window):
        part = order[lo : lo + window]
        own = tokens[part]
        group = best_fit(own, _packed_to(own, budgets), _packing_order(own, budgets))
        samples.append(part[np.argsort(group, kind="stable")])
        sizes.append(np.bincount(group))
        windows.append(windows[-1] + len(sizes[-1]))
    return SampleGroups(np.cumsum(np.concatenate(sizes)), np.concatenate(samples)), np.array(windows)


def _packed_to(tokens: IntArray, budgets: IntArray) -> IntArray:
    """What packing fills groups to: budgets that bind less some slack, but not less than the largest sample."""
    slack = np.where(tokens.sum(axis=0) > budgets, np.floor(budgets * SLACK).astype(np.int64), 0)
    room: IntArray = np.maximum(budgets - slack, tokens.max(axis=0))
    return room


def _packing_order(tokens: IntArray, budgets: IntArray) -> IntArray:
    """Tall samples first, largest first; then the bulk as shuffled; small samples last, to fill the gaps.

    Packed by size alone, all large samples of one kind would end up together, and groups would be less alike.
    """
    share = (tokens / budgets).max(axis=1)
    kind = np.where(share > TALL, 0, np.where(share > SMALL, 1, 2))
    order: IntArray = np.lexsort((np.where(kind == 1, 0.0, -share), kind))
    return order
