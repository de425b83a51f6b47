"""The order of (interleaved) 1F1B in numbers, so that its end is known for thousands of layer partitions at once.

What the ranks of a stage graph compute in which order, and what waits for what, does not depend on how many layers a
stage holds. `compute_order` works it out once for all graphs that are alike but for that, and the ends follow from
durations by `balance.pipeline_recurrence`. `tests/planning/test_vectorized_1f1b.py` holds them against the simulator.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import numpy.typing as npt

from mmtrain.balance.ordering.pipeline_recurrence import NO_MESSAGE, Dependencies, Int32Array, PipelineRecurrence
from mmtrain.program.ir.graph import Edge, StageGraph, StageId, microbatches_per_block
from mmtrain.program.schedules.pipeline_positions import PipelinePosition, find_positions

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ComputeOrder:
    """What the ranks of one replica group compute in which order, and what waits for what."""

    recurrence: PipelineRecurrence
    rows: Mapping[StageId, tuple[Int32Array, Int32Array]]  # forwards, backwards: by replica, then microbatch
    first_row: Mapping[int, int]  # rank -> row of what comes before its first action
    last_row: Mapping[int, int]  # rank -> row of its last action
    stages: Mapping[int, tuple[StageId, ...]]  # rank -> its stages, sources first
    edges: tuple[Edge, ...]

    @property
    def num_actions(self) -> int:
        """Rows of the table of ends."""
        return self.recurrence.num_actions

    def rank_ends(
        self,
        seconds: Mapping[StageId, tuple[FloatArray, FloatArray]],
        delays: FloatArray,
        starts: Mapping[int, FloatArray] | None = None,
    ) -> dict[int, FloatArray]:
        """Return the seconds at which each rank ends its last action, (columns,) by rank.

        seconds: forward and backward of each stage, (columns, replicas x microbatches). delays: what a message over
        each of `edges` takes at least, (edges,) or (edges, columns). starts: when each rank can start its first action,
        (columns,) by rank; None: at 0. The ends are a lower bound of the simulator's, and
        equal to them where messages neither wait for each other nor for their receivers and collectives come last.
        """
        num_columns = next(iter(seconds.values()))[0].shape[0]
        table = np.zeros((self.num_actions, num_columns))  # what only joins others takes no time
        for stage, (forward, backward) in self.rows.items():
            table[forward] = seconds[stage][0].T
            if len(backward):
                table[backward] = seconds[stage][1].T
        for rank, start in (starts or {}).items():
            table[self.first_row[rank]] = start
        self.recurrence.replace_durations_by_ends(table, delays)
        return {rank: table[row] for rank, row in self.last_row.items()}


def compute_order(graph: StageGraph, positions: Sequence[PipelinePosition] | None = None) -> ComputeOrder:
    """Work out the order of a graph of one replica group, whose TP groups are known by their first rank.

    positions: of the graph, see `find_positions`, where they are known.
    """
    actions = _GraphActions(graph)
    positions = find_positions(graph) if positions is None else positions
    stages_of_rank: dict[int, dict[StageId, int]] = {}
    for stage in graph.stages:
        for replica, tp_group in enumerate(stage.tp_groups):
            stages_of_rank.setdefault(tp_group[0], {})[stage.id] = replica
    sequences = {
        rank: np.concatenate([[actions.add(1)], sequence])
        for rank, sequence in _rank_sequences(stages_of_rank, positions, actions).items()
    }
    recurrence = PipelineRecurrence(actions.num_actions, actions.dependencies(sequences.values()))
    return ComputeOrder(
        recurrence=recurrence,
        rows={stage.id: actions.rows(stage.id, recurrence.row) for stage in graph.stages},
        first_row={rank: int(recurrence.row[sequence[0]]) for rank, sequence in sequences.items()},
        last_row={rank: int(recurrence.row[sequence[-1]]) for rank, sequence in sequences.items()},
        stages={rank: tuple(replica_of_stage) for rank, replica_of_stage in stages_of_rank.items()},
        edges=graph.edges,
    )


@dataclass
class _GraphActions:
    """The numbers of a graph's actions, and what they wait for on other ranks."""

    graph: StageGraph
    num_actions: int = 0
    _first: dict[tuple[StageId, bool], int] = field(default_factory=dict)
    _between_ranks: list[tuple[IntArray, IntArray, int]] = field(default_factory=list)  # consumers, producers, message

    def __post_init__(self) -> None:
        for is_forward in (True, False):
            for stage in self.graph.stages:
                if is_forward or self.graph.needs_backward(stage.id):
                    mesh = self.graph.mesh(stage.id.unit)
                    self._first[stage.id, is_forward] = self.add(mesh.dp * mesh.num_microbatches)
        for number, edge in enumerate(self.graph.edges):
            source, destination = self.graph.stage(edge.src), self.graph.stage(edge.dst)
            is_sent = not edge.crosses_units and source.tp_groups != destination.tp_groups
            message = number if is_sent else NO_MESSAGE
            self._connect(edge.src, edge.dst, True, message)
            if self.graph.carries_gradient(edge):
                self._connect(edge.dst, edge.src, False, message)

    def has(self, stage: StageId, is_forward: bool) -> bool:
        """Whether the stage has this pass at all."""
        return (stage, is_forward) in self._first

    def numbers(self, stage: StageId, is_forward: bool) -> IntArray:
        """(replicas, microbatches) numbers of a stage's forwards, or of its backwards."""
        mesh = self.graph.mesh(stage.unit)
        actions = self._first[stage, is_forward] + np.arange(mesh.dp * mesh.num_microbatches)
        return actions.reshape(mesh.dp, mesh.num_microbatches)

    def rows(self, stage: StageId, row: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Rows of a stage's forwards and of its backwards, if it has any."""
        forward = row[self.numbers(stage, True).ravel()]
        backward = row[self.numbers(stage, False).ravel()] if self.has(stage, False) else forward[:0]
        return forward, backward

    def dependencies(self, sequences: Iterable[IntArray]) -> Dependencies:
        """What waits for what: along the edges, and for what comes before in the sequence of each rank."""
        in_rank = [(sequence[1:], sequence[:-1], NO_MESSAGE) for sequence in sequences]
        consumers, producers, messages = zip(*self._between_ranks, *in_rank, strict=True)
        sizes = [len(part) for part in consumers]
        return Dependencies(np.concatenate(consumers), np.concatenate(producers), np.repeat(messages, sizes))

    def add(self, count: int) -> int:
        """Number `count` more actions; return the first number."""
        self.num_actions += count
        return self.num_actions - count

    def _connect(self, source: StageId, destination: StageId, is_forward: bool, message: int) -> None:
        """Let every action of `destination` wait for those of `source` in its block of microbatches.

        Between units one more action, which takes no time, waits for the whole block, so that not every action of a
        block has to wait for every other.
        """
        produced, consuming = self.numbers(source, is_forward), self.numbers(destination, is_forward)
        if source.unit == destination.unit:
            self._between_ranks.append((consuming.ravel(), produced.ravel(), message))
            return
        num_produced, num_consuming = microbatches_per_block(produced.shape[1], consuming.shape[1])
        first_join = self.add(produced.shape[1] // num_produced)
        join_of_produced = first_join + np.broadcast_to(np.arange(produced.shape[1]) // num_produced, produced.shape)
        join_of_consuming = first_join + np.broadcast_to(
            np.arange(consuming.shape[1]) // num_consuming, consuming.shape
        )
        self._between_ranks.append((join_of_produced.ravel(), produced.ravel(), NO_MESSAGE))
        self._between_ranks.append((consuming.ravel(), join_of_consuming.ravel(), message))


def _rank_sequences(
    stages_of_rank: Mapping[int, Mapping[StageId, int]], positions: Iterable[PipelinePosition], actions: _GraphActions
) -> dict[int, IntArray]:
    """The numbers of what each rank computes, in order, as `builder.build_1f1b` orders it."""
    placed = {
        stage: (position, k % position.num_pipeline_ranks)
        for position in positions
        for k, virtual_stage in enumerate(position.virtual_stages)
        for stage in virtual_stage
    }
    pass_tables: dict[tuple[StageId, int], IntArray] = {}  # by the position's first stage, and pipeline rank
    sequences = {}
    for rank, replica_of_stage in sorted(stages_of_rank.items()):
        position, pipeline_rank = placed[next(iter(replica_of_stage))]
        key = (position.virtual_stages[0][0], pipeline_rank)
        if key not in pass_tables:
            pass_tables[key] = position.pass_table(pipeline_rank)
        sequences[rank] = _rank_sequence(position, pipeline_rank, pass_tables[key], replica_of_stage, actions)
    return sequences


def _rank_sequence(
    position: PipelinePosition,
    pipeline_rank: int,
    passes: IntArray,
    replica_of_stage: Mapping[StageId, int],
    actions: _GraphActions,
) -> IntArray:
    """The numbers of what a rank computes pass by pass: in a forward its stages in order, in a backward in reverse.

    passes: (passes, 3) whether it is a forward, chunk and wave of each, see `PipelinePosition.pass_table`.
    """
    numbers, places = [], []
    for chunk in range(position.num_chunks):
        of_chunk = np.flatnonzero(passes[:, 1] == chunk)
        stages = [stage for stage in position.stages_at(pipeline_rank, chunk) if stage in replica_of_stage]
        for (k, stage), is_forward in product(enumerate(stages), (True, False)):
            if not actions.has(stage, is_forward):
                continue
            pace = position.pacing[stage.unit]
            of_kind = of_chunk[passes[of_chunk, 0] == is_forward]
            block, wave = np.divmod(passes[of_kind, 2], pace.num_waves)
            is_due = wave == pace.due_at(is_forward)
            microbatch = block[is_due, None] * pace.num_microbatches + np.arange(pace.num_microbatches)
            numbers.append(actions.numbers(stage, is_forward)[replica_of_stage[stage]][microbatch.ravel()])
            in_pass = k if is_forward else len(stages) - 1 - k
            places.append(np.repeat(of_kind[is_due] * len(replica_of_stage) + in_pass, pace.num_microbatches))
    in_order = np.argsort(np.concatenate(places), kind="stable")
    return np.concatenate(numbers)[in_order]
