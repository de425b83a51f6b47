"""A recipe's way of grouping, as one object: which samples share a group, and which groups share a step.

The two halves, `group_window` and `arrange_window`, are apart because a stream of groups must know how many groups a
window has before it knows where in a step they start. Neither knows a plan: whatever it is, the same samples make the
same steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isqrt, log
from typing import Literal, Protocol

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray, SampleLengths
from mmtrain.balance.grouping import SampleGroups, group_across_devices, group_by_isf, group_by_length, group_randomly
from mmtrain.balance.matched import num_search_rounds, pack_with_slack
from mmtrain.balance.modality_free_steps import form_modality_free_steps
from mmtrain.balance.step_targets import LLM, BalancedLoad, SequenceCost, StepTargets
from mmtrain.balance.steps import assemble_steps
from mmtrain.balance.top_up_groups import top_up

GroupingMethod = Literal["matched", "isf", "random", "length", "device"]
GROUPING_METHODS: tuple[GroupingMethod, ...] = ("matched", "isf", "random", "length", "device")
ISF_ROUNDS, ISF_SLACK = 10, 32  # the published slack of 128 is a 32nd of a budget of 4,096
LIGHT = 0.05  # share of all tokens below which a unit's evenness is worth little
TARGET_ROW_SIZE = (
    64  # groups in a row that are alike; many more would make steps less random, few would wait for each other
)


class GroupingSettings(Protocol):
    """The part of a recipe's `data` that grouping follows."""

    @property
    def grouping(self) -> GroupingMethod:
        """Which method."""

    @property
    def seq_len(self) -> int:
        """Most LLM tokens in a group."""

    @property
    def window(self) -> int:
        """Samples looked at together."""

    @property
    def budgets(self) -> Mapping[str, int]:
        """Most tokens of an encoder in a group, by unit."""

    @property
    def long_tokens(self) -> int | None:
        """Above it samples have steps of their own."""


@dataclass(frozen=True)
class Grouping:
    """How samples become groups and steps.

    A step's `global_batch` groups come in rows of `row_size` near-equal ones, so that replicas that run a row, or equal
    parts of it, side by side do not wait for each other.
    """

    seq_len: int  # most LLM tokens in a group
    window: int  # samples looked at together
    global_batch: int  # groups in a step
    method: GroupingMethod = "matched"
    budgets: Mapping[str, int] = field(default_factory=dict)  # encoder unit -> most of its tokens in a group
    long_tokens: int | None = None  # samples with more LLM tokens than this have steps of their own

    @classmethod
    def of(cls, data: GroupingSettings, global_batch: int) -> "Grouping":
        """The grouping that a recipe's `data` asks for, for steps of `global_batch` groups."""
        return cls(data.seq_len, data.window, global_batch, data.grouping, data.budgets, data.long_tokens)

    @property
    def row_size(self) -> int:
        """The divisor of the global batch that is nearest to `TARGET_ROW_SIZE`, as a ratio."""
        divisors = [n for n in range(1, self.global_batch + 1) if self.global_batch % n == 0]
        return min(divisors, key=lambda n: abs(log(n / TARGET_ROW_SIZE)))


@dataclass(frozen=True)
class GroupingSizes:
    """What grouping counts of every sample, and what bounds it."""

    tokens: IntArray  # (n, m) of each sample under each budget, the LLM's first
    budgets: IntArray  # (m,)
    even: FloatArray  # (q, m) `tokens @ even.T` are the loads to even out, the coarsest first
    weights: FloatArray  # (q,) what each of them is worth
    batch: int  # samples in a mini-batch of the methods that count samples


def unit_tokens(lengths: SampleLengths) -> tuple[tuple[str, ...], IntArray]:
    """Units, the LLM first, and (n, units) the tokens that each of them processes of every sample."""
    columns = {LLM: lengths.tokens}
    for unit, items in sorted(lengths.items.items()):
        upto = np.concatenate([[0], np.cumsum(items.tokens)])
        columns[unit] = upto[items.first[1:]] - upto[items.first[:-1]]
    return tuple(columns), np.stack(list(columns.values()), axis=1).astype(np.int64)


def token_targets(lengths: SampleLengths, grouping: Grouping) -> StepTargets:
    """Even out every unit's tokens apart, as `grouping_sizes` weighs them: what to aim for where no plan is known."""
    units, sizes = unit_tokens(lengths)[0], grouping_sizes(lengths, grouping)
    columns = sizes.even.argmax(axis=1).tolist()
    weights = sizes.weights.tolist()
    return StepTargets(
        tuple(BalancedLoad({units[c]: SequenceCost(1)}, w) for c, w in zip(columns, weights, strict=True))
    )


