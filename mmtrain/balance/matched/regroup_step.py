"""Group the samples of a step anew for the replicas of a plan: rows of groups that are alike, side by side."""

import heapq
from collections.abc import Sequence

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.matched.group_exchange import GroupTable
from mmtrain.balance.matched.row_targets import CoarseLoad, adapt_targets, raise_to_row, row_targets

TOKENS_WEIGHT = 0.05  # of LLM tokens beside the loads, which have 1 together: budgets bind tokens
DENSE_TOKENS_WEIGHT = 0.02  # the same while only samples with much of the coarsest load are in groups
MIN_TARGET_SHARE = 0.2  # of the mean: an image more counts as much in rows with fewer than that
COARSE_TOLERANCE = 0.002  # of a group's mean load; or half a unit of a load that is coarser
TOKENS_TOLERANCE = 0.001  # of a group's mean
LARGE_TOKENS_EXCESS = 0.004  # the same for groups that have not come nearer by then
# Measured by scripts/bench_balance.py at 8 x 8 and 64 x 8: twice as many gain less than a tenth.
ROUNDS_OF_ONE = 4
ROUNDS = 24  # of two samples of the coarsest load, and of one sample of the tokens
ROUNDS_OF_TWO_FINE = 8  # of a load without whole units: the other samples even it out later
LAST_ROUNDS = 10
ROUNDS_OF_LARGE_EXCESS = 16
ROUNDS_OF_RELIEF = 40
ROUNDS_WITHIN_LIMITS = 600  # few groups need them


def match_step(
    groups: Sequence[IntArray],
    tokens: IntArray,
    budgets: IntArray,
    loads: IntArray,
    weights: Sequence[float] | FloatArray,
    num_replicas: int,
) -> list[IntArray]:
    """Group the samples of a step such that the groups of each row have equal loads.

    groups: sample numbers of each group of a step; replicas compute each run (row) of `num_replicas` groups side by
    side. tokens (k, m) and loads (k, q), whole numbers, belong to the samples in the order in which `groups` name them;
    the coarsest load comes first. budgets: (m,) what no group may pass. weights: (q,) what a share of each load's mean
    counts.

    Returns as many groups of the same samples. The same arguments give the same groups. With one replica all groups of
    the step become alike.

    Samples with much of the coarsest load are dealt largest first to the groups that lack most of it, and exchanged
    until groups have their targets; then the others fill the groups up, and exchanges even out all loads. If that ends
    above a budget, the exchanges start again from the given groups, and stay within the budgets.
    """
    means = loads.sum(axis=0) / len(groups)
    is_used = means > 0
    if len(groups) < 2 or not is_used.any():
        return list(groups)
    samples = np.concatenate(groups)
    row_size = num_replicas if num_replicas > 1 else len(groups)
    step = _Step(
        tokens, budgets, loads[:, is_used], np.asarray(weights, dtype=np.float64)[is_used], len(groups), row_size
    )
    table = step.table(step.deal())
    step.even_out(table)
    if not table.is_within_limits:
        table = step.table(step.in_order_of_targets(groups))
        step.even_out(table)
    return [samples[group] for group in step.in_rows(table.groups())]


