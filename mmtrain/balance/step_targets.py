"""What a plan wants of its steps, in numbers: which loads to balance, how microbatches run in time, where ranks are.

A plan and its costs are known where the targets are derived (`plan.artifact.balancing_targets`); here they are only
applied. Targets hold numbers and names only, so that they can travel to the processes that prepare steps. Costs are
whole numbers of some unit of time: their sums are exact, so machines whose arithmetic rounds differently still arrange
a step in the same way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mmtrain.balance.batch_meta import IntArray, SampleLengths, item_rows

LLM = "llm"


@dataclass(frozen=True)
class SequenceCost:
    """Cost of a sequence of n tokens (a sample in the LLM, an item in an encoder): linear * n + quadratic * n^2."""

    linear: int
    quadratic: int = 0

    def of(self, lengths: IntArray) -> IntArray:
        """Return (n,) the cost of each of `lengths`."""
        costs: IntArray = lengths * (self.linear + self.quadratic * lengths)
        return costs


CostsByUnit = Mapping[str, SequenceCost]


@dataclass(frozen=True)
class BalancedLoad:
    """Work that some rank of every replica does in a step, to be balanced between the replicas: a sum over units."""

    costs: dict[str, SequenceCost]  # by unit
    weight: float = 1.0  # what a share of this load's mean counts, compared with other loads


@dataclass(frozen=True)
class PipelineRank:
    """One rank of the pipeline that microbatches pass: what it computes of which unit."""

    forward: dict[str, SequenceCost]
    backward: dict[str, SequenceCost]


@dataclass(frozen=True)
class ScheduledTask:
    """The forward, or the backward, of a stage or of some of its layers for one of its unit's microbatches."""

    stage: int  # of the schedule table
    unit: str
    is_forward: bool
    cost: SequenceCost


@dataclass(frozen=True)
class ScheduleTable:
    """In what order the ranks of one LLM replica, and those that feed it, do what.

    An action is a task for one microbatch of its unit, written as the number `task + len(tasks) * microbatch`.
    """

    tasks: tuple[ScheduledTask, ...]
    sources: tuple[tuple[int, ...], ...]  # by stage: the stages whose outputs it reads
    actions: tuple[str, ...]  # by rank: its actions in order, as numbers between spaces; they travel with every request


@dataclass(frozen=True)
class StepTargets:
    """What to arrange the samples of a step for; without any targets groups are balanced by their tokens."""

    loads: tuple[BalancedLoad, ...] = ()  # the coarsest first
    pipeline: tuple[PipelineRank, ...] = ()  # of 1F1B along one chain, in order; empty where time does not matter
    schedule_table: ScheduleTable | None = None  # of pipelines that work in another order
    item_costs: dict[str, SequenceCost] = field(default_factory=dict)  # encoder -> what one item costs its replica
    replica_nodes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # unit -> node of each of its replicas
    reorder: bool = True  # False: groups go to replicas and microbatches in the order of the stream
    dispatch: bool = False  # any replica of an encoder computes an item, wherever its sample is; see `assign`
    # What a sample costs in the LLM, where replicas that run side by side exchange samples; see `dispatch_samples`.
    sample_cost: SequenceCost | None = None
    # unit -> whether its batches are balanced as if padded (`BatchCost`); units without an entry, as they are computed.
    balance_as_padded: dict[str, bool] = field(default_factory=dict)


class SampleWork:
    """The lengths of some samples, summed so that costs can be applied to them."""

    def __init__(self, lengths: SampleLengths, samples: IntArray) -> None:
        """Sum the lengths of `samples` (k,), which may name one twice."""
        tokens = lengths.tokens[samples]
        self._sums = {LLM: (tokens, tokens**2)}  # by unit: (k,) sums of n and of n^2
        for unit, items in lengths.items.items():
            owner, row = item_rows(items, samples)
            sums = np.zeros((2, len(samples)), dtype=np.int64)
            np.add.at(sums[0], owner, items.tokens[row])
            np.add.at(sums[1], owner, items.tokens[row] ** 2)
            self._sums[unit] = sums[0], sums[1]

    def costs(self, costs_by_unit: CostsByUnit) -> IntArray:
        """Return (k,) the cost of each sample's sequences."""
        total = np.zeros(len(self._sums[LLM][0]), dtype=np.int64)
        for unit, cost in costs_by_unit.items():
            tokens, squares = self._sums[unit]
            total += cost.linear * tokens + cost.quadratic * squares
        return total

    def slot_sums(self, unit: str, slot: IntArray, num_slots: int) -> IntArray:
        """Return (2, num_slots) sums of n and of n^2 over the samples in each slot; slot: (k,) of each sample."""
        slot_sums = np.zeros((2, num_slots), dtype=np.int64)
        for of_slot, of_sample in zip(slot_sums, self._sums[unit], strict=True):
            np.add.at(of_slot, slot, of_sample)
        return slot_sums

    def loads(self, targets: StepTargets) -> IntArray:
        """Return (k, q) what each sample adds to each of the loads to balance."""
        columns = [self.costs(load.costs) for load in targets.loads]
        return np.stack(columns, axis=1) if columns else np.zeros((len(self._sums[LLM][0]), 0), dtype=np.int64)
