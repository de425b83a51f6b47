"""Slow ranks: those whose compute takes longer than their load and the pace of their peers explain."""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.program import Compute, Stage, StageGraph, StageId, Timing
from mmtrain.program.ir.actions import Direction
from mmtrain.program.ir.segments import direction
from mmtrain.program.trace.step_record import StepRecord

FloatArray = npt.NDArray[np.float64]
TpGroup = tuple[int, ...]

DIRECTIONS: tuple[Direction, Direction] = ("F", "B")
STRAGGLER_WINDOW_STEPS = 10  # steps; what is slow in most of them is called slow
MIN_STRAGGLER_SLOWDOWN = 1.5  # times the peers' pace; less is within what busy machines do to each other
MIN_LOST_STEP_SHARE = 0.05  # of a step's time; who loses less holds nobody up


@dataclass(frozen=True)
class Straggler:
    """A TP group that is slower than its peers at some kinds of work."""

    ranks: TpGroup
    tasks: tuple[str, ...]  # like `F vision.0`
    slowdown: float  # the peers' time for the same load
    lost_s_per_step: float  # a step

    def to_text(self) -> str:
        """One line for people."""
        one = len(self.ranks) == 1
        who = f"rank {self.ranks[0]} takes" if one else f"ranks {', '.join(map(str, self.ranks))} together take"
        what = f"{self.slowdown:.1f}x the time of {'its' if one else 'their'} peers for {', '.join(self.tasks)}"
        return f"{who} {what} ({self.lost_s_per_step:.2g} s a step)"


@dataclass(frozen=True)
class _Work:
    """Forwards or backwards of stages that do the same, wherever they lie; entry k is a stage on a TP group."""

    kind: Direction
    entries: tuple[tuple[StageId, TpGroup], ...]
    rows: npt.NDArray[np.int64]  # where the figures of each entry are
    columns: npt.NDArray[np.int64]
    seen: deque[FloatArray]  # the last steps: (2, entries) times the peers' pace, seconds lost


class StragglerDetector:
    """Compares ranks, step by step, by the seconds of each stage's forwards and backwards.

    Measured seconds are divided by predicted ones, so that loads do not count. Peers are TP groups with stages that are
    `alike` (its values compare equal): the other replicas, and stages of the same kinds of layers. What is wrong in
    the prediction is wrong for all of them; so modelled costs will do, and a stage that no other is like is not
    judged. Ranks of a TP group wait for each other inside compute and are judged as one.
    """

    def __init__(self, graph: StageGraph, alike: Callable[[Stage], Hashable]) -> None:
        ranks = {rank for mesh in graph.meshes for rank in mesh.ranks}
        slots = {rank: [stage for stage, _ in graph.held_by(rank)] for rank in ranks}
        groups: defaultdict[Hashable, list[tuple[StageId, TpGroup]]] = defaultdict(list)
        for stage in graph.stages:
            groups[alike(stage)] += [(stage.id, tp_group) for tp_group in stage.tp_groups]
        compared = [tuple(entries) for entries in groups.values() if len({tp_group for _, tp_group in entries}) > 1]
        self._judged = {stage for entries in compared for stage, _ in entries}
        self._slots = {rank: [stage for stage in held if stage in self._judged] for rank, held in slots.items()}
        self.num_figures = 4 * max(map(len, self._slots.values()))
        self._works = [self._work(kind, entries) for entries in compared for kind in DIRECTIONS]
        self._known: set[TpGroup] = set()

    def _work(self, kind: Direction, entries: tuple[tuple[StageId, TpGroup], ...]) -> _Work:
        rows = [tp_group[0] for _, tp_group in entries]
        columns = [
            4 * self._slots[tp_group[0]].index(stage) + 2 * DIRECTIONS.index(kind) for stage, tp_group in entries
        ]
        return _Work(kind, entries, np.array(rows), np.array(columns), deque(maxlen=STRAGGLER_WINDOW_STEPS))

    def rank_figures(self, rank: int, record: StepRecord, timing: Timing) -> list[float]:
        """What a rank tells the others of its step: measured and predicted seconds, forward and backward, by stage."""
        sums = {(stage, kind): [0.0, 0.0] for stage in self._slots[rank] for kind in DIRECTIONS}
        for done in record.actions:
            if isinstance(done.action, Compute) and done.action.stage in self._judged:
                entry = sums[done.action.stage, direction(done.action)]
                entry[0] += done.busy_s
                entry[1] += timing.compute(done.action)
        figures = [value for entry in sums.values() for value in entry]
        return figures + [0.0] * (self.num_figures - len(figures))

    def detect(self, table: FloatArray, step_time_s: float) -> tuple[list[Straggler], list[Straggler]]:
        """Take a step's figures, row k of rank k; return who is slow now, and who of them was not before."""
        late: defaultdict[TpGroup, list[tuple[str, float, float]]] = defaultdict(list)
        for work in self._works:
            _compare(work, table)
            if len(work.seen) == STRAGGLER_WINDOW_STEPS:
                times, lost_s = _medians(np.stack(list(work.seen)))
                for k in np.flatnonzero(times >= MIN_STRAGGLER_SLOWDOWN):
                    stage, tp_group = work.entries[k]
                    late[tp_group].append((f"{work.kind} {stage}", float(times[k]), float(lost_s[k])))
        slow = [_slow(tp_group, works) for tp_group, works in late.items()]
        now = [s for s in slow if s.lost_s_per_step >= MIN_LOST_STEP_SHARE * step_time_s]
        known, self._known = self._known, {s.ranks for s in now}
        return now, [s for s in now if s.ranks not in known]


def _compare(work: _Work, table: FloatArray) -> None:
    """Note how each entry does beside the others in this step; one without load is left out."""
    measured, predicted = table[work.rows, work.columns], table[work.rows, work.columns + 1]
    pace = np.divide(measured, predicted, out=np.full(len(measured), np.nan), where=predicted > 0)
    peers = median_of_others(pace)
    work.seen.append(np.stack([pace / peers, measured - predicted * peers]))


def _slow(tp_group: TpGroup, works: list[tuple[str, float, float]]) -> Straggler:
    lost_s = sum(lost for _, _, lost in works)
    wanted_s = sum(lost / (times - 1) for _, times, lost in works)
    return Straggler(tp_group, tuple(name for name, _, _ in works), 1 + lost_s / wanted_s, lost_s)


def median_of_others(values: FloatArray) -> FloatArray:
    """For each value the median of all the others; what is not finite does not count, and gets none."""
    found = np.full(len(values), np.nan)
    at = np.flatnonzero(np.isfinite(values))
    if len(at) < 2:
        return found
    order = at[np.argsort(values[at])]
    ordered, own, num_others = values[order], np.arange(len(order)), len(order) - 1
    middle = (num_others - 1) // 2, num_others // 2
    # Without the k-th, what stood behind it moves up by one.
    low, high = (ordered[place + (own <= place)] for place in middle)
    found[order] = (low + high) / 2
    return found


def _medians(window: FloatArray) -> FloatArray:
    """Medians over the steps (axis 0) where most steps have a value; elsewhere 0."""
    finite = np.isfinite(window)
    enough = finite.sum(axis=0) > len(window) // 2
    return np.where(enough, np.nanmedian(np.where(enough, window, 0.0), axis=0), 0.0)
