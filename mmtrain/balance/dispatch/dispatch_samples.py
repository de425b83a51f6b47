"""Dispatch the samples of each mini-batch over the replicas of the LLM, wherever the stream has them (OrchMLLM).

The samples of a step are drawn without regard to their lengths, and its mini-batches keep theirs. Post-balancing
(arXiv 2503.23830) decides which replica computes which of them.
"""

from collections.abc import Sequence

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.balance.dispatch.post_balancing import BatchCost, rebalance
from mmtrain.balance.grouping.pack_groups import GroupingSizes
from mmtrain.balance.step_targets import SequenceCost


def dispatch_samples(
    groups: Sequence[IntArray],
    num_replicas: int,
    sizes: GroupingSizes,
    cost: SequenceCost,
    pad: bool,
    with_items: bool,
    as_padded: bool | None = None,
) -> list[IntArray]:
    """Return groups of the same samples, of which those that replicas compute side by side cost about the same.

    Args:
        groups: sample numbers of each group of a step; replicas compute each run (row) of `num_replicas` side by side.
        num_replicas: of the LLM.
        sizes: tokens and budgets of all samples.
        cost: of a sample in the LLM.
        pad: whether each sample is padded to the longest of its group.
        with_items: whether a sample takes its items along, so that budgets of encoders hold, too.
        as_padded: whether to balance groups as if they were padded; None: as the LLM computes them, which `pad` says.
            Budgets always count what the LLM computes.

    Each row keeps its samples. It stays as it is where no balanced assignment keeps the budgets, or where one would
    leave a replica without samples.
    """
    num_units = sizes.tokens.shape[1] if with_items else 1
    budgets = sizes.budgets[:num_units]
    computed = BatchCost("padded" if pad else "packed")
    is_padded = pad if as_padded is None else as_padded
    objective = BatchCost("padded" if is_padded else "packed", float(cost.linear), float(cost.quadratic))
    balanced: list[IntArray] = []
    for first in range(0, len(groups), num_replicas):
        row = list(groups[first : first + num_replicas])
        balanced += _balanced_row(row, sizes.tokens[np.concatenate(row)][:, :num_units], budgets, objective, computed)
    return balanced


def _balanced_row(
    row: list[IntArray], tokens: IntArray, budgets: IntArray, objective: BatchCost, computed: BatchCost
) -> list[IntArray]:
    """Balance the groups of one row by their cost; by their tokens alone where that would pass a budget.

    tokens: (k, m) of the row's samples, of each unit with a budget, the LLM first. computed: the tokens of a group in
    the LLM, with padding where it pads.
    """
    samples = np.concatenate(row)
    source = np.repeat(np.arange(len(row)), [len(group) for group in row])
    for batch_cost in (objective, BatchCost(objective.kind)):
        replica = rebalance(tokens[:, 0], source, len(row), batch_cost)
        of_llm = computed.of_ranks(tokens[:, 0], replica, len(row))
        of_encoders = [np.bincount(replica, column, len(row)) for column in tokens.T[1:]]
        largest = [float(of_ranks.max()) for of_ranks in (of_llm, *of_encoders)]
        is_within = all(most <= budget for most, budget in zip(largest, budgets.tolist(), strict=True))
        if is_within and np.bincount(replica, minlength=len(row)).all():
            return [samples[replica == number] for number in range(len(row))]
    return row
