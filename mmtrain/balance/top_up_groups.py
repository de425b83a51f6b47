"""Groups that packing left half empty, filled by small samples of many others."""

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.balance.grouping import SampleGroups

LOW, FULL = 0.9, 0.99  # of the mean load: groups below the one are filled up to the other
SMALL = 0.08  # of the mean load: the most that one group gives away
FEW = 0.1  # of the groups: where more are low, the data is too coarse for this to help


def top_up(groups: SampleGroups, tokens: IntArray) -> SampleGroups:
    """Move small samples into groups with much less under the first column of `tokens` (n, m) than the mean.

    The last group of a window holds what was left, and one that had to be halved for the number of groups holds half:
    beside full groups of one sample each, nothing that happens inside a step can help them. So up to the mean each
    takes samples that have nothing under the other columns, at most one from each full group, and from the fullest
    first. Groups keep their places, and no group becomes fuller than the mean by this.
    """
    if not len(groups):
        return groups
    size = tokens[groups.samples, 0]
    loads = groups.loads(tokens[:, :1])[:, 0].astype(np.float64)
    mean = loads.mean()
    low = np.flatnonzero(loads < LOW * mean)
    if not 0 < len(low) <= FEW * len(groups):
        return groups
    group_of = np.repeat(np.arange(len(groups)), groups.sizes)
    plain = (tokens[groups.samples, 1:] == 0).all(axis=1) & (size > 0) & (size <= SMALL * mean)
    places = np.flatnonzero(plain & (loads >= LOW * mean)[group_of] & (groups.sizes > 1)[group_of])
    places = places[np.argsort(-size[places], kind="stable")]  # each gives its largest, so that few must give
    _, first = np.unique(group_of[places], return_index=True)
    places = places[first]
    places = places[np.argsort(-loads[group_of[places]], kind="stable")]
    to = group_of.copy()
    taken = np.zeros(len(places), dtype=bool)
    for group in low.tolist():
        for i in np.flatnonzero(~taken).tolist():
            if loads[group] >= FULL * mean:
                break
            if loads[group] + size[places[i]] <= mean:
                taken[i], to[places[i]] = True, group
                loads[group] += size[places[i]]
    order = np.argsort(to, kind="stable")
    return SampleGroups(np.concatenate([[0], np.cumsum(np.bincount(to, minlength=len(groups)))]), groups.samples[order])
