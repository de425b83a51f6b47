"""How long a pipeline takes whose ranks work in any order that is written down, under many orders of microbatches.

The recurrence: a turn starts when its rank has ended the one before and everything that it reads has been made;
messages cost nothing. A forward reads what its stage's sources made of the same microbatches, a backward what its
stage's forward left and the gradients of all who read from it. Units with other numbers of microbatches than the LLM
meet in blocks (see `assign`): a microbatch of such a unit counts as all of its block.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.step_targets import LLM, ScheduleTable


class _Turn(NamedTuple):
    rank: int
    task: int
    microbatch: int  # of its unit
    first: int  # LLM microbatch of a step that stands for its block


class ScheduleRecurrence:
    """The recurrence of a timetable, made ready for units with certain numbers of microbatches.

    Turns are numbered level by level, where a level holds those that wait for turns of earlier levels alone, so that
    numpy computes the ends of a whole level, under all orders, at once.
    """

    def __init__(self, table: ScheduleTable, num: Mapping[str, int]) -> None:
        """`num` counts the microbatches of every unit. Raises ValueError if turns wait for each other in a circle."""
        turns = [_read(line, table, num, rank) for rank, line in enumerate(table.actions)]
        waits = _waits(turns, table, num)
        level = _levels(waits)
        order = np.argsort(level, kind="stable")
        number = np.empty(len(order) + 1, dtype=np.int64)
        number[order], number[-1] = np.arange(len(order)), len(order)  # the last stands for nothing to wait for
        flat = [turn for of_rank in turns for turn in of_rank]
        most = max(map(len, waits), default=0) or 1
        padded = np.array([[*w, *[-1] * (most - len(w))] for w in waits], dtype=np.int64).reshape(-1, most)
        self._waits = number[padded[order]]
        self._cuts = np.searchsorted(level[order], np.arange(level.max(initial=-1) + 2)).tolist()
        self._rank = np.array([flat[i].rank for i in order], dtype=np.int64)
        self._task = np.array([flat[i].task for i in order], dtype=np.int64)
        self._first = np.array([flat[i].first for i in order], dtype=np.int64)
        self._is_forward = np.array([task.is_forward for task in table.tasks])[self._task]
        self._num_ranks, self._num = len(turns), num[LLM]

    def makespans(self, costs: FloatArray, orders: IntArray) -> FloatArray:
        """(k,) seconds of the longest of c pipelines under each of `orders` (k, l) of the LLM's microbatches.

        costs: (c, tasks, l) seconds of each task for what the turn's first LLM microbatch stands for.
        """
        longest = np.zeros(len(orders))
        at = orders.T[self._first]  # (turns, k)
        for own in costs:
            seconds = own[self._task[:, None], at]
            ends = np.zeros((len(at) + 1, len(orders)))
            for lo, hi in zip(self._cuts, self._cuts[1:], strict=False):
                ends[lo:hi] = ends[self._waits[lo:hi]].max(axis=1) + seconds[lo:hi]
            longest = np.maximum(longest, ends.max(axis=0))
        return longest

    def work(self, costs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(ranks, l) forward and backward seconds of one pipeline's ranks, by LLM microbatch; costs: (tasks, l)."""
        found = np.zeros((2, self._num_ranks, self._num))
        way = 1 - self._is_forward.astype(np.int64)
        np.add.at(found, (way, self._rank, self._first), costs[self._task, self._first])
        return found[0], found[1]


@lru_cache(maxsize=4)  # the steps of a run share one
def schedule_recurrence(table: ScheduleTable, num: tuple[tuple[str, int], ...]) -> ScheduleRecurrence:
    """The recurrence of a timetable for these numbers of microbatches."""
    return ScheduleRecurrence(table, dict(num))


def _read(line: str, table: ScheduleTable, num: Mapping[str, int], rank: int) -> list[_Turn]:
    found = []
    for turn in map(int, line.split()):
        microbatch, task = divmod(turn, len(table.tasks))
        found.append(_Turn(rank, task, microbatch, _met(num, table.tasks[task].unit, LLM, microbatch).start))
    return found


def _met(num: Mapping[str, int], unit: str, other: str, microbatch: int) -> range:
    """The microbatches of `other` that those of a unit meet in a block; inside the unit each meets itself."""
    if unit == other:
        return range(microbatch, microbatch + 1)
    blocks = gcd(num[unit], num[other])
    block, width = microbatch // (num[unit] // blocks), num[other] // blocks
    return range(block * width, (block + 1) * width)


def _waits(turns: Sequence[Sequence[_Turn]], table: ScheduleTable, num: Mapping[str, int]) -> list[list[int]]:
    """For each turn, counted through all ranks, the turns that must have ended."""
    unit_of = {task.stage: task.unit for task in table.tasks}
    destinations: list[list[int]] = [[] for _ in table.sources]
    for stage, sources in enumerate(table.sources):
        for source in sources:
            destinations[source].append(stage)
    made: dict[tuple[bool, int, int], int] = {}  # (way, stage, microbatch) -> the last turn of it
    flat = [turn for of_rank in turns for turn in of_rank]
    for number, turn in enumerate(flat):
        made[table.tasks[turn.task].is_forward, table.tasks[turn.task].stage, turn.microbatch] = number
    waits: list[list[int]] = []
    for number, turn in enumerate(flat):
        task = table.tasks[turn.task]
        needed = [(task.is_forward, s) for s in (table.sources if task.is_forward else destinations)[task.stage]]
        needed += [] if task.is_forward else [(True, task.stage)]
        keys = ((way, s, m) for way, s in needed for m in _met(num, task.unit, unit_of[s], turn.microbatch))
        found = {made[key] for key in keys if key in made}
        waits.append(sorted(found | ({number - 1} if number and flat[number - 1].rank == turn.rank else set())))
    return waits


def _levels(waits: Sequence[Sequence[int]]) -> IntArray:
    """(n,) the longest chain of turns that a turn waits for."""
    left = [len(w) for w in waits]
    then: list[list[int]] = [[] for _ in waits]
    for turn, needed in enumerate(waits):
        for other in needed:
            then[other].append(turn)
    level = np.zeros(len(waits), dtype=np.int64)
    ready = [turn for turn, count in enumerate(left) if count == 0]
    for turn in ready:  # grows
        for other in then[turn]:
            left[other] -= 1
            level[other] = max(level[other], level[turn] + 1)
            if left[other] == 0:
                ready.append(other)
    if len(ready) < len(waits):
        raise ValueError("the turns of the ranks wait for each other in a circle")
    return level
