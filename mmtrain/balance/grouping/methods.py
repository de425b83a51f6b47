"""The grouping that a recipe asks for: which samples share a group, and which groups share a step.

The two halves, `group_window` and `arrange_window`, are apart because a stream of groups must know how many groups a
window has before it knows where in a step they start. Neither knows a plan: under any plan the same samples make the
same steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isqrt, log
from typing import Literal, Protocol

import numpy as np

from mmtrain.balance.batch_meta import IntArray, SampleLengths, SampleTokens
from mmtrain.balance.grouping.pack_groups import (
    GroupingSizes,
    SampleGroups,
    group_across_devices,
    group_by_isf,
    group_by_length,
    group_randomly,
)
from mmtrain.balance.grouping.random_order import random_order
from mmtrain.balance.grouping.slack_packing import pack_with_slack, top_up
from mmtrain.balance.matched.step_matching import draw_steps
from mmtrain.balance.step_targets import LLM, BalancedLoad, SequenceCost, StepTargets

TokenBudget = Literal["seq_len", "longest"]
EncoderBudget = Literal["tokens", "items"]
Remainder = Literal["keep", "next_epoch"]
GroupingMethod = Literal["matched", "isf", "random", "length", "device"]
GROUPING_METHODS: tuple[GroupingMethod, ...] = ("matched", "isf", "random", "length", "device")
# Raise a method's version with every change after which it makes other steps of the same samples, so that no run that
# began before continues on other steps unnoticed. `tests/data/test_group_stream.py` pins the steps of each method.
# Which replica computes which group depends on the plan anyway: another assignment of the same groups needs no version.
GROUPING_VERSIONS: Mapping[GroupingMethod, int] = {"matched": 6, "isf": 2, "random": 1, "length": 1, "device": 1}
LIGHT_UNIT_SHARE = 0.05  # of all tokens; below it a unit's balance is worth little
MAX_TIGHT_GROUPS = 1024  # of a step; beyond, single groups for which nothing fits make all others wait
TARGET_ROW_SIZE = 64  # groups in a row of near-equal ones; more make steps less random, with fewer more replicas wait


class IsfOptions(Protocol):
    """The settings of a recipe's `data.isf`."""

    @property
    def token_budget(self) -> TokenBudget:
        """What bounds the LLM tokens of a group."""

    @property
    def encoder_budget(self) -> EncoderBudget:
        """What an encoder's budget counts."""

    @property
    def rounds(self) -> int:
        """How often the samples of groups that are not full are shuffled again."""

    @property
    def slack(self) -> float:
        """The share of the LLM's budget that a full group may lack."""

    @property
    def encoder_slack(self) -> float | None:
        """The same for encoders; None: `slack`."""

    @property
    def remainder(self) -> Remainder:
        """What is done with the samples that no full group holds after all rounds."""


@dataclass(frozen=True)
class IsfRules:
    """Rules of iterative sampling and filtering (ISF): budgets, which groups are full, what is done with the rest.

    They are OmniBal's (arXiv 2407.20761), but for a slack that is a share and the same for every budget.
    """

    token_budget: TokenBudget = "seq_len"  # OmniBal: the longest sample
    encoder_budget: EncoderBudget = "tokens"
    rounds: int = 10
    slack: float = 1 / 32  # OmniBal: 128 tokens, of a budget of 4,096
    encoder_slack: float | None = None  # as `slack`; OmniBal: 0
    remainder: Remainder = "keep"

    @classmethod
    def of(cls, settings: IsfOptions) -> "IsfRules":
        """Return the rules that a recipe's settings give."""
        return cls(
            token_budget=settings.token_budget,
            encoder_budget=settings.encoder_budget,
            rounds=settings.rounds,
            slack=settings.slack,
            encoder_slack=settings.encoder_slack,
            remainder=settings.remainder,
        )

    def least_loads(self, budgets: IntArray) -> IntArray:
        """Return (m,) the load under each budget (m,), the LLM's first, from which a group is full."""
        shares = np.full(len(budgets), self.slack if self.encoder_slack is None else self.encoder_slack)
        shares[0] = self.slack
        slack: IntArray = np.floor(budgets * shares).astype(np.int64)
        return budgets - slack


class GroupingSettings(Protocol):
    """The settings of a recipe's `data` that grouping depends on."""

    @property
    def grouping(self) -> GroupingMethod:
        """The method."""

    @property
    def group_tokens(self) -> int:
        """The most LLM tokens in a group."""

    @property
    def grouping_window(self) -> int:
        """How many samples are grouped together."""

    @property
    def budgets(self) -> Mapping[str, int]:
        """The most tokens of an encoder or of the generator in a group, by unit."""

    @property
    def long_sample_tokens(self) -> int | None:
        """The LLM tokens above which a sample is trained in steps of long samples."""

    @property
    def isf(self) -> IsfOptions:
        """The rules of the method `isf`."""

    @property
    def pad(self) -> bool:
        """Whether the samples of a group are padded to its longest."""

    @property
    def reorder(self) -> bool:
        """Whether samples and microbatches of a step are arranged for the replicas and the pipeline."""