def grouping_sizes(lengths: SampleLengths, grouping: Grouping) -> GroupingSizes:
    """Prepare a dataset's lengths for `group_window` and `arrange_window`.

    An encoder without a budget is bounded by nothing, under ISF by the published ratio (the LLM's budget times encoder
    tokens over LLM tokens). A sample above an encoder's budget alone counts as the budget: nothing else for that
    encoder joins it.

    The loads to even out are the tokens of each unit apart, encoders by their tokens, the LLM last: where these are
    even, so is every sum of costs, whether units turn out to share ranks or not. A unit weighs what share it has of
    all tokens; a light one a hundredth of that: clips in a few groups, which nothing can even out, are evened as far as
    images in all of them allow.
    """
    units, tokens = unit_tokens(lengths)
    total = tokens.sum(axis=0)
    budgets = np.maximum(total, 1)
    budgets[0] = grouping.seq_len
    for column, unit in enumerate(units[1:], 1):
        if grouping.method == "isf":
            budgets[column] = max(grouping.seq_len * int(total[column]) // max(int(total[0]), 1), 1)
        budgets[column] = grouping.budgets.get(unit, int(budgets[column]))
    used = [u for u in (*np.argsort(-total[1:], kind="stable") + 1, 0) if total[u] > 0] or [0]
    batch = max(1, round(grouping.seq_len / max(float(tokens[:, 0].mean()), 1.0))) if len(tokens) else 1
    shares = total[used] / max(int(total.sum()), 1)
    weights = np.where(shares < LIGHT, shares / 100, shares)
    return GroupingSizes(np.minimum(tokens, budgets), budgets, np.eye(len(units))[used], weights, batch)


def group_window(sizes: GroupingSizes, order: IntArray, grouping: Grouping, rng: np.random.Generator) -> SampleGroups:
    """Group the samples of one window; `order` (k,) names them as shuffled, one that occurs twice is used twice."""
    budgets, k = sizes.budgets, max(len(order), 1)
    if grouping.method == "matched":
        return pack_with_slack(sizes.tokens, budgets, order, k)[0]
    tokens = sizes.tokens[order]
    if grouping.method == "isf":
        slack = np.zeros_like(budgets)
        slack[0] = budgets[0] // ISF_SLACK
        groups = group_by_isf(tokens, budgets, budgets - slack, ISF_ROUNDS, rng)
    elif grouping.method == "random":
        groups = group_randomly(tokens, budgets, sizes.batch, rng)
    elif grouping.method == "length":
        groups = group_by_length(tokens, budgets, sizes.batch, k, rng)
    else:
        groups = group_across_devices(tokens, budgets, sizes.batch, grouping.row_size, k, rng)
    return SampleGroups(groups.first, order[groups.samples])


def arrange_window(
    sizes: GroupingSizes,
    groups: SampleGroups,
    grouping: Grouping,
    offset: int,
    rng: np.random.Generator,
    exchanged: bool = True,
) -> SampleGroups:
    """Put the groups of one window in the order of training; `offset` groups of a row came before them.

    `matched` exchanges samples between the groups of a row here, so groups change, but no row does; unless that is to
    be done step by step (`even.even_out`), when it is known what to even out and much of the window is not needed.
    """
    if grouping.method == "matched":
        ends, rounds = np.array([0, len(groups)]), num_search_rounds(grouping.row_size) if exchanged else 0
        tokens, budgets, even, weights = sizes.tokens[groups.samples], sizes.budgets, sizes.even, sizes.weights
        here = top_up(
            SampleGroups(groups.first, np.arange(len(tokens))), tokens
        )  # a window is little of a large dataset
        if not exchanged:
            here = form_modality_free_steps(here, ends, tokens, budgets, tokens @ even[0], grouping.row_size)
        here = assemble_steps(here, ends, tokens, budgets, even, grouping.row_size, rounds, rng, weights, offset)
        return SampleGroups(here.first, groups.samples[here.samples])
    if grouping.method == "device":  # its rows are made; what completes the row before comes from the loose end
        head = min(-offset % grouping.row_size, len(groups))
        return groups.reordered(np.roll(np.arange(len(groups)), head))
    return groups.reordered(rng.permutation(len(groups)))


def num_spare_groups(num_groups: int, grouping: Grouping) -> int:
    """How many more groups another shuffle of as many samples may need: chance fills them less evenly than search."""
    return isqrt(num_groups) // 50 if grouping.method == "matched" else isqrt(num_groups)


def split_to_count(groups: SampleGroups, num_groups: int) -> SampleGroups:
    """Halve the groups with the most samples until there are `num_groups`; the second halves come last.

    Raises ValueError if there are fewer samples than that.
    """
    if num_groups > len(groups.samples):
        raise ValueError(f"{num_groups} groups of {len(groups.samples)} samples")
    while 0 < len(groups) < num_groups:
        largest = np.argsort(-groups.sizes, kind="stable")[: num_groups - len(groups)]
        largest = largest[groups.sizes[largest] > 1]
        second = np.full(len(groups), -1)  # the number of each group's second half
        second[largest] = len(groups) + np.arange(len(largest))
        group = np.repeat(np.arange(len(groups)), groups.sizes)
        within = np.arange(len(group)) - groups.first[group]
        to = np.where((second[group] >= 0) & (within % 2 == 1), second[group], group)
        order = np.argsort(to, kind="stable")
        groups = SampleGroups(np.concatenate([[0], np.cumsum(np.bincount(to))]), groups.samples[order])
    return groups
