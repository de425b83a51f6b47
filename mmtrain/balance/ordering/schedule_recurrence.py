"""How long a pipeline with a written schedule takes, under many orders of its microbatches.

The ranks of the pipeline work in the order of a `ScheduleTable`. A forward reads what its stage's sources made of the
same microbatches, a backward what its stage's forward left and the gradients of all stages that read from it. Units
with other numbers of microbatches than the LLM meet it in blocks (see `assign`): a microbatch of such a unit counts
as all of its block. When actions end follows from `pipeline_recurrence`.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.ordering.pipeline_recurrence import NO_MESSAGE, Dependencies, PipelineRecurrence
from mmtrain.balance.step_targets import LLM, ScheduleTable


class _Action(NamedTuple):
    """A task for one microbatch of its unit."""

    rank: int
    task: int
    microbatch: int  # of its unit
    llm_microbatch: int  # the first one of its block, which stands for the block


class ScheduleRecurrence:
    """The recurrence of a schedule table for certain numbers of microbatches."""

    def __init__(self, table: ScheduleTable, num_microbatches: Mapping[str, int]) -> None:
        """Order the table's actions. Raises ValueError if they wait for each other in a cycle.

        num_microbatches: microbatches of one replica of every unit, the LLM included.
        """
        actions = [
            action
            for rank, numbers in enumerate(table.actions)
            for action in _actions_of_rank(numbers, table, num_microbatches, rank)
        ]
        self._recurrence = PipelineRecurrence(len(actions), _dependencies(actions, table, num_microbatches))
        self._rank, self._task, _, self._llm_microbatch = np.array(actions, dtype=np.int64).reshape(-1, 4).T
        self._is_forward = np.array([task.is_forward for task in table.tasks], dtype=np.bool_)
        self._num_ranks = len(table.actions)
        self._num_llm_microbatches = num_microbatches[LLM]

    def makespans(self, costs: FloatArray, orders: IntArray) -> FloatArray:
        """Return (k,) seconds of the longest of c pipelines under each of `orders` (k, l) of the LLM's microbatches.

        costs: (c, tasks, l) seconds of each task for what the action's first LLM microbatch stands for.
        """
        task, place = np.empty_like(self._task), np.empty_like(self._llm_microbatch)
        task[self._recurrence.row] = self._task
        place[self._recurrence.row] = self._llm_microbatch
        microbatch = orders.T[place]  # (actions, k)
        longest = np.zeros(len(orders))
        for pipeline_costs in costs:
            times = pipeline_costs[task[:, None], microbatch]
            self._recurrence.replace_durations_by_ends(times)
            longest = np.maximum(longest, times.max(axis=0, initial=0.0))
        return longest

    def rank_seconds(self, costs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return (ranks, l) forward and backward seconds of one pipeline's ranks, by LLM microbatch.

        costs: (tasks, l) as those of `makespans`.
        """
        seconds = np.zeros((2, self._num_ranks, self._num_llm_microbatches))
        is_backward = 1 - self._is_forward[self._task].astype(np.int64)
        np.add.at(seconds, (is_backward, self._rank, self._llm_microbatch), costs[self._task, self._llm_microbatch])
        return seconds[0], seconds[1]


@lru_cache(maxsize=4)  # the steps of a run share one
def schedule_recurrence(table: ScheduleTable, num_microbatches: tuple[tuple[str, int], ...]) -> ScheduleRecurrence:
    """Return the recurrence of a schedule table; num_microbatches: (unit, count) pairs."""
    return ScheduleRecurrence(table, dict(num_microbatches))


def _actions_of_rank(
    numbers: str, table: ScheduleTable, num_microbatches: Mapping[str, int], rank: int
) -> list[_Action]:
    """Parse what a rank does, in order."""
    actions = []
    for number in map(int, numbers.split()):
        microbatch, task = divmod(number, len(table.tasks))
        in_block = _microbatches_met(num_microbatches, table.tasks[task].unit, LLM, microbatch)
        actions.append(_Action(rank, task, microbatch, in_block.start))
    return actions


def _microbatches_met(num_microbatches: Mapping[str, int], unit: str, other: str, microbatch: int) -> range:
    """The microbatches of `other` that one of `unit` meets in its block; inside the unit each meets itself."""
    if unit == other:
        return range(microbatch, microbatch + 1)
    num_blocks = gcd(num_microbatches[unit], num_microbatches[other])
    block = microbatch // (num_microbatches[unit] // num_blocks)
    width = num_microbatches[other] // num_blocks
    return range(block * width, (block + 1) * width)


def _dependencies(
    actions: Sequence[_Action], table: ScheduleTable, num_microbatches: Mapping[str, int]
) -> Dependencies:
    """What each action waits for: what its rank does before it, and the actions whose results it reads."""
    unit_of_stage = {task.stage: task.unit for task in table.tasks}
    destinations: list[list[int]] = [[] for _ in table.sources]
    for stage, sources in enumerate(table.sources):
        for source in sources:
            destinations[source].append(stage)
    last_action: dict[tuple[bool, int, int], int] = {}  # (is forward, stage, microbatch) -> the one that completes it
    for number, action in enumerate(actions):
        task = table.tasks[action.task]
        last_action[task.is_forward, task.stage, action.microbatch] = number
    dependencies: list[tuple[int, int]] = []  # consumer, producer
    for number, action in enumerate(actions):
        task = table.tasks[action.task]
        read = [(task.is_forward, s) for s in (table.sources if task.is_forward else destinations)[task.stage]]
        if not task.is_forward:
            read.append((True, task.stage))
        producers = {
            last_action.get((is_forward, stage, microbatch))
            for is_forward, stage in read
            for microbatch in _microbatches_met(num_microbatches, task.unit, unit_of_stage[stage], action.microbatch)
        }
        if number > 0 and actions[number - 1].rank == action.rank:
            producers.add(number - 1)
        dependencies += [(number, producer) for producer in producers if producer is not None]
    consumer, producer = np.array(dependencies, dtype=np.int64).reshape(-1, 2).T
    return Dependencies(consumer, producer, np.full(len(consumer), NO_MESSAGE))