@dataclass(frozen=True)
class Grouping:
    """How samples become groups and steps.

    With the method "device" the `global_batch` groups of a step come in rows of `row_size` near-equal groups. Replicas
    that run a row side by side, or equal parts of it, then do not wait for each other. With "matched" they come in
    random order, and are made alike when the number of replicas is known (`regroup_step.match_step`).
    """

    seq_len: int  # most LLM tokens in a group
    window: int  # samples that are grouped together
    global_batch: int  # groups in a step
    method: GroupingMethod = "matched"
    budgets: Mapping[str, int] = field(default_factory=dict)  # unit but the LLM -> most of its tokens in a group
    long_tokens: int | None = None  # samples with more LLM tokens than this are trained in steps of their own
    isf: IsfRules = field(default_factory=IsfRules)
    pad: bool = False  # samples of a group are padded to its longest; for the methods that count samples
    reorder: bool = True  # False: the groups of a step run in the order of the stream
    whole_epochs: bool = False  # an epoch has a whole number of steps: groups are divided until it does

    @classmethod
    def of(cls, data: GroupingSettings, global_batch: int, *, whole_epochs: bool = False) -> "Grouping":
        """Return the grouping that a recipe's `data` asks for, for steps of `global_batch` groups."""
        return cls(
            seq_len=data.group_tokens,
            window=data.grouping_window,
            global_batch=global_batch,
            method=data.grouping,
            budgets=data.budgets,
            long_tokens=data.long_sample_tokens,
            isf=IsfRules.of(data.isf),
            pad=data.pad,
            reorder=data.reorder,
            whole_epochs=whole_epochs,
        )

    @property
    def leaves_remainder(self) -> bool:
        """Return whether samples that ISF leaves over are not used in this epoch."""
        return self.method == "isf" and self.isf.remainder == "next_epoch"

    @property
    def is_roomy(self) -> bool:
        """Return whether `matched` leaves more room in groups: where many must be alike, exchanges must often fit."""
        return self.global_batch > MAX_TIGHT_GROUPS

    @property
    def row_size(self) -> int:
        """Return the divisor of the global batch whose ratio to `TARGET_ROW_SIZE` is nearest to 1."""
        divisors = [n for n in range(1, self.global_batch + 1) if self.global_batch % n == 0]
        return min(divisors, key=lambda n: abs(log(n / TARGET_ROW_SIZE)))


def unit_items(lengths: SampleLengths) -> IntArray:
    """Return (n, encoders) the items of every sample, in the order of the columns of `unit_tokens` after the LLM's."""
    counts = [np.diff(np.asarray(items.first)) for _, items in sorted(lengths.items.items())]
    return np.stack(counts, axis=1).astype(np.int64) if counts else np.zeros((len(lengths), 0), dtype=np.int64)


def unit_tokens(lengths: SampleLengths) -> tuple[tuple[str, ...], IntArray]:
    """Return the units, the LLM first, and (n, units) the tokens of every sample that each of them processes."""
    return units_of(lengths), SampleTokens(lengths)[np.arange(len(lengths))]


def units_of(lengths: SampleLengths) -> tuple[str, ...]:
    """Return the units that process tokens, the LLM first."""
    return (LLM, *sorted(lengths.items))


def token_targets(lengths: SampleLengths, grouping: Grouping) -> StepTargets:
    """Return targets that balance every unit's tokens apart, weighted as `grouping_sizes` does, without a plan."""
    units = units_of(lengths)
    sizes = grouping_sizes(lengths, grouping)
    columns = sizes.load_matrix.argmax(axis=1).tolist()
    weights = sizes.weights.tolist()
    loads = [BalancedLoad({units[c]: SequenceCost(1)}, w) for c, w in zip(columns, weights, strict=True)]
    return StepTargets(tuple(loads))


def grouping_sizes(lengths: SampleLengths, grouping: Grouping) -> GroupingSizes:
    """Prepare a dataset's lengths for `group_window` and `arrange_window`.

    Nothing bounds an encoder without a budget; under ISF the published ratio does: the LLM's budget times encoder
    tokens (items with `isf.encoder_budget: items`) over LLM tokens. A sample that is above an encoder's budget alone
    counts as the budget, so that no other sample with items for that encoder joins it.

    The loads to balance are the tokens of each unit apart, encoders by their number of tokens, the LLM last: where
    these are even, so is every sum of costs, whether units turn out to share ranks or not. The weight of a unit is its
    share of all tokens, and a hundredth of that for a light unit: clips in a few groups, which no exchange can balance,
    are balanced as far as images in all groups allow.
    """
    units = units_of(lengths)
    of_encoders = [items for _, items in sorted(lengths.items.items())]
    num_tokens = int(lengths.tokens.sum())
    total = np.array([num_tokens, *(items.tokens.sum() for items in of_encoders)], dtype=np.int64)
    counts_items = grouping.method == "isf" and grouping.isf.encoder_budget == "items"
    counted = total
    if counts_items:
        counted = np.array([num_tokens, *(len(items.tokens) for items in of_encoders)], dtype=np.int64)
    budgets = _budgets(units, counted, lengths, grouping)
    encoders_by_tokens = np.argsort(-total[1:], kind="stable") + 1
    columns = [column for column in (*encoders_by_tokens, 0) if total[column] > 0] or [0]
    mean_tokens = num_tokens / max(len(lengths), 1)
    share = total[columns] / max(int(total.sum()), 1)
    return GroupingSizes(
        tokens=SampleTokens(lengths, budgets, counts_items),
        budgets=budgets,
        load_matrix=np.eye(len(units))[columns],
        weights=np.where(share < LIGHT_UNIT_SHARE, share / 100, share),
        batch=max(1, round(grouping.seq_len / max(mean_tokens, 1.0))) if len(lengths) else 1,
    )


