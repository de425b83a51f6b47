"""Slow ranks: those whose compute takes longer than their load and the pace of their peers explain."""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.program import Compute, StageGraph, StageId, Timing
from mmtrain.program.actions import Direction
from mmtrain.program.recorded import StepRecord
from mmtrain.program.segments import direction
from mmtrain.program.wiring import held_stages

FloatArray = npt.NDArray[np.float64]

Work = tuple[StageId, Direction]
KINDS: tuple[Direction, Direction] = ("F", "B")

WINDOW = 5  # steps; what is slow in most of them is called slow
FACTOR = 1.5  # times the peers' pace; less is within what busy machines do to each other
SHARE = 0.05  # of a step's time; a stage that loses less holds nobody up


@dataclass(frozen=True)
class Slow:
    """A lane that is slower than its peers at one kind of work."""

    ranks: tuple[int, ...]
    stage: StageId
    kind: Direction
    times: float  # the peers' time for the same load
    lost_s: float  # a step

    def to_text(self) -> str:
        """One line for people."""
        one = len(self.ranks) == 1
        who = f"rank {self.ranks[0]} takes" if one else f"ranks {', '.join(map(str, self.ranks))} together take"
        what = f"{self.times:.1f}x the time of {'its' if one else 'their'} peers for {self.kind} {self.stage}"
        return f"{who} {what} ({self.lost_s:.2g} s a step)"


class SlowRanks:
    """Compares ranks, step by step, by the seconds of each stage's forwards and backwards.

    Measured seconds are divided by predicted ones, so that loads do not count; what is wrong in the prediction is
    wrong for all replicas of a stage, which are each other's peers. Ranks of a lane wait for each other inside
    compute and are judged as one. A stage without a second replica has no peers: how fast it should be cannot be told
    from modelled costs, nor from stages with other layers.
    """

    def __init__(self, graph: StageGraph) -> None:
        self._graph = graph
        ranks = {rank for mesh in graph.meshes for rank in mesh.ranks}
        self._slots = {rank: [stage for stage, _ in held_stages(graph, rank)] for rank in ranks}
        self.num_figures = 4 * max(map(len, self._slots.values()))
        self._seen: dict[Work, deque[FloatArray]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._known: set[tuple[Work, tuple[int, ...]]] = set()

    def figures(self, rank: int, record: StepRecord, timing: Timing) -> list[float]:
        """What a rank tells the others of its step: measured and predicted seconds, forward and backward, by stage."""
        sums = {(stage, kind): [0.0, 0.0] for stage in self._slots[rank] for kind in KINDS}
        for done in record.done:
            if isinstance(done.action, Compute) and self._has_peers(done.action.stage):
                entry = sums[done.action.stage, direction(done.action)]
                entry[0] += done.busy_s
                entry[1] += timing.compute(done.action)
        figures = [value for entry in sums.values() for value in entry]
        return figures + [0.0] * (self.num_figures - len(figures))

    def judge(self, table: FloatArray, step_time_s: float) -> tuple[list[Slow], list[Slow]]:
        """Take a step's figures, row k of rank k; return who is slow now, and who of them was not before."""
        works = [(s.id, kind) for s in self._graph.stages if self._has_peers(s.id) for kind in KINDS]
        now = [slow for work in works for slow in self._slow_at(work, table, step_time_s)]
        known, self._known = self._known, {((slow.stage, slow.kind), slow.ranks) for slow in now}
        return now, [slow for slow in now if ((slow.stage, slow.kind), slow.ranks) not in known]

    def _has_peers(self, stage: StageId) -> bool:
        return len(self._graph.stage(stage).lanes) > 1

    def _slow_at(self, work: Work, table: FloatArray, step_time_s: float) -> Iterator[Slow]:
        lanes = self._graph.stage(work[0]).lanes
        rows = [lane[0] for lane in lanes]
        columns = np.array([4 * self._slots[rank].index(work[0]) + 2 * KINDS.index(work[1]) for rank in rows])
        measured, predicted = table[rows, columns], table[rows, columns + 1]
        pace = np.divide(measured, predicted, out=np.full(len(lanes), np.nan), where=predicted > 0)
        peers = median_of_others(pace)
        self._seen[work].append(np.stack([pace / peers, measured - predicted * peers]))
        if len(self._seen[work]) < WINDOW:
            return
        times, lost_s = _medians(np.stack(list(self._seen[work])))
        for lane in np.flatnonzero((times >= FACTOR) & (lost_s >= SHARE * step_time_s)):
            yield Slow(lanes[lane], *work, float(times[lane]), float(lost_s[lane]))


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
