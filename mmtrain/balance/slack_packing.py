"""Pack a shuffled window tightly, but leave the slack that balancing needs: the first half of matched grouping."""

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.balance.grouping import SampleGroups, best_fit

SLACK_SHARE = 1 / 90  # of a budget, left free by packing: room for exchanges, paid for with that much fill
LARGE_SAMPLE_SHARE = 0.5  # of a budget; samples above it are packed first
SMALL_SAMPLE_SHARE = 0.05  # of a budget; samples below it are packed last


def pack_with_slack(tokens: IntArray, budgets: IntArray, order: IntArray) -> SampleGroups:
    """Pack the samples of one window into groups, tight except for some slack.

    tokens: (n, m) sizes under m budgets (m,). order: (k,) rows of `tokens` in shuffled order; a row that occurs twice
    is packed twice. Groups come out in the order in which they were opened. Raises ValueError for a sample above a
    budget alone.
    """
    if not len(order):
        return SampleGroups(np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64))
    sizes = tokens[order]
    if (sizes > budgets).any():
        raise ValueError("a sample is above a budget alone")
    group = best_fit(sizes, _budgets_with_slack(sizes, budgets), _packing_order(sizes, budgets))
    first = np.concatenate([[0], np.cumsum(np.bincount(group))])
    return SampleGroups(first, order[np.argsort(group, kind="stable")])


def _budgets_with_slack(tokens: IntArray, budgets: IntArray) -> IntArray:
    """Reduce the budgets that bind by some slack, but not below the largest sample."""
    slack = np.where(tokens.sum(axis=0) > budgets, np.floor(budgets * SLACK_SHARE).astype(np.int64), 0)
    reduced: IntArray = np.maximum(budgets - slack, tokens.max(axis=0))
    return reduced


def _packing_order(tokens: IntArray, budgets: IntArray) -> IntArray:
    """Order large samples first, largest first; then the bulk as shuffled; small samples last, to fill the gaps.

    Packed by size alone, all large samples of one kind would end up together, and groups would be less alike.
    """
    share = (tokens / budgets).max(axis=1)
    size_class = np.where(share > LARGE_SAMPLE_SHARE, 0, np.where(share > SMALL_SAMPLE_SHARE, 1, 2))
    order: IntArray = np.lexsort((np.where(size_class == 1, 0.0, -share), size_class))
    return order
