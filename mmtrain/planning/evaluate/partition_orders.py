"""Find the order of compute that layer partitions share, so that it is worked out once for thousands of them.

The order depends on how many stages every unit has on which ranks, and on which of them need a backward, but not on
where inside a unit a stage starts. Where the units of a unified pipeline form one chain, each feeding the next and all
with as many microbatches, a model chunk computes what it holds of each unit one after another. All partitions then
share the order of a pipeline whose stages are the chunks. In a graph of the units' own stages, each chunk in which a
unit starts would give another order, and orders take longer to work out than partitions to estimate.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.artifact.plan_graph import build_stage_graph
from mmtrain.planning.evaluate.vectorized_1f1b import ComputeOrder, compute_order
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.layer_partition import LayerChain, partitioned_layout
from mmtrain.planning.layer_costs.span_recompute import SpanRecompute
from mmtrain.planning.space.candidate import LayerPartition, MeshAssignment
from mmtrain.planning.space.recently_used import RecentlyUsed
from mmtrain.program.ir.graph import LLM, Edge, Stage, StageGraph, StageId, UnitMesh
from mmtrain.program.schedules.pipeline_positions import PipelinePosition, find_positions

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)


@dataclass(frozen=True)
class LayerSpans:
    """The layers [first, last) of one unit that some stages of an order hold under each of n partitions."""

    unit: str
    stages: tuple[StageId, ...]
    first: IntArray  # (n, stages)
    last: IntArray  # (n, stages)
    recomputed_share: FloatArray | None  # (n, stages) of all that could be recomputed; None: what the recipe says

    def of(self, partitions: slice | IntArray) -> "LayerSpans":
        """Return the spans of some of the partitions."""
        share = None if self.recomputed_share is None else self.recomputed_share[partitions]
        return replace(self, first=self.first[partitions], last=self.last[partitions], recomputed_share=share)


@dataclass(frozen=True)
class OrderedPartitions:
    """Partitions that share an order."""

    order: ComputeOrder
    numbers: IntArray  # (n,) which of the partitions that were asked about
    spans: tuple[LayerSpans, ...]  # of every unit, in the order of the model

    def __len__(self) -> int:
        return len(self.numbers)

    def of(self, partitions: slice) -> "OrderedPartitions":
        """Return some of the partitions."""
        spans = tuple(unit_spans.of(partitions) for unit_spans in self.spans)
        return OrderedPartitions(self.order, self.numbers[partitions], spans)


@dataclass
class KnownOrders:
    """Orders by what they depend on; variants of a problem, whose layers keep activations in other ways, share them."""

    max_actions: int  # of the orders that are kept
    orders: RecentlyUsed[ComputeOrder] = field(init=False)
    in_flight: dict[tuple[object, ...], Mapping[StageId, int]] = field(default_factory=dict)
    positions: dict[tuple[object, ...], Sequence[PipelinePosition]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.orders = RecentlyUsed(self.max_actions, lambda order: order.num_actions)


@dataclass(frozen=True)
class PartitionOrders:
    """The orders of a model's layer partitions, each worked out once, or again after many others."""

    layer_costs: LayerCosts
    known: KnownOrders

    def group_by_order(
        self,
        assignment: MeshAssignment,
        partitions: Sequence[LayerPartition],
        recomputed_shares: Mapping[str, FloatArray | None],
    ) -> Iterator[OrderedPartitions]:
        """Yield the partitions of a mesh assignment in groups that share an order.

        recomputed_shares: by unit, as `recomputed_shares` returns them.
        """
        is_chain = self._is_unified_chain(assignment)
        spans = self._layer_spans(assignment, partitions, recomputed_shares)
        keys = self._chain_keys(spans) if is_chain else self._graph_keys(spans)
        distinct, group_of_partition = unique_rows(keys)
        for group, key in enumerate(distinct.tolist()):
            numbers = np.flatnonzero(group_of_partition == group)
            of_group = [unit_spans.of(numbers) for unit_spans in spans]
            if is_chain:
                yield OrderedPartitions(self._chain_order(assignment, *key), numbers, tuple(of_group))
            else:
                order = self._graph_order(assignment, partitions[numbers[0]], tuple(key))
                yield OrderedPartitions(order, numbers, tuple(map(_with_own_stages, of_group)))

    def in_flight(self, assignment: MeshAssignment, partition: LayerPartition) -> Mapping[StageId, int]:
        """Return, for each stage, the microbatches that are between forward and backward at most.

        No order is worked out for it, which takes longer: many mesh assignments are left before they need one.
        """
        spans = self._layer_spans(assignment, [partition], {})
        if not self._is_unified_chain(assignment):
            [features] = self._graph_keys(spans).tolist()
            key = self._graph_key(assignment, tuple(features))
            if key not in self.known.in_flight:
                self.known.in_flight[key] = _most_in_flight(self._positions_of(key, self._graph(assignment, partition)))
            return self.known.in_flight[key]
        [[first_chunk_with_backward]] = self._chain_keys(spans).tolist()
        chain_key = self._chain_key(assignment, first_chunk_with_backward)
        if chain_key not in self.known.in_flight:
            graph = _chain_graph(assignment.meshes[LLM], assignment.num_microbatches[LLM], first_chunk_with_backward)
            self.known.in_flight[chain_key] = _most_in_flight(self._positions_of(chain_key, graph))
        in_flight = self.known.in_flight[chain_key]
        return {
            stage: in_flight[chunk]
            for unit_spans in spans
            for stage, chunk in zip(_with_own_stages(unit_spans).stages, _chunks_held(unit_spans), strict=True)
        }

    def _layer_spans(
        self,
        assignment: MeshAssignment,
        partitions: Sequence[LayerPartition],
        recomputed_shares: Mapping[str, FloatArray | None],
    ) -> list[LayerSpans]:
        return [
            LayerSpans(unit, _chunks(bounds), bounds[:, :-1], bounds[:, 1:], recomputed_shares.get(unit))
            for unit, bounds in self._chunk_bounds(assignment, partitions).items()
        ]

    def _is_unified_chain(self, assignment: MeshAssignment) -> bool:
        """Whether all units share one pipeline, each entered at its first layer by the one before."""
        names = [unit.name for unit in self.layer_costs.shape.units]
        edges = [(edge.src, edge.dst) for edge in self.layer_costs.shape.edges if edge.layer == 0]
        is_chain = list(pairwise(names)) == edges and len(edges) == len(self.layer_costs.shape.edges)
        return assignment.placement == "unified" and is_chain and len(set(assignment.num_microbatches.values())) == 1

    def _chunk_bounds(self, assignment: MeshAssignment, partitions: Sequence[LayerPartition]) -> dict[str, IntArray]:
        """By unit, (n, chunks + 1) the layer of it with which each chunk of its pipeline starts, and the end.

        In `unified` the chunks are those of the one pipeline, and may hold nothing of a unit.
        """
        if assignment.placement != "unified":
            return {
                unit: np.asarray([partition[k] for partition in partitions]) for k, unit in enumerate(assignment.meshes)
            }
        cuts, bounds, first_layer = np.asarray([partition[0] for partition in partitions]), {}, 0
        for unit in self.layer_costs.shape.units:
            bounds[unit.name] = np.clip(cuts - first_layer, 0, len(unit.layers))
            first_layer += len(unit.layers)
        return bounds

    def _chain_keys(self, spans: Sequence[LayerSpans]) -> IntArray:
        """(n, 1) what the order of a chain depends on: the first chunk with a backward, else the number of chunks."""
        has_backward = np.zeros(spans[0].first.shape, dtype=np.bool_)
        for unit_spans in spans:
            first_trainable = self._first_trainable(unit_spans.unit)
            has_backward |= (unit_spans.last > first_trainable) & (unit_spans.last > unit_spans.first)
        return np.asarray((np.cumsum(has_backward, axis=1) == 0).sum(axis=1, keepdims=True))

    def _graph_keys(self, spans: Sequence[LayerSpans]) -> IntArray:
        """(n, features) what the order of a graph depends on, besides the meshes and numbers of microbatches.

        The chunks that hold something of each unit, which of its stages need a backward, and which chunk edges enter.
        """
        features = []
        for unit_spans in spans:
            features.append((unit_spans.last == 0).sum(axis=1))
            features.append((unit_spans.last > unit_spans.first).sum(axis=1))
            features.append((unit_spans.last > self._first_trainable(unit_spans.unit)).sum(axis=1))
            for edge in self.layer_costs.shape.edges:
                if edge.dst == unit_spans.unit:
                    features.append((unit_spans.last <= edge.layer).sum(axis=1))
        return np.stack(features, axis=1)

    def _first_trainable(self, unit: str) -> int:
        """The unit's first layer that trains, or the number of its layers."""
        shape = self.layer_costs.shape.unit(unit)
        return len(shape.layers) if shape.first_trainable is None else shape.first_trainable

    def _chain_order(self, assignment: MeshAssignment, first_chunk_with_backward: int) -> ComputeOrder:
        key = self._chain_key(assignment, first_chunk_with_backward)
        mesh, num_microbatches = assignment.meshes[LLM], assignment.num_microbatches[LLM]
        return self._order(key, partial(_chain_graph, mesh, num_microbatches, first_chunk_with_backward))

    def _chain_key(self, assignment: MeshAssignment, first_chunk_with_backward: int) -> tuple[int, ...]:
        mesh, num_microbatches = assignment.meshes[LLM], assignment.num_microbatches[LLM]
        return (mesh.pp, mesh.vpp, num_microbatches, first_chunk_with_backward)

    def _graph_order(
        self, assignment: MeshAssignment, partition: LayerPartition, features: tuple[int, ...]
    ) -> ComputeOrder:
        """The order of a graph in which every unit has stages of its own; features: see `_graph_keys`."""
        key = self._graph_key(assignment, features)
        return self._order(key, partial(self._graph, assignment, partition))

    def _order(self, key: tuple[object, ...], make_graph: Callable[[], StageGraph]) -> ComputeOrder:
        def compute() -> ComputeOrder:
            graph = make_graph()
            return compute_order(graph, self._positions_of(key, graph))

        return self.known.orders.get(key, compute)

    def _positions_of(self, key: tuple[object, ...], graph: StageGraph) -> Sequence[PipelinePosition]:
        """Return the pipeline positions of a graph, which all graphs of this key have."""
        if key not in self.known.positions:
            self.known.positions[key] = find_positions(graph)
        return self.known.positions[key]

    def _graph_key(self, assignment: MeshAssignment, features: tuple[int, ...]) -> tuple[object, ...]:
        group = one_replica_group(assignment)
        return (group.placement, *group.meshes.items(), *group.num_microbatches.items(), features)

    def _graph(self, assignment: MeshAssignment, partition: LayerPartition) -> StageGraph:
        """The graph of one replica group."""
        group = one_replica_group(assignment)
        units = partitioned_layout(group, self.layer_costs, partition).units
        return build_stage_graph(units, group.num_microbatches, self.layer_costs.shape)


