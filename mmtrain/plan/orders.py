"""Replays (interleaved) 1F1B for many cuts, batches and replica groups at once: the search ranks thousands by it.

The order of a stage graph's compute, and what waits for what, do not depend on how many layers a stage holds. So it is
worked out once, its actions are numbered by how many others come before them, and all actions of a level are computed
in one step, for as many sets of durations as there are columns.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mmtrain.program.graph import Edge, StageGraph, StageId, block_sizes
from mmtrain.program.positions import Position, positions

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
SOURCE = 0  # row of a node that is done at time 0
LOCAL = -1  # index of the delay, 0, of what needs no message


@dataclass(frozen=True)
class Level:
    """Actions that wait only for those of earlier levels: rows [first, last) of the table of ends."""

    first: int
    last: int
    producers: IntArray  # rows, all that the first action waits for, then those of the second, ...
    offsets: IntArray  # where each action's begin
    delays: IntArray  # per producer: index of the edge its message takes
    has_delay: bool


@dataclass(frozen=True)
class Order:
    """The compute of one replica group: rows of a table of ends, level by level."""

    num_rows: int
    levels: tuple[Level, ...]
    rows: Mapping[StageId, tuple[IntArray, IntArray]]  # forwards, backwards: by replica, then microbatch
    last_of_rank: Mapping[int, int]  # row of the rank's last compute
    edges: tuple[Edge, ...]
    alive: Mapping[StageId, int]  # microbatches between forward and backward at most, see `builder.in_flight`

    def ends(
        self, seconds: Mapping[StageId, tuple[FloatArray, FloatArray]], delays: Sequence[float]
    ) -> dict[int, FloatArray]:
        """Seconds at which each rank has done its last compute, (columns,).

        seconds: forward and backward of each stage, (columns, replicas x microbatches). delays: what a message over
        each of `edges` takes at least. A bound of what the simulator says, and equal to it where messages neither wait
        for each other nor for their receivers, and collectives come last.
        """
        num_columns = next(iter(seconds.values()))[0].shape[0]
        taken = np.zeros((self.num_rows, num_columns))
        for stage, (forward, backward) in self.rows.items():
            taken[forward] = seconds[stage][0].T
            if len(backward):
                taken[backward] = seconds[stage][1].T
        wait = np.append(np.asarray(delays, dtype=np.float64), 0.0)[:, None]
        for level in self.levels:
            ready = taken[level.producers]
            if level.has_delay:
                ready += wait[level.delays]
            taken[level.first : level.last] += np.maximum.reduceat(ready, level.offsets, axis=0)
        return {rank: taken[row] for rank, row in self.last_of_rank.items()}


def order_of(graph: StageGraph) -> Order:
    """Work out the order of a graph of one replica group, whose lanes are known by their first rank."""
    wires = _Wires(graph)
    ranks = sorted({lane[0] for s in graph.stages for lane in s.lanes})
    found = positions(graph)
    sequences = _sequences(graph, ranks, wires, found)
    levels = _levels([*sequences, *([join] for join in wires.joins)], wires.producers, wires.num_actions)
    alive = {stage: count for position in found for stage, count in position.in_flight().items()}
    return _tables(graph, dict(zip(ranks, sequences, strict=True)), wires, levels, alive)


@dataclass
class _Wires:
    """Numbers of actions, and for each the numbers of those it waits for on other ranks, with the edge between."""

    graph: StageGraph
    num_actions: int = 0
    first: dict[tuple[StageId, bool], int] = field(default_factory=dict)
    producers: list[list[tuple[int, int]]] = field(default_factory=list)
    joins: list[int] = field(default_factory=list)  # nodes that stand for all microbatches of a block

    def __post_init__(self) -> None:
        for is_forward in (True, False):
            for stage in self.graph.stages:
                if is_forward or self.graph.needs_backward(stage.id):
                    self.first[stage.id, is_forward] = self._add(self._count(stage.id))
        for at, edge in enumerate(self.graph.edges):
            self._wire(edge.src, edge.dst, True, self._delay(at, edge))
            if self.graph.carries_gradient(edge):
                self._wire(edge.dst, edge.src, False, self._delay(at, edge))

    def number(self, stage: StageId, is_forward: bool, replica: int, index: int) -> int:
        return self.first[stage, is_forward] + replica * self.graph.mesh(stage.unit).num_microbatches + index

    def _add(self, count: int) -> int:
        self.producers += [[] for _ in range(count)]
        self.num_actions += count
        return self.num_actions - count

    def _count(self, stage: StageId) -> int:
        mesh = self.graph.mesh(stage.unit)
        return mesh.dp * mesh.num_microbatches

    def _delay(self, at: int, edge: Edge) -> int:
        same = edge.crosses_units or self.graph.stage(edge.src).lanes == self.graph.stage(edge.dst).lanes
        return LOCAL if same else at

    def _wire(self, giver: StageId, taker: StageId, is_forward: bool, delay: int) -> None:
        """Let every action of `taker` wait for the giver's of its block."""
        own, other = self.graph.mesh(giver.unit), self.graph.mesh(taker.unit)
        if own.unit == other.unit:
            for i in range(self._count(giver)):
                self.producers[self.first[taker, is_forward] + i].append((self.first[giver, is_forward] + i, delay))
            return
        given, taken = block_sizes(own.num_microbatches, other.num_microbatches)
        for block in range(own.num_microbatches // given):
            join = self._add(1)
            self.joins.append(join)
            self.producers[join] = [
                (self.number(giver, is_forward, r, block * given + i), LOCAL)
                for r in range(own.dp)
                for i in range(given)
            ]
            for r in range(other.dp):
                for i in range(taken):
                    self.producers[self.number(taker, is_forward, r, block * taken + i)].append((join, delay))


def _sequences(
    graph: StageGraph, ranks: Iterable[int], wires: _Wires, positioned: Iterable[Position]
) -> list[list[int]]:
    """What each rank computes, in order: `builder.build_1f1b` in numbers."""
    places = {
        stage: (position, k % position.num_places)
        for position in positioned
        for k, part in enumerate(position.parts)
        for stage in part
    }
    found = []
    for rank in ranks:
        held = dict(graph.held_by(rank))
        position, place = places[next(iter(held))]
        chunks = [[s for s in position.part(place, chunk) if s in held] for chunk in range(position.num_chunks)]
        found.append(
            [
                wires.number(stage, is_forward, held[stage], index)
                for is_forward, chunk, wave in position.turns(place)
                for stage in (chunks[chunk] if is_forward else reversed(chunks[chunk]))
                if (stage, is_forward) in wires.first
                for index in position.paces[stage.unit].due(is_forward, wave)
            ]
        )
    return found


def _levels(sequences: Sequence[Sequence[int]], producers: Sequence[Sequence[tuple[int, int]]], num: int) -> list[int]:
    """How many actions must come before each, at least one after another; the first have 1."""
    level = [0] * num
    at = [0] * len(sequences)
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    stack = list(range(len(sequences)))
    while stack:
        line = stack.pop()
        sequence, i = sequences[line], at[line]
        before = level[sequence[i - 1]] if i else 0
        while i < len(sequence):
            action, highest = sequence[i], before
            for producer, _ in producers[action]:
                if not level[producer]:
                    waiting[producer].append(line)
                    break
                highest = max(highest, level[producer])
            else:
                level[action] = before = highest + 1
                stack += waiting.pop(action, ())
                i += 1
                continue
            break
        at[line] = i
    assert all(level), "1F1B orders never wait in a circle"
    return level


def _tables(
    graph: StageGraph,
    sequences: Mapping[int, Sequence[int]],
    wires: _Wires,
    level: Sequence[int],
    alive: Mapping[StageId, int],
) -> Order:
    by_level = np.argsort(np.asarray(level), kind="stable")
    row = np.empty(wires.num_actions, dtype=np.int64)
    row[by_level] = np.arange(1, wires.num_actions + 1)  # after SOURCE
    before = {b: a for sequence in sequences.values() for a, b in pairwise(sequence)}
    steps = np.flatnonzero(np.diff(np.asarray(level)[by_level], prepend=0, append=-1))
    levels = []
    for lo, hi in pairwise(steps.tolist()):
        actions = by_level[lo:hi].tolist()
        flat: list[int] = []
        delays: list[int] = []
        offsets = []
        for action in actions:
            offsets.append(len(flat))
            previous = before.get(action)
            flat.append(SOURCE if previous is None else int(row[previous]))
            delays.append(LOCAL)
            for producer, delay in wires.producers[action]:
                flat.append(int(row[producer]))
                delays.append(delay)
        late = np.asarray(delays, dtype=np.int64)
        has_delay = bool((late != LOCAL).any())
        levels.append(Level(lo + 1, hi + 1, np.asarray(flat), np.asarray(offsets), late, has_delay))
    none = np.empty(0, dtype=np.int64)
    rows = {}
    for stage in graph.stages:
        mesh = graph.mesh(stage.id.unit)
        count = mesh.dp * mesh.num_microbatches
        forward, backward = wires.first[stage.id, True], wires.first.get((stage.id, False))
        rows[stage.id] = (
            row[forward : forward + count],
            none if backward is None else row[backward : backward + count],
        )
    last = {rank: int(row[sequence[-1]]) for rank, sequence in sequences.items()}
    return Order(wires.num_actions + 1, tuple(levels), rows, last, graph.edges, alive)