def _budgets(units: tuple[str, ...], total: IntArray, lengths: SampleLengths, grouping: Grouping) -> IntArray:
    """Return (units,) what no group may pass of what is counted; total: (units,) that of all samples."""
    budgets: IntArray = np.maximum(total, 1)
    budgets[0] = grouping.seq_len
    if grouping.method == "isf":
        if grouping.isf.token_budget == "longest" and len(lengths):
            budgets[0] = min(grouping.seq_len, max(int(lengths.tokens.max()), 1))
        budgets[1:] = np.maximum(budgets[0] * total[1:] // max(int(total[0]), 1), 1)
    for column, unit in enumerate(units[1:], 1):
        budgets[column] = grouping.budgets.get(unit, int(budgets[column]))
    return budgets


def group_window(sizes: GroupingSizes, order: IntArray, grouping: Grouping, rng: np.random.Generator) -> SampleGroups:
    """Group the samples of one window; `order` (k,) names them as shuffled, and may name one twice to use it twice."""
    budgets, window = sizes.budgets, max(len(order), 1)
    if grouping.method == "matched":
        return pack_with_slack(sizes.tokens, budgets, order, grouping.is_roomy)
    tokens = sizes.tokens[order]
    if grouping.method == "isf":
        rules = grouping.isf
        keep_remainder = rules.remainder == "keep"
        groups = group_by_isf(tokens, budgets, rules.least_loads(budgets), rules.rounds, rng, keep_remainder)
    elif grouping.method == "random":
        groups = group_randomly(tokens, budgets, sizes.batch, rng, grouping.pad)
    elif grouping.method == "length":
        groups = group_by_length(tokens, budgets, sizes.batch, window, rng, grouping.pad)
    else:
        groups = group_across_devices(tokens, budgets, sizes.batch, grouping.row_size, window, rng, grouping.pad)
    return SampleGroups(groups.first, order[groups.samples])


def arrange_window(
    sizes: GroupingSizes,
    groups: SampleGroups,
    grouping: Grouping,
    num_before: int,
    rng: np.random.Generator,
    by_chance: bool = False,
) -> SampleGroups:
    """Put the groups of one window in the order of training; `num_before` groups of a step came before them.

    Groups of `matched` are drawn so that steps vary no more than shuffled samples do; `by_chance`, as the planner draws
    them, they are only shuffled.
    """
    if grouping.method == "matched":
        groups = top_up(groups, sizes.tokens)
        coarsest = groups.loads(sizes.tokens) @ sizes.load_matrix[0]
        if by_chance:
            drawn = rng.permutation(len(groups)).astype(np.int64), 1.0
        else:
            drawn = random_order(groups, sizes.tokens, grouping.global_batch, num_before, rng)
        order = draw_steps(coarsest.astype(np.int64), drawn, grouping.global_batch, num_before, rng)
        return groups.reordered(order)
    if grouping.method == "device":  # its rows are complete; the groups that complete the row before come from the end
        head = min(-num_before % grouping.row_size, len(groups))
        return groups.reordered(np.roll(np.arange(len(groups)), head))
    return groups.reordered(rng.permutation(len(groups)))


def num_spare_groups(num_groups: int, grouping: Grouping) -> int:
    """Return how many more groups another shuffle of the samples may need; methods without search vary more."""
    return isqrt(num_groups) // 50 if grouping.method == "matched" else isqrt(num_groups)


def split_to_count(groups: SampleGroups, num_groups: int) -> SampleGroups:
    """Halve the groups with the most samples until there are `num_groups`; the second halves come last.

    Raises ValueError if there are fewer samples than groups.
    """
    if num_groups > len(groups.samples):
        raise ValueError(f"{num_groups} groups of {len(groups.samples)} samples")
    while 0 < len(groups) < num_groups:
        largest = np.argsort(-groups.sizes, kind="stable")[: num_groups - len(groups)]
        largest = largest[groups.sizes[largest] > 1]
        second_half = np.arange(len(groups))  # the group that takes every other sample; itself where it is not halved
        second_half[largest] = len(groups) + np.arange(len(largest))
        group = np.repeat(np.arange(len(groups)), groups.sizes)
        within = np.arange(len(group)) - groups.first[group]
        new_group = np.where(within % 2 == 1, second_half[group], group)
        order = np.argsort(new_group, kind="stable")
        first = np.concatenate([[0], np.cumsum(np.bincount(new_group))])
        groups = SampleGroups(first, groups.samples[order])
    return groups