def unique_rows(table: npt.NDArray[Number]) -> tuple[npt.NDArray[Number], IntArray]:
    """Return the distinct rows of a table in lexicographic order, and (n,) the number of each row among them.

    `np.unique` with an axis does the same and takes several times as long, since it compares rows as records.
    """
    columns = table.T[(table != table[:1]).any(axis=0)]  # columns of one value order nothing
    order = np.lexsort(columns[::-1]) if len(columns) else np.arange(len(table))
    in_order = columns[:, order]
    starts = np.ones(len(table), dtype=np.bool_)
    starts[1:] = (in_order[:, 1:] != in_order[:, :-1]).any(axis=0)
    number = np.empty(len(table), dtype=np.int64)
    number[order] = np.cumsum(starts) - 1
    return table[order[starts]], number


def recomputed_shares(
    chains: Sequence[LayerChain], partitions: Sequence[LayerPartition], recompute: Sequence[SpanRecompute | None]
) -> dict[str, FloatArray | None]:
    """Return by unit, (n, chunks) the share of each chunk that is recomputed so that it fits into memory.

    recompute: of every chain, see `recompute_to_fit`; None: none is needed.
    """
    shares: dict[str, FloatArray | None] = {}
    for k, (chain, of_chain) in enumerate(zip(chains, recompute, strict=True)):
        share = None
        if of_chain is not None:
            cuts = np.asarray([partition[k] for partition in partitions])
            all_until = np.concatenate([[0.0], np.cumsum(chain.costs.recompute_seconds)])
            everything = np.maximum(np.diff(all_until[cuts], axis=1), 1e-30)
            # Where a chunk alone would not fit, others on its rank may leave it room: all of it is recomputed then.
            share = np.minimum(of_chain.of_partitions(cuts) / everything, 1.0)
        shares |= dict.fromkeys(chain.units, share)
    return shares


