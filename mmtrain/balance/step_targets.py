"""What a plan wants of its steps, in numbers: which loads to even out, in what pipeline microbatches run, and where.

A plan and its costs are known to those who make the targets; here they are only applied. Targets are numbers and names,
so that they can travel to whoever prepares steps. Costs are whole numbers of some unit of time: sums of them are exact,
so that machines whose arithmetic rounds differently still arrange a step alike.
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
        """(n,) cost of each of `lengths`."""
        costs: IntArray = lengths * (self.linear + self.quadratic * lengths)
        return costs


@dataclass(frozen=True)
class BalancedLoad:
    """Work that some rank of every replica does in a step: a sum over units, evened between the replicas."""

    costs: dict[str, SequenceCost]  # by unit
    weight: float = 1.0  # what a share of its mean is worth beside other loads


@dataclass(frozen=True)
class PipelineRank:
    """One rank of the pipeline that microbatches pass: what it computes of which unit."""

    forward: dict[str, SequenceCost]
    backward: dict[str, SequenceCost]


@dataclass(frozen=True)
class ScheduledTask:
    """What a stage, or some of its layers, does for one of its unit's microbatches, one way."""

    stage: int  # of the timetable
    unit: str
    is_forward: bool
    cost: SequenceCost


@dataclass(frozen=True)
class ScheduleTable:
    """In what order the ranks of one LLM replica, and those that feed it, do what.

    A turn is a task for a microbatch of its unit, as the number `task + len(tasks) * microbatch`.
    """

    tasks: tuple[ScheduledTask, ...]
    sources: tuple[tuple[int, ...], ...]  # by stage: the stages whose outputs it reads
    actions: tuple[str, ...]  # by rank: its turns in order, as numbers between spaces; they travel with every request


@dataclass(frozen=True)
class StepTargets:
    """What to arrange the samples of a step for; without any, they run as they come."""

    loads: tuple[BalancedLoad, ...] = ()  # the coarsest first
    pipeline: tuple[
        PipelineRank, ...
    ] = ()  # of 1F1B along one chain, in the order of passing; none where time matters not
    schedule_table: ScheduleTable | None = None  # of pipelines that take their turns in another order
    item_costs: dict[str, SequenceCost] = field(
        default_factory=dict
    )  # encoder unit -> what one of its items costs its replica
    replica_nodes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # unit -> node of each of its replicas


class SampleWork:
    """Lengths of some samples, ready to be priced."""

    def __init__(self, lengths: SampleLengths, samples: IntArray) -> None:
        """`samples` (k,) may name one twice."""
        tokens = lengths.tokens[samples]
        self._moments = {LLM: (tokens, tokens**2)}  # by unit: (k,) sums of n and of n^2
        for unit, items in lengths.items.items():
            owner, row = item_rows(items, samples)
            sums = np.zeros((2, len(samples)), dtype=np.int64)
            np.add.at(sums[0], owner, items.tokens[row])
            np.add.at(sums[1], owner, items.tokens[row] ** 2)
            self._moments[unit] = sums[0], sums[1]

    def costs(self, prices: Mapping[str, SequenceCost]) -> IntArray:
        """(k,) cost of each sample's sequences under these prices."""
        total = np.zeros(len(self._moments[LLM][0]), dtype=np.int64)
        for unit, price in prices.items():
            tokens, squares = self._moments[unit]
            total += price.linear * tokens + price.quadratic * squares
        return total

    def moments(self, unit: str, slot: IntArray, num_slots: int) -> IntArray:
        """(2, num_slots) sums of n and of n^2 over the samples in each slot; slot: (k,) of each sample."""
        sums = np.zeros((2, num_slots), dtype=np.int64)
        for total, each in zip(sums, self._moments[unit], strict=True):
            np.add.at(total, slot, each)
        return sums

    def loads(self, targets: StepTargets) -> IntArray:
        """(k, q) what each sample adds to each of the loads."""
        columns = [self.costs(load.costs) for load in targets.loads]
        return np.stack(columns, axis=1) if columns else np.zeros((len(self._moments[LLM][0]), 0), dtype=np.int64)
