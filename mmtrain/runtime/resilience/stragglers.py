"""Detect stragglers: ranks whose compute takes longer than their load and the pace of their peers explain."""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.program import Compute, Stage, StageGraph, StageId, Timing
from mmtrain.program.ir.actions import Direction
from mmtrain.program.ir.segments import direction as direction_of
from mmtrain.program.trace.step_record import StepRecord

FloatArray = npt.NDArray[np.float64]
TpGroup = tuple[int, ...]

DIRECTIONS: tuple[Direction, Direction] = ("F", "B")
STRAGGLER_WINDOW_STEPS = 10  # a rank that is slow in most of them is a straggler
MIN_STRAGGLER_SLOWDOWN = 1.5  # of the peers' pace; less is within what busy machines do to each other
MIN_LOST_STEP_SHARE = 0.05  # of the step time; a rank that loses less delays no other noticeably


@dataclass(frozen=True)
class Straggler:
    """A TP group that is slower than its peers at some kinds of work."""

    ranks: TpGroup
    tasks: tuple[str, ...]  # like `F vision.0`
    slowdown: float  # its time over the peers' time for the same load
    lost_s_per_step: float

    def to_text(self) -> str:
        """Return one line for the user."""
        is_single = len(self.ranks) == 1
        ranks = ", ".join(map(str, self.ranks))
        subject = f"rank {ranks} takes" if is_single else f"ranks {ranks} together take"
        peers = "its peers" if is_single else "their peers"
        lost = f"{self.lost_s_per_step:.2g} s a step"
        return f"{subject} {self.slowdown:.1f}x the time of {peers} for {', '.join(self.tasks)} ({lost})"


@dataclass(frozen=True)
class _SlowTask:
    """Forwards or backwards of one stage that took a TP group longer than its peers."""

    name: str  # like `F vision.0`
    slowdown: float
    lost_s: float  # a step


@dataclass(frozen=True)
class _Task:
    """Forwards or backwards of comparable stages; entry k is one stage on one TP group."""

    direction: Direction
    entries: tuple[tuple[StageId, TpGroup], ...]
    rows: npt.NDArray[np.int64]  # where each entry's measured seconds are in the table; predicted ones follow
    columns: npt.NDArray[np.int64]
    window: deque[FloatArray]  # of the last steps: (2, entries) slowdowns, seconds lost


