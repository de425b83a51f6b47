"""Form whole steps without a modality: exchange samples until the groups that lack it fill steps of their own."""

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.grouping import SampleGroups

MAX_CLEARED_STEP_SHARE = 0.5  # of a step's groups; with more to clear, groups without the load do little harm in a step


def form_modality_free_steps(
    groups: SampleGroups, tokens: IntArray, budgets: IntArray, load: FloatArray, num_replicas: int
) -> SampleGroups:
    """Exchange samples between the groups of a window until those without `load` fill whole steps of `num_replicas`.

    tokens: (n, m), budgets: (m,), load: (n,) of each sample. Sixty groups of text beside four with an image are the
    most uneven step there is, and no exchange inside such a step can help. So the groups with the least load give away
    each sample that has some, for a sample without load from a group with much load, within the budgets. If that does
    not succeed for enough groups, the groups are returned as they are.
    """
    group_of = np.repeat(np.arange(len(groups)), groups.sizes)
    loads = np.bincount(group_of, weights=load[groups.samples], minlength=len(groups))
    with_load = np.flatnonzero(loads > 0)
    num_missing = -(len(groups) - len(with_load)) % num_replicas
    if not 0 < num_missing <= min(MAX_CLEARED_STEP_SHARE * num_replicas, len(with_load) // 2):
        return groups
    ascending = with_load[np.argsort(loads[with_load], kind="stable")]
    is_taker = np.zeros(len(groups), dtype=bool)
    is_taker[ascending[len(ascending) // 2 :]] = True
    offered = np.flatnonzero((load[groups.samples] == 0) & is_taker[group_of])
    exchange = _Exchange(groups, group_of, tokens, budgets)
    swaps: list[tuple[int, int]] = []
    for group in ascending[:num_missing].tolist():
        for place in range(groups.first[group], groups.first[group + 1]):
            if load[groups.samples[place]] > 0:
                partner = exchange.find_partner(place, offered)
                if partner is None:
                    return groups
                swaps.append((place, partner))
    leaving, entering = np.array(swaps, dtype=np.int64).T
    samples = groups.samples.copy()
    samples[leaving], samples[entering] = samples[entering], samples[leaving]
    return SampleGroups(groups.first, samples)


class _Exchange:
    """What groups hold while places are exchanged; a group takes at most one sample."""

    def __init__(self, groups: SampleGroups, group_of: IntArray, tokens: IntArray, budgets: IntArray) -> None:
        self._groups = groups
        self._group_of = group_of
        self._tokens = tokens
        self._budgets = budgets
        self._used = groups.loads(tokens)
        self._takers: set[int] = set()

    def find_partner(self, place: int, offered: IntArray) -> int | None:
        """Find the first of the `offered` places (k,) whose sample can change places with the one at `place`.

        Counts the exchange as made. Returns None if no group can take the sample.
        """
        samples = self._groups.samples
        moved = self._tokens[samples[place]] - self._tokens[samples[offered]]  # (k, m)
        giver, takers = self._group_of[place], self._group_of[offered]
        fits_giver = self._used[giver] - moved <= self._budgets
        fits_taker = self._used[takers] + moved <= self._budgets
        for i in np.flatnonzero((fits_giver & fits_taker).all(axis=1)).tolist():
            taker = int(takers[i])
            if taker not in self._takers:
                self._takers.add(taker)
                self._used[giver] -= moved[i]
                self._used[taker] += moved[i]
                return int(offered[i])
        return None
