"""Whole steps without a modality: the last of it leaves groups that nearly lack it."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.grouping import SampleGroups

MOST_CLEARED = 0.5  # of a step's groups; beyond, groups without the load do little harm among others


def form_modality_free_steps(
    groups: SampleGroups, windows: IntArray, tokens: IntArray, budgets: IntArray, load: FloatArray, num_replicas: int
) -> SampleGroups:
    """Exchange samples between groups of a window until those without `load` fill whole steps of `num_replicas`.

    windows: (W + 1,) as in `steps.assemble`; tokens: (n, m), budgets: (m,), load: (n,) of each sample. Sixty groups of
    text beside four with an image are the most uneven step there is, and nothing that happens inside it can help. So
    the groups with the least load give away the samples that have any, one by one, each for a sample without from a
    group with much load, within the budgets. A window where that does not succeed in full is left as it is.
    """
    samples = groups.samples.copy()
    group_of = np.repeat(np.arange(len(groups)), groups.sizes)
    loads = np.bincount(group_of, weights=load[groups.samples], minlength=len(groups))
    used = groups.loads(tokens)
    for lo, hi in pairwise(windows.tolist()):
        here = np.arange(lo, hi)
        with_load = here[loads[lo:hi] > 0]
        missing = -(len(here) - len(with_load)) % num_replicas
        if not 0 < missing <= min(MOST_CLEARED * num_replicas, len(with_load) // 2):
            continue
        least_first = with_load[np.argsort(loads[with_load], kind="stable")]
        takers = np.zeros(len(groups), dtype=bool)
        takers[least_first[len(least_first) // 2 :]] = True
        places = np.arange(groups.first[lo], groups.first[hi])
        offered = places[(load[samples[places]] == 0) & takers[group_of[places]]]
        table = _Table(samples, tokens, budgets, load, group_of, used.copy())
        swaps: list[tuple[int, int]] = []
        for group in least_first[:missing].tolist():
            found = list(table.give_away(range(groups.first[group], groups.first[group + 1]), offered))
            if not all(found):
                break
            swaps += [swap for swap in found if swap]
        else:
            gone, come = np.array(swaps, dtype=np.int64).T
            samples[gone], samples[come] = samples[come], samples[gone]
    return SampleGroups(groups.first, samples)


class _Table:
    """Who holds what while samples change places; a group takes at most one."""

    def __init__(
        self,
        samples: IntArray,
        tokens: IntArray,
        budgets: IntArray,
        load: FloatArray,
        group_of: IntArray,
        used: IntArray,
    ) -> None:
        self._samples, self._tokens, self._budgets, self._load = samples, tokens, budgets, load
        self._group_of, self._used = group_of, used
        self._taken: set[int] = set()

    def give_away(self, places: range, offered: IntArray) -> Iterator[tuple[int, int] | None]:
        """For each sample with load at `places` the two places to exchange; None where no group can take it."""
        for place in places:
            if self._load[self._samples[place]] > 0:
                yield self._swap(place, offered)

    def _swap(self, place: int, offered: IntArray) -> tuple[int, int] | None:
        moved = self._tokens[self._samples[place]] - self._tokens[self._samples[offered]]  # (k, m)
        here, there = self._used[self._group_of[place]], self._used[self._group_of[offered]]
        fits = ((here - moved <= self._budgets) & (there + moved <= self._budgets)).all(axis=1)
        for i in np.flatnonzero(fits).tolist():
            group = int(self._group_of[offered[i]])
            if group not in self._taken:
                self._taken.add(group)
                self._used[self._group_of[place]] -= moved[i]
                self._used[group] += moved[i]
                return place, int(offered[i])
        return None
