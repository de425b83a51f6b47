"""Pack a shuffled window tightly, but leave the slack that balancing needs: the first half of matched grouping."""

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.grouping.pack_groups import SampleGroups, best_fit

# `python -m scripts.bench_shapes --only fill` prints what these do to lengths of 14 shapes. Each packing leaves a share
# of a budget free, which is room for exchanges, and may need that many more groups than packing by size.
SLACKS = ((1 / 1000, 0.003), (1 / 3000, 0.003), (0.0, 0.003))  # the first that is few groups; else by size
ROOMY_SLACK = (1 / 250, 0.006)  # scripts/bench_balance.py at 1,024 x 8: tiles of a step 0.013 uneven, without 0.026
LARGE_SAMPLE_SHARE = 0.5  # of a budget; samples above it are packed first
SMALL_SAMPLE_SHARE = 0.05  # of a budget; samples below it are packed last


def pack_with_slack(tokens: IntArray, budgets: IntArray, order: IntArray, roomy: bool = False) -> SampleGroups:
    """Pack the samples of one window into hardly more groups than by size, but with groups alike and with some slack.

    tokens: (n, m) sizes under m budgets (m,). order: (k,) rows of `tokens` in shuffled order; a row that occurs twice
    is packed twice. roomy: whether evenness may cost twice as many groups, where encoders are to be balanced. Groups
    come out in the order in which they were opened. Raises ValueError for a sample above a budget alone.

    Which packing is tight depends on the lengths: where two of them fill a budget, a thousandth of slack takes up to
    twice as many groups; samples in shuffled order fill groups as well as samples by size if there are small ones, and
    badly if there are none. So several are tried, those that are best for balance first.
    """
    if not len(order):
        return SampleGroups(np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64))
    sizes = tokens[order]
    if (sizes > budgets).any():
        raise ValueError("a sample is above a budget alone")
    group = _pack(sizes, budgets, roomy)
    first = np.concatenate([[0], np.cumsum(np.bincount(group))])
    return SampleGroups(first, order[np.argsort(group, kind="stable")])


def _pack(sizes: IntArray, budgets: IntArray, roomy: bool) -> IntArray:
    """Return (k,) groups of the first packing that needs few groups."""
    share = (sizes / budgets).max(axis=1)
    by_size = best_fit(sizes, budgets, np.argsort(-share, kind="stable"))
    num_by_size = int(by_size.max()) + 1
    order = _bulk_as_shuffled(share)
    has_encoders = bool(sizes[:, 1:].any())  # LLM tokens alone are even where groups are full
    for slack_share, max_extra in (ROOMY_SLACK, *SLACKS) if roomy and has_encoders else SLACKS:
        group = best_fit(sizes, _budgets_with_slack(sizes, budgets, slack_share), order)
        if group.max() < int(num_by_size * (1 + max_extra)):
            return group
    return by_size


def _budgets_with_slack(sizes: IntArray, budgets: IntArray, slack_share: float) -> IntArray:
    """Reduce the budgets that bind by some slack, but not below the largest sample."""
    slack = np.where(sizes.sum(axis=0) > budgets, np.floor(budgets * slack_share).astype(np.int64), 0)
    reduced: IntArray = np.maximum(budgets - slack, sizes.max(axis=0))
    return reduced


def _bulk_as_shuffled(share: FloatArray) -> IntArray:
    """Order large samples first, largest first; then the bulk as shuffled; small samples last, to fill the gaps.

    Packed by size alone, all large samples of one kind would end up together, and groups would be less alike.
    """
    size_class = np.where(share > LARGE_SAMPLE_SHARE, 0, np.where(share > SMALL_SAMPLE_SHARE, 1, 2))
    order: IntArray = np.lexsort((np.where(size_class == 1, 0.0, -share), size_class))
    return order
