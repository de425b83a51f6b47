"""Pack a shuffled window for matched grouping: tightly, with the slack that balancing needs, no group half empty."""

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray, SampleTokens
from mmtrain.balance.grouping.pack_groups import SampleGroups, best_fit

# `python -m scripts.bench_shapes --only fill` prints what these do to lengths of 14 shapes. Each packing leaves a share
# of a budget free, which is room for exchanges, and may need that many more groups than packing by size.
SLACKS = ((1 / 1000, 0.003), (1 / 3000, 0.003), (0.0, 0.003))  # the first that is few groups; else by size
ROOMY_SLACK = (1 / 250, 0.006)  # scripts/bench_balance.py at 1,024 x 8: tiles of a step 0.013 uneven, without 0.026
LARGE_SAMPLE_SHARE = 0.5  # of a budget; samples above it are packed first
SMALL_SAMPLE_SHARE = 0.05  # of a budget; samples below it are packed last
LOW_LOAD_SHARE = 0.9  # of the mean load: groups below it are topped up
FULL_LOAD_SHARE = 0.99  # of the mean load: groups above it take no more
MAX_GIVEN_LOAD_SHARE = 0.08  # of the mean load: the largest sample that a group gives away
MAX_LOW_GROUP_SHARE = 0.1  # of the groups: where more are low, samples are too large for this to help


def pack_with_slack(
    tokens: IntArray | SampleTokens, budgets: IntArray, order: IntArray, roomy: bool = False
) -> SampleGroups:
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


def top_up(groups: SampleGroups, tokens: IntArray | SampleTokens) -> SampleGroups:
    """Move small samples into groups whose load under the first column of `tokens` (n, m) is far below the mean.

    The last group of a window holds the samples that were left, and a group that was halved to reach the number of
    groups holds half: beside full groups of one sample each, no exchange inside a step can help them. So each takes
    samples that have nothing under the other columns, up to the mean load, at most one from each full group and from
    the fullest first. Groups keep their places, and no group becomes fuller than the mean by this.
    """
    if not len(groups):
        return groups
    of_samples = tokens[groups.samples]
    size = of_samples[:, 0]
    loads = np.add.reduceat(size, groups.first[:-1]).astype(np.float64)
    mean = loads.mean()
    low = np.flatnonzero(loads < LOW_LOAD_SHARE * mean)
    if not 0 < len(low) <= MAX_LOW_GROUP_SHARE * len(groups):
        return groups
    group_of = np.repeat(np.arange(len(groups)), groups.sizes)
    is_small = (of_samples[:, 1:] == 0).all(axis=1) & (size > 0) & (size <= MAX_GIVEN_LOAD_SHARE * mean)
    may_give = (loads >= LOW_LOAD_SHARE * mean) & (groups.sizes > 1)
    places = np.flatnonzero(is_small & may_give[group_of])
    places = places[np.argsort(-size[places], kind="stable")]  # each gives its largest, so that few must give
    _, first = np.unique(group_of[places], return_index=True)
    places = places[first]
    places = places[np.argsort(-loads[group_of[places]], kind="stable")]
    new_group = group_of.copy()
    is_moved = np.zeros(len(places), dtype=bool)
    for group in low.tolist():
        for i in np.flatnonzero(~is_moved).tolist():
            if loads[group] >= FULL_LOAD_SHARE * mean:
                break
            if loads[group] + size[places[i]] <= mean:
                is_moved[i] = True
                new_group[places[i]] = group
                loads[group] += size[places[i]]
    order = np.argsort(new_group, kind="stable")
    first_sample = np.concatenate([[0], np.cumsum(np.bincount(new_group, minlength=len(groups)))])
    return SampleGroups(first_sample, groups.samples[order])