class _Step:
    """The samples of a step and what their groups should hold."""

    def __init__(
        self, tokens: IntArray, budgets: IntArray, loads: IntArray, weights: FloatArray, num_groups: int, row_size: int
    ) -> None:
        self._tokens = tokens
        self._budgets = budgets
        self._loads = loads
        self._num_groups = num_groups
        self._row_size = row_size
        self._means = loads.sum(axis=0) / num_groups
        self._mean_tokens = float(tokens[:, 0].sum()) / num_groups
        self._coarse = CoarseLoad.of(loads[:, 0], tokens[:, 0], num_groups)
        self._targets = row_targets(self._coarse, num_groups, row_size)
        self._weights = np.append(weights, TOKENS_WEIGHT)
        self._tolerance = max(self._coarse.unit / float(self._means[0]) / 2, COARSE_TOLERANCE)

    def deal(self) -> IntArray:
        """Return (k,) a group for each sample: dense ones by the coarsest load, then light ones by tokens."""
        units, tokens = self._coarse.units, self._coarse.tokens
        group = np.empty(len(units), dtype=np.int64)
        dense = np.flatnonzero(~self._coarse.is_light)
        dense = dense[np.lexsort((-tokens[dense], -units[dense]))]
        group[dense] = self._deal_dense(dense)
        light = np.flatnonzero(self._coarse.is_light)
        light = light[np.argsort(-tokens[light], kind="stable")]
        used = np.zeros(self._num_groups, dtype=np.int64)
        np.add.at(used, group[dense], tokens[dense])
        group[light] = _deal_largest_first(tokens[light], used)
        return group

    def _deal_dense(self, dense: IntArray) -> IntArray:
        """Return (d,) a group for each dense sample, in the order in which they are dealt; adapt the targets."""
        load = self._coarse
        units, tokens = load.units[dense], load.tokens[dense]
        share, tokens_share = load.unit / float(self._means[0]), load.tokens_per_unit / self._mean_tokens
        table = GroupTable(
            _deal_largest_first(units, -self._targets),
            self._num_groups,
            np.stack([units * share, tokens / self._mean_tokens], axis=1),
            np.stack([self._targets * share, self._targets * tokens_share], axis=1),
            np.array([1.0, DENSE_TOKENS_WEIGHT]),
        )
        table.bring_to_targets(0, self._tolerance, ROUNDS_OF_ONE, num_exchanged=1)
        rounds = ROUNDS if load.is_coarse else ROUNDS_OF_TWO_FINE
        table.bring_to_targets(0, self._tolerance, rounds, num_exchanged=2, passes_on=load.is_coarse)
        if load.is_coarse:
            group_units = np.zeros(self._num_groups, dtype=np.int64)
            np.add.at(group_units, table.group_of_samples(), units)
            targets = raise_to_row(adapt_targets(group_units, self._targets, self._row_size), self._row_size)
            raised = (targets - self._targets).astype(np.float64)
            table.raise_targets(0, raised * share)
            table.raise_targets(1, raised * tokens_share)
            self._targets = targets
            table.bring_to_targets(0, self._tolerance, ROUNDS, num_exchanged=2, passes_on=True)
        return table.group_of_samples()

    def in_order_of_targets(self, groups: Sequence[IntArray]) -> IntArray:
        """Return (k,) the group of each sample as `groups` have it; those with more of the load get higher targets."""
        number = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        units = np.zeros(len(groups), dtype=np.int64)
        np.add.at(units, number, self._coarse.units)
        place = np.empty(len(groups), dtype=np.int64)
        place[np.argsort(units, kind="stable")] = np.argsort(self._targets, kind="stable")
        return place[number]

    def table(self, group: IntArray) -> GroupTable:
        """Put each sample into its group, with all loads and limits."""
        columns = np.concatenate([self._loads / self._means, self._tokens[:, :1] / self._mean_tokens], axis=1)
        targets = np.ones((self._num_groups, columns.shape[1]))
        load = self._coarse
        targets[:, 0] = (self._targets + load.light_density * self._mean_tokens) * (load.unit / self._means[0])
        weights = np.tile(self._weights, (self._num_groups, 1))
        share = targets[:, 0].clip(min=MIN_TARGET_SHARE)
        weights[:, 0] /= share**2
        table = GroupTable(group, self._num_groups, columns, targets, weights)
        for column, budget in zip(self._tokens.T, self._budgets.tolist(), strict=True):
            if column.sum() > budget:
                table.limit(column, budget)
        return table

    def even_out(self, table: GroupTable) -> None:
        """Exchange samples until the loads of all groups are near their targets."""
        last = len(self._weights) - 1
        table.bring_to_targets(last, TOKENS_TOLERANCE, ROUNDS, num_exchanged=1)
        table.bring_to_targets(last, TOKENS_TOLERANCE, LAST_ROUNDS, num_exchanged=2)
        table.bring_within_limits(ROUNDS_WITHIN_LIMITS)
        table.bring_to_targets(0, self._tolerance, LAST_ROUNDS, num_exchanged=2)
        if self._coarse.is_coarse:
            table.relieve(0, self._tolerance, ROUNDS_OF_RELIEF)
        table.bring_to_targets(last, TOKENS_TOLERANCE, LAST_ROUNDS, num_exchanged=2)
        table.bring_to_targets(last, LARGE_TOKENS_EXCESS, ROUNDS_OF_LARGE_EXCESS, num_exchanged=2)

    def in_rows(self, groups: list[IntArray]) -> list[IntArray]:
        """Order the groups such that those of a row are alike: by target, or by what they have, then by tokens."""
        number = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        samples = np.concatenate(groups)
        columns = np.concatenate([self._loads, self._tokens[:, :1], self._coarse.units[:, None]], axis=1)
        sums = np.zeros((len(groups), columns.shape[1]), dtype=np.int64)
        np.add.at(sums, number, columns[samples])
        loads, tokens, units = sums[:, :-2], sums[:, -2], sums[:, -1]
        orders = [np.lexsort((tokens, key)) for key in (self._targets, units)]
        order = min(orders, key=lambda order: self._waiting(loads[order]))
        return [groups[g] for g in order.tolist()]

    def _waiting(self, loads: IntArray) -> float:
        """Return the weighted share of the loads (G, q) for which rows wait."""
        rows = loads.reshape(-1, self._row_size, loads.shape[1])
        shares = rows.mean(axis=1) / np.maximum(rows.max(axis=1), 1)
        waiting = (np.where(shares > 0, 1 - shares, 0) * self._weights[:-1]).sum()
        return float(waiting)


def _deal_largest_first(sizes: IntArray, used: IntArray) -> IntArray:
    """Return (k,) for each of `sizes`, which descend, the group that is least full then; used: (G,) at first."""
    heap = [(load, group) for group, load in enumerate(used.tolist())]
    heapq.heapify(heap)
    chosen = []
    for size in sizes.tolist():
        load, group = heap[0]
        chosen.append(group)
        heapq.heapreplace(heap, (load + size, group))
    return np.array(chosen, dtype=np.int64)
