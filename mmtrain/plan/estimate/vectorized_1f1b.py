"""Replays (interleaved) 1F1B for many cuts, batches and replica groups at once: the search ranks thousands by it.

The order of a stage graph's compute, and what waits for what, do not depend on how many layers a stage holds. So it is
worked out once, its actions are numbered by how many others come before them, and all actions of a level are computed
in one step, for as many sets of durations as there are columns.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmtrain.program.ir.graph import Edge, StageGraph, StageId, microbatches_per_block
from mmtrain.program.schedules.pipeline_positions import PipelinePosition, find_positions

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
SOURCE = 0  # row of a node that is done at time 0
LOCAL = -1  # index of the delay, 0, of what needs no message


@dataclass(frozen=True)
class DependencyLevel:
    """Actions that wait only for those of earlier levels: rows [first, last) of the table of ends."""

    first: int
    last: int
    producers: IntArray  # rows, all that the first action waits for, then those of the second, ...
    offsets: IntArray  # where each action's begin
    delays: IntArray  # per producer: index of the edge its message takes
    has_delay: bool


@dataclass(frozen=True)
class ComputeOrder:
    """The compute of one replica group: rows of a table of ends, level by level."""

    num_rows: int
    levels: tuple[DependencyLevel, ...]
    rows: Mapping[StageId, tuple[IntArray, IntArray]]  # forwards, backwards: by replica, then microbatch
    last_of_rank: Mapping[int, int]  # row of the rank's last compute
    edges: tuple[Edge, ...]
    in_flight: Mapping[StageId, int]  # microbatches between forward and backward at most, see `builder.in_flight`

    def ends(
        self, seconds: Mapping[StageId, tuple[FloatArray, FloatArray]], delays: Sequence[float] | FloatArray
    ) -> dict[int, FloatArray]:
        """Seconds at which each rank has done its last compute, (columns,).

        seconds: forward and backward of each stage, (columns, replicas x microbatches). delays: what a message over
        each of `edges` takes at least, (edges,) or (edges, columns). A bound of what the simulator says, and equal to
        it where messages neither wait for each other nor for their receivers, and collectives come last.
        """
        num_columns = next(iter(seconds.values()))[0].shape[0]
        taken = np.zeros((self.num_rows, num_columns))
        for stage, (forward, backward) in self.rows.items():
            taken[forward] = seconds[stage][0].T
            if len(backward):
                taken[backward] = seconds[stage][1].T
        each = np.asarray(delays, dtype=np.float64)
        each = each[:, None] if each.ndim == 1 else each
        wait = np.concatenate([each, np.zeros((1, each.shape[1]))])
        for level in self.levels:
            ready = taken[level.producers]
            if level.has_delay:
                ready += wait[level.delays]
            taken[level.first : level.last] += np.maximum.reduceat(ready, level.offsets, axis=0)
        return {rank: taken[row] for rank, row in self.last_of_rank.items()}


def compute_order(graph: StageGraph) -> ComputeOrder:
    """Work out the order of a graph of one replica group, whose TP groups are known by their first rank."""
    wires = _Wires(graph)
    found = find_positions(graph)
    sequences = _sequences(graph, wires, found)
    waits = wires.waits(sequences.values())
    alive = {stage: count for position in found for stage, count in position.in_flight().items()}
    return _tables(graph, sequences, wires, waits, alive)


class _Waits(NamedTuple):
    """What waits for what: action `taker[i]` for `giver[i]`, whose message takes `delay[i]`."""

    taker: IntArray
    giver: IntArray
    delay: IntArray


@dataclass
class _Wires:
    """Numbers of actions, and what they wait for on other ranks."""

    graph: StageGraph
    num_actions: int = 0
    first: dict[tuple[StageId, bool], int] = field(default_factory=dict)
    _waits: list[tuple[IntArray, IntArray, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for is_forward in (True, False):
            for stage in self.graph.stages:
                if is_forward or self.graph.needs_backward(stage.id):
                    self.first[stage.id, is_forward] = self._add(self._count(stage.id))
        for at, edge in enumerate(self.graph.edges):
            self._wire(edge.src, edge.dst, True, self._delay(at, edge))
            if self.graph.carries_gradient(edge):
                self._wire(edge.dst, edge.src, False, self._delay(at, edge))

    def waits(self, sequences: Iterable[IntArray]) -> _Waits:
        """Everything, the order on each rank included."""
        own = [(sequence[1:], sequence[:-1], LOCAL) for sequence in sequences]
        takers, givers, delays = zip(*self._waits, *own, strict=True)
        sizes = [len(taker) for taker in takers]
        return _Waits(np.concatenate(takers), np.concatenate(givers), np.repeat(delays, sizes))

    def numbers(self, stage: StageId, is_forward: bool) -> IntArray:
        """(replicas, microbatches) of a stage."""
        mesh = self.graph.mesh(stage.unit)
        every = self.first[stage, is_forward] + np.arange(mesh.dp * mesh.num_microbatches)
        return every.reshape(mesh.dp, mesh.num_microbatches)

    def _add(self, count: int) -> int:
        self.num_actions += count
        return self.num_actions - count

    def _count(self, stage: StageId) -> int:
        mesh = self.graph.mesh(stage.unit)
        return mesh.dp * mesh.num_microbatches

    def _delay(self, at: int, edge: Edge) -> int:
        same = edge.crosses_units or self.graph.stage(edge.src).tp_groups == self.graph.stage(edge.dst).tp_groups
        return LOCAL if same else at

    def _wire(self, giver: StageId, taker: StageId, is_forward: bool, delay: int) -> None:
        """Let every action of `taker` wait for the giver's of its block; a node between them stands for the block."""
        given, taken = self.numbers(giver, is_forward), self.numbers(taker, is_forward)
        if giver.unit == taker.unit:
            self._waits.append((taken.ravel(), given.ravel(), delay))
            return
        own, other = microbatches_per_block(given.shape[1], taken.shape[1])
        join = self._add(given.shape[1] // own)
        collected = join + np.broadcast_to(np.arange(given.shape[1]) // own, given.shape)
        handed_on = join + np.broadcast_to(np.arange(taken.shape[1]) // other, taken.shape)
        self._waits.append((collected.ravel(), given.ravel(), LOCAL))
        self._waits.append((taken.ravel(), handed_on.ravel(), delay))


def _sequences(graph: StageGraph, wires: _Wires, positioned: Iterable[PipelinePosition]) -> dict[int, IntArray]:
    """What each rank computes, in order: `builder.build_1f1b` in numbers."""
    places = {
        stage: (position, k % position.num_pipeline_ranks)
        for position in positioned
        for k, part in enumerate(position.virtual_stages)
        for stage in part
    }
    tables: dict[tuple[int, int], IntArray] = {}
    held: defaultdict[int, dict[StageId, int]] = defaultdict(dict)
    for stage in graph.stages:
        for replica, tp_group in enumerate(stage.tp_groups):
            held[tp_group[0]][stage.id] = replica
    found = {}
    for rank, stages in sorted(held.items()):
        position, place = places[next(iter(stages))]
        key = (id(position), place)
        if key not in tables:
            tables[key] = position.pass_table(place)
        found[rank] = _sequence(position, place, tables[key], stages, wires)
    return found


def _sequence(
    position: PipelinePosition, place: int, turns: IntArray, replica: Mapping[StageId, int], wires: _Wires
) -> IntArray:
    """Numbers of what a rank computes turn by turn: in a forward its stages one after another, else in reverse."""
    numbers, when = [], []
    for chunk in range(position.num_chunks):
        here = np.flatnonzero(turns[:, 1] == chunk)
        part = [stage for stage in position.stages_at(place, chunk) if stage in replica]
        for (k, stage), is_forward in product(enumerate(part), (True, False)):
            if (stage, is_forward) not in wires.first:
                continue
            pace, at = position.pacing[stage.unit], here[turns[here, 0] == is_forward]
            block, wave = np.divmod(turns[at, 2], pace.num_waves)
            is_due = wave == pace.due_at(is_forward)
            index = block[is_due, None] * pace.num_microbatches + np.arange(pace.num_microbatches)
            numbers.append(wires.numbers(stage, is_forward)[replica[stage]][index.ravel()])
            turn = at[is_due] * len(replica) + (k if is_forward else len(part) - 1 - k)
            when.append(np.repeat(turn, pace.num_microbatches))
    return np.concatenate(numbers)[np.argsort(np.concatenate(when), kind="stable")]


def _levels(waits: _Waits, num: int) -> IntArray:
    """(num,) how many actions must come before each, at least one after another; the first have 0."""
    by_giver = np.argsort(waits.giver, kind="stable")
    taker = waits.taker[by_giver]
    first = np.searchsorted(waits.giver[by_giver], np.arange(num + 1))
    left = np.bincount(waits.taker, minlength=num)
    level, seen = np.full(num, -1), np.empty(num, dtype=np.int64)
    ready, now = np.flatnonzero(left == 0), 0
    while len(ready):
        level[ready] = now
        sizes = first[ready + 1] - first[ready]
        ends = np.cumsum(sizes)
        freed = taker[np.repeat(first[ready] - ends + sizes, sizes) + np.arange(ends[-1])]
        np.subtract.at(left, freed, 1)
        freed = freed[left[freed] == 0]
        seen[freed] = np.arange(len(freed))  # of those freed by several, one is kept
        ready, now = freed[seen[freed] == np.arange(len(freed))], now + 1
    assert (level >= 0).all(), "1F1B orders never wait in a circle"
    return level


def _tables(
    graph: StageGraph, sequences: Mapping[int, IntArray], wires: _Wires, waits: _Waits, alive: Mapping[StageId, int]
) -> ComputeOrder:
    level = _levels(waits, wires.num_actions)
    by_level = np.argsort(level, kind="stable")
    row = np.empty(wires.num_actions, dtype=np.int64)
    row[by_level] = np.arange(1, wires.num_actions + 1)  # after SOURCE
    alone = np.flatnonzero(level == 0)
    takers = np.concatenate([row[waits.taker], row[alone]])
    order = np.argsort(takers, kind="stable")
    producers = np.concatenate([row[waits.giver], np.full(len(alone), SOURCE)])[order]
    delays = np.concatenate([waits.delay, np.full(len(alone), LOCAL)])[order]
    first = np.searchsorted(takers[order], np.arange(1, wires.num_actions + 2))
    bounds = np.searchsorted(level[by_level], np.arange(level.max() + 2)).tolist()
    levels = []
    for lo, hi in pairwise(bounds):
        here = slice(first[lo], first[hi])
        has_delay = bool((delays[here] != LOCAL).any())
        levels.append(
            DependencyLevel(lo + 1, hi + 1, producers[here], first[lo:hi] - first[lo], delays[here], has_delay)
        )
    none = np.empty(0, dtype=np.int64)
    rows = {}
    for stage in (s.id for s in graph.stages):
        backward = row[wires.numbers(stage, False).ravel()] if (stage, False) in wires.first else none
        rows[stage] = row[wires.numbers(stage, True).ravel()], backward
    last = {rank: int(row[sequence[-1]]) for rank, sequence in sequences.items()}
    return ComputeOrder(wires.num_actions + 1, tuple(levels), rows, last, graph.edges, alive)