def _most_in_flight(positions: Iterable[PipelinePosition]) -> dict[StageId, int]:
    """Return for each stage the most microbatches between forward and backward."""
    return {stage: count for position in positions for stage, count in position.in_flight().items()}


def one_replica_group(assignment: MeshAssignment) -> MeshAssignment:
    """The mesh assignment of one replica group, with one rank for each TP group, and for those that share sequences."""
    num_groups = num_replica_groups(assignment)
    meshes = {
        name: MeshSize(1, mesh.pp, mesh.dp // replicas_on_rank(assignment, name) // num_groups, mesh.vpp)
        for name, mesh in assignment.meshes.items()
    }
    return MeshAssignment(assignment.placement, meshes, assignment.num_microbatches)


def replicas_on_rank(assignment: MeshAssignment, unit: str) -> int:
    """Return how many data-parallel replicas of a unit count as one rank.

    Ranks that share the LLM's sequences wait for each other in every block, so they count as one, as those of a TP
    group do. In `unified` each of them, or each part of a TP group, also holds a replica of the other units.
    """
    if unit == LLM or assignment.placement != "unified":
        return 1
    return assignment.meshes[unit].dp // assignment.meshes[LLM].dp


def num_replica_groups(assignment: MeshAssignment) -> int:
    """Count the replica groups, which only talk among themselves."""
    return int(np.gcd.reduce([mesh.dp for mesh in assignment.meshes.values()]))


def _chain_graph(mesh: MeshSize, num_microbatches: int, first_chunk_with_backward: int) -> StageGraph:
    """A pipeline whose stages are the chunks of a chain; those from `first_chunk_with_backward` on have a backward."""
    unit_mesh = UnitMesh(LLM, 1, mesh.pp, 1, tuple(range(mesh.pp)), num_microbatches, mesh.vpp)
    chunks = [StageId(LLM, chunk) for chunk in range(mesh.pp * mesh.vpp)]
    stages = [
        Stage(
            id=chunk,
            layers=(chunk.index, chunk.index + 1),
            tp_groups=(unit_mesh.tp_group(chunk.index, 0),),
            trainable=chunk.index == first_chunk_with_backward,
        )
        for chunk in chunks
    ]
    return StageGraph((unit_mesh,), tuple(stages), tuple(Edge(a, b) for a, b in pairwise(chunks)))


def _chunks(bounds: IntArray) -> tuple[StageId, ...]:
    """The chunks of a pipeline as stages of the LLM, of bounds (n, chunks + 1)."""
    return tuple(StageId(LLM, chunk) for chunk in range(bounds.shape[1] - 1))


def _chunks_held(spans: LayerSpans) -> list[StageId]:
    """The chunks that hold something of the unit, the same in all partitions."""
    return [spans.stages[k] for k in np.flatnonzero(spans.last[0] > spans.first[0]).tolist()]


def _with_own_stages(spans: LayerSpans) -> LayerSpans:
    """The spans of the chunks that hold something of the unit, the same in all partitions, as the unit's own stages."""
    held = np.flatnonzero(spans.last[0] > spans.first[0])
    share = None if spans.recomputed_share is None else spans.recomputed_share[:, held]
    stages = tuple(StageId(spans.unit, index) for index in range(len(held)))
    return LayerSpans(spans.unit, stages, spans.first[:, held], spans.last[:, held], share)