class StragglerDetector:
    """Compares ranks, step by step, by the seconds of each stage's forwards and backwards.

    Measured seconds are divided by predicted ones, so that loads do not count. Peers are TP groups with stages for
    which `work_of` returns equal values: the other replicas, and stages of the same kinds of layers. An error of the
    prediction is the same for all of them, so modelled costs are good enough. A stage without peers is not compared.
    Ranks of a TP group wait for each other inside compute, so they are compared as one.
    """

    def __init__(self, graph: StageGraph, work_of: Callable[[Stage], Hashable]) -> None:
        ranks = {rank for mesh in graph.meshes for rank in mesh.ranks}
        groups: defaultdict[Hashable, list[tuple[StageId, TpGroup]]] = defaultdict(list)
        for stage in graph.stages:
            groups[work_of(stage)] += [(stage.id, tp_group) for tp_group in stage.tp_groups]
        compared = [tuple(entries) for entries in groups.values() if len({tp_group for _, tp_group in entries}) > 1]
        self._compared_stages = {stage for entries in compared for stage, _ in entries}
        self._stages_of_rank = {
            rank: [stage for stage, _ in graph.held_by(rank) if stage in self._compared_stages] for rank in ranks
        }
        self.num_values = 4 * max(map(len, self._stages_of_rank.values()))
        self._tasks = [self._task(direction, entries) for entries in compared for direction in DIRECTIONS]
        self._known: set[TpGroup] = set()  # stragglers of the step before

    def _task(self, direction: Direction, entries: tuple[tuple[StageId, TpGroup], ...]) -> _Task:
        rows = [tp_group[0] for _, tp_group in entries]
        columns = [
            4 * self._stages_of_rank[tp_group[0]].index(stage) + 2 * DIRECTIONS.index(direction)
            for stage, tp_group in entries
        ]
        window: deque[FloatArray] = deque(maxlen=STRAGGLER_WINDOW_STEPS)
        return _Task(direction, entries, np.array(rows), np.array(columns), window)

    def rank_values(self, rank: int, record: StepRecord, timing: Timing) -> list[float]:
        """Return what a rank contributes to a step's table, padded to `num_values`.

        For each compared stage: measured and predicted seconds of its forwards, then of its backwards.
        """
        sums = {(stage, direction): [0.0, 0.0] for stage in self._stages_of_rank[rank] for direction in DIRECTIONS}
        for done in record.actions:
            if isinstance(done.action, Compute) and done.action.stage in self._compared_stages:
                measured_and_predicted = sums[done.action.stage, direction_of(done.action)]
                measured_and_predicted[0] += done.busy_s
                measured_and_predicted[1] += timing.compute(done.action)
        values = [value for pair in sums.values() for value in pair]
        return values + [0.0] * (self.num_values - len(values))

    def detect(self, table: FloatArray, step_time_s: float) -> tuple[list[Straggler], list[Straggler]]:
        """Add a step to the window; return the stragglers, and those of them that were none in the step before.

        table: (ranks, num_values), row k of rank k.
        """
        slow_tasks: defaultdict[TpGroup, list[_SlowTask]] = defaultdict(list)
        for task in self._tasks:
            _add_step(task, table)
            if len(task.window) == STRAGGLER_WINDOW_STEPS:
                slowdowns, lost_s = _medians(np.stack(list(task.window)))
                for k in np.flatnonzero(slowdowns >= MIN_STRAGGLER_SLOWDOWN):
                    stage, tp_group = task.entries[k]
                    name = f"{task.direction} {stage}"
                    slow_tasks[tp_group].append(_SlowTask(name, float(slowdowns[k]), float(lost_s[k])))
        slow_groups = [_to_straggler(tp_group, tasks) for tp_group, tasks in slow_tasks.items()]
        stragglers = [s for s in slow_groups if s.lost_s_per_step >= MIN_LOST_STEP_SHARE * step_time_s]
        new = [s for s in stragglers if s.ranks not in self._known]
        self._known = {s.ranks for s in stragglers}
        return stragglers, new


def _add_step(task: _Task, table: FloatArray) -> None:
    """Compare each entry with the others in this step; an entry without load is left out."""
    measured, predicted = table[task.rows, task.columns], table[task.rows, task.columns + 1]
    pace = np.divide(measured, predicted, out=np.full(len(measured), np.nan), where=predicted > 0)
    peers = median_of_others(pace)
    task.window.append(np.stack([pace / peers, measured - predicted * peers]))


def _to_straggler(tp_group: TpGroup, tasks: list[_SlowTask]) -> Straggler:
    lost_s = sum(task.lost_s for task in tasks)
    peers_s = sum(task.lost_s / (task.slowdown - 1) for task in tasks)  # for the same load
    return Straggler(tp_group, tuple(task.name for task in tasks), 1 + lost_s / peers_s, lost_s)


def median_of_others(values: FloatArray) -> FloatArray:
    """Return for each value the median of all the others; values that are not finite do not count and get NaN.

    values: (n,).
    """
    medians = np.full(len(values), np.nan)
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) < 2:
        return medians
    order = finite[np.argsort(values[finite])]
    ordered = values[order]
    positions = np.arange(len(order))
    num_others = len(order) - 1
    # Without the value at its own position, all values behind it move up by one.
    lower_index = (num_others - 1) // 2
    upper_index = num_others // 2
    lower = ordered[lower_index + (positions <= lower_index)]
    upper = ordered[upper_index + (positions <= upper_index)]
    medians[order] = (lower + upper) / 2
    return medians


def _medians(window: FloatArray) -> FloatArray:
    """Return medians over the steps (axis 0) where most steps have a value; elsewhere 0."""
    has_most = np.isfinite(window).sum(axis=0) > len(window) // 2
    return np.where(has_most, np.nanmedian(np.where(has_most, window, 0.0), axis=0), 0.0)
