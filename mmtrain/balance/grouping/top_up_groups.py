"""Top up groups that packing left half empty with small samples of many other groups."""

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.balance.grouping.pack_groups import SampleGroups

LOW_LOAD_SHARE = 0.9  # of the mean load: groups below it are topped up
FULL_LOAD_SHARE = 0.99  # of the mean load: groups above it take no more
MAX_GIVEN_LOAD_SHARE = 0.08  # of the mean load: the largest sample that a group gives away
MAX_LOW_GROUP_SHARE = 0.1  # of the groups: where more are low, samples are too large for this to help


def top_up(groups: SampleGroups, tokens: IntArray) -> SampleGroups:
    """Move small samples into groups whose load under the first column of `tokens` (n, m) is far below the mean.

    The last group of a window holds the samples that were left, and a group that was halved to reach the number of
    groups holds half: beside full groups of one sample each, no exchange inside a step can help them. So each takes
    samples that have nothing under the other columns, up to the mean load, at most one from each full group and from
    the fullest first. Groups keep their places, and no group becomes fuller than the mean by this.
    """
    if not len(groups):
        return groups
    size = tokens[groups.samples, 0]
    loads = groups.loads(tokens[:, :1])[:, 0].astype(np.float64)
    mean = loads.mean()
    low = np.flatnonzero(loads < LOW_LOAD_SHARE * mean)
    if not 0 < len(low) <= MAX_LOW_GROUP_SHARE * len(groups):
        return groups
    group_of = np.repeat(np.arange(len(groups)), groups.sizes)
    is_small = (tokens[groups.samples, 1:] == 0).all(axis=1) & (size > 0) & (size <= MAX_GIVEN_LOAD_SHARE * mean)
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
