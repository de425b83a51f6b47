"""Estimate the step times of many layer partitions of one mesh assignment at once.

An estimate is a lower bound of the simulated step, and rarely more than a percent below it. It follows every rank
through the order of compute that all partitions share (`partition_orders`), and adds the collectives that close a step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmtrain.costs import Hardware
from mmtrain.costs.collectives import GroupLayout
from mmtrain.costs.gradient_buckets import apart_parameters, bucket_starts, reduced_parameters
from mmtrain.costs.gradient_reduction import GradientReduction
from mmtrain.costs.hardware import ELEMENT_BYTES
from mmtrain.costs.muon_costs import MuonGroup
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.evaluate.partition_orders import (
    KnownOrders,
    LayerSpans,
    OrderedPartitions,
    PartitionOrders,
    num_replica_groups,
    recomputed_shares,
    replicas_on_rank,
    unique_rows,
)
from mmtrain.planning.layer_costs.layer_costs import BACKWARD, FORWARD, RECOMPUTE, LayerCosts, UnitLayerTimes
from mmtrain.planning.layer_costs.layer_partition import LayerChain
from mmtrain.planning.layer_costs.span_recompute import SpanRecompute
from mmtrain.planning.space.candidate import LayerPartition, MeshAssignment
from mmtrain.planning.space.recently_used import RecentlyUsed
from mmtrain.program.ir.graph import StageId
from mmtrain.program.simulation.timing import NORM_BYTES

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_KEPT_RUNS = 2  # mesh assignments come one after another
MAX_END_TABLE_NUMBERS = 3_000_000  # actions times runs computed together: 24 MB, what caches can still help with


@dataclass
class StepTimeEstimator:
    """Estimates the step times of layer partitions of one model on one machine."""

    layer_costs: LayerCosts
    machine: Hardware
    max_groups: int | None  # replica groups of each batch, those with most work, that stand for all; None: all
    known_orders: KnownOrders

    @cached_property
    def _orders(self) -> PartitionOrders:
        return PartitionOrders(self.layer_costs, self.known_orders)

    @cached_property
    def _runs(self) -> "RecentlyUsed[_EstimateRun]":
        """What estimates share of the mesh assignment whose turn it is, from its anchor to the last round around it."""
        return RecentlyUsed(MAX_KEPT_RUNS)

    def _run(self, assignment: MeshAssignment) -> "_EstimateRun":
        return _EstimateRun(self.layer_costs, self.machine, assignment, self._heaviest_groups(assignment))

    def estimate(
        self,
        assignment: MeshAssignment,
        chains: Sequence[LayerChain],
        partitions: Sequence[LayerPartition],
        recompute: Sequence[SpanRecompute | None],
    ) -> FloatArray:
        """Return (n,) seconds of a step under each of n layer partitions, at least, mean over the sampled batches.

        recompute: of every chain, see `recompute_to_fit`, or None.
        """
        run = self._runs.get(assignment.sizes, partial(self._run, assignment))
        step_time_s = np.zeros(len(partitions))
        shares = recomputed_shares(chains, partitions, recompute)
        for alike in self._orders.group_by_order(assignment, partitions, shares):
            at_once = max(1, MAX_END_TABLE_NUMBERS // (alike.order.num_actions * run.groups.size))
            for first in range(0, len(alike), at_once):
                chunk = alike.of(slice(first, first + at_once))
                step_time_s[chunk.numbers] = run.step_time_s(chunk)
        return step_time_s

    def in_flight(self, assignment: MeshAssignment, partition: LayerPartition) -> Mapping[StageId, int]:
        """Return, for each stage, the microbatches that are between forward and backward at most."""
        return self._orders.in_flight(assignment, partition)

    def _heaviest_groups(self, assignment: MeshAssignment) -> IntArray:
        """(batches, groups) the replica groups that are looked at."""
        num_groups = num_replica_groups(assignment)
        if self.max_groups is None or self.max_groups >= num_groups:
            return np.tile(np.arange(num_groups), (len(self.layer_costs.batches.groups), 1))
        rank_seconds: FloatArray | float = 0.0  # (batches, groups) of the busiest unit, or of all that share ranks
        for unit, mesh in assignment.meshes.items():
            times = self.layer_costs.unit_times(unit, mesh.tp, assignment.batch_split)
            seconds = np.tensordot(times.count[-1], times.by_kind[:, :RECOMPUTE].sum(axis=1), 1).sum(axis=2)
            of_unit = seconds.reshape(len(seconds), num_groups, -1).sum(axis=2) / (mesh.pp * mesh.dp)
            is_alone = assignment.placement != "unified"
            rank_seconds = np.maximum(rank_seconds, of_unit) if is_alone else rank_seconds + of_unit
        return np.argsort(-np.asarray(rank_seconds), axis=1, kind="stable")[:, : self.max_groups]


@dataclass(frozen=True)
class _EstimateRun:
    """What the estimates of one mesh assignment share."""

    layer_costs: LayerCosts
    machine: Hardware
    assignment: MeshAssignment
    groups: IntArray  # (batches, groups) replica groups that are looked at

    def step_time_s(self, partitions: OrderedPartitions) -> FloatArray:
        """(n,) mean over the batches of the step time of the slowest replica group."""
        delays = self._message_delays(partitions)
        is_same = bool((delays == delays[:, :1]).all())
        delays = delays[:, 0] if is_same else delays.repeat(self.groups.size, axis=1)
        num_batches, num_groups = self.groups.shape
        held = self._held(partitions)
        starts = dict(
            zip(partitions.order.first_row, held.first_gather_s.repeat(self.groups.size, axis=1), strict=True)
        )
        ends = partitions.order.rank_ends(self._stage_seconds(partitions), delays, starts)
        slowest = [end.reshape(len(partitions), num_batches, num_groups).max(axis=2) for end in ends.values()]
        return np.asarray(self._with_closing_collectives(held, slowest).mean(axis=1))

    def _stage_seconds(self, partitions: OrderedPartitions) -> dict[StageId, tuple[FloatArray, FloatArray]]:
        """Forward and backward of every stage, (n x batches x groups, replicas x microbatches)."""
        totals: dict[StageId, tuple[FloatArray, FloatArray]] = {}
        for spans in partitions.spans:
            for stage, (forward, backward) in self._seconds_of_unit(spans):
                if stage in totals:
                    forward, backward = totals[stage][0] + forward, totals[stage][1] + backward
                totals[stage] = forward, backward
        return totals

    def _seconds_of_unit(self, spans: LayerSpans) -> Iterator[tuple[StageId, tuple[FloatArray, FloatArray]]]:
        """Yield what a unit adds to its stages, see `_stage_seconds`.

        Partitions differ in a few stages, so most stages hold layers as others do, and are computed once with them.
        """
        times, grid = self._unit_times[spans.unit], self._grids[spans.unit]
        num_layers = (times.count[spans.last] - times.count[spans.first]).astype(np.float64)  # (n, stages, kinds)
        computed, seconds = num_layers, grid[BACKWARD]
        if self.layer_costs.recompute[spans.unit] == "all" or spans.recomputed_share is not None:
            share = 1.0 if spans.recomputed_share is None else spans.recomputed_share[:, :, None]
            computed = np.concatenate([num_layers, num_layers * share], axis=2)
            seconds = np.concatenate([seconds, grid[RECOMPUTE]])
        alike, of_stages = unique_rows(computed.reshape(-1, computed.shape[2]))
        forward = np.tensordot(alike[:, : num_layers.shape[2]], grid[FORWARD], 1)
        backward = np.tensordot(alike, seconds, 1)
        of_stages = of_stages.reshape(num_layers.shape[:2])
        for k, stage in enumerate(spans.stages):
            yield stage, (_runs_by_microbatch(forward[of_stages[:, k]]), _runs_by_microbatch(backward[of_stages[:, k]]))

    @cached_property
    def _unit_times(self) -> dict[str, UnitLayerTimes]:
        split = self.assignment.batch_split
        return {unit: self.layer_costs.unit_times(unit, m.tp, split) for unit, m in self.assignment.meshes.items()}

    @cached_property
    def _grids(self) -> dict[str, FloatArray]:
        """By unit, (3, kinds, batches, groups, replicas x microbatches) seconds of a layer."""
        num_groups = num_replica_groups(self.assignment)
        grids = {}
        for unit, times in self._unit_times.items():
            by_kind = _slowest_on_rank(times.by_kind, replicas_on_rank(self.assignment, unit))
            by_group = by_kind.reshape(*by_kind.shape[:3], num_groups, -1)
            grid = np.take_along_axis(by_group, self.groups[None, None, :, :, None], axis=3)
            grids[unit] = np.ascontiguousarray(grid.swapaxes(0, 1))  # so that products copy nothing
        return grids

    def _message_delays(self, partitions: OrderedPartitions) -> FloatArray:
        """(edges, n) what a message takes at least; what goes between units is left out."""
        edges = partitions.order.edges
        edge_into = {edge.dst: number for number, edge in enumerate(edges) if not edge.crosses_units}
        delays = np.zeros((len(edges), len(partitions)))
        for spans in partitions.spans:
            columns = [k for k, stage in enumerate(spans.stages) if stage in edge_into]
            mesh, first = self.assignment.meshes[spans.unit], spans.first[:, columns]
            if not columns:
                continue
            num_bytes = self.layer_costs.min_message_bytes(spans.unit, mesh.tp, self.assignment.batch_split)
            in_one_node = mesh.tp * mesh.num_replicas < self.machine.ranks_per_node  # then some pair shares a node
            seconds = self.layer_costs.costs.transfer(num_bytes, in_one_node) if num_bytes else 0.0
            is_inside_unit = (first > 0) & (first < len(self.layer_costs.shape.unit(spans.unit).layers))
            delays[[edge_into[spans.stages[k]] for k in columns]] += np.where(is_inside_unit, seconds, 0.0).T
        return delays

    def _held(self, partitions: OrderedPartitions) -> "_HeldParameters":
        """Return how long a rank waits at least for data parallelism at the start and the end of a step.

        The first unit of a rank feeds the others there. So its first chunk needs its parameters first, and has its
        gradients ready last.
        """
        ranks = list(partitions.order.last_row)
        shape = len(ranks), len(partitions)
        num_updated = np.zeros(shape, dtype=np.int64)
        adding_s, muon_s = np.zeros(shape), np.zeros(shape)
        gather_s, reduction_s = np.zeros(shape), np.zeros(shape)
        holds_nothing = np.ones(shape, dtype=np.bool_)
        for spans in partitions.spans:
            mesh = self.assignment.meshes[spans.unit]
            num_layers, (num_trained, num_apart), first_chunk = self._held_of_unit(partitions, ranks, spans)
            if self.layer_costs.orthogonalizes:
                self._add_muon_seconds(muon_s, partitions, ranks, spans)
            num_updated += (num_trained - num_apart) // mesh.num_replicas
            num_updated += num_apart // (mesh.num_replicas // mesh.ep)
            adding_s += self._adding_seconds(spans.unit, num_trained - num_apart, mesh.num_replicas)
            adding_s += self._adding_seconds(spans.unit, num_apart, mesh.num_replicas // mesh.ep)
            is_first = (num_layers > 0) & holds_nothing
            of_unit = self._waits_of_first_chunk(spans, first_chunk)
            gather_s, reduction_s = np.where(is_first, of_unit, (gather_s, reduction_s))
            holds_nothing &= num_layers == 0
        return _HeldParameters(gather_s, reduction_s, num_updated, adding_s, muon_s)

    def _with_closing_collectives(self, held: "_HeldParameters", ends: Sequence[FloatArray]) -> FloatArray:
        """(n, batches) with what is left of reducing gradients, and the optimizer's step for which all wait.

        ends: of every rank, (n, batches) when it ends its last action.
        """
        reduced = np.max(
            [end + seconds[:, None] for end, seconds in zip(ends, held.last_reduction_s, strict=True)], axis=0
        )
        num_updated = held.num_updated if self.layer_costs.orthogonalizes else held.num_updated.max(axis=0)[None]
        counts, inverse = np.unique(num_updated, return_inverse=True)
        adam_s = np.array([self.layer_costs.costs.optimizer(count) for count in counts.tolist()])
        optimizer_s = (adam_s[inverse.ravel()].reshape(num_updated.shape) + held.muon_s).max(axis=0)
        num_ranks = self.assignment.ranks
        everyone = GroupLayout.strided(num_ranks, 1, self.machine.ranks_per_node)
        norm_s = self.layer_costs.costs.collective("all_reduce", NORM_BYTES, everyone)
        adding_s = held.adding_s.max(axis=0)
        return np.asarray(reduced + norm_s + (adding_s + optimizer_s)[:, None])

    def _adding_seconds(self, unit: str, num_parameters: IntArray, num_replicas: int) -> FloatArray:
        """Return the seconds in which ranks add up gradients of so many parameters, as of one bucket."""
        replicas = GroupLayout(num_replicas)
        counts, inverse = np.unique(num_parameters, return_inverse=True)
        # A tied matrix is reduced once, where a rank counts it at both ends.
        twice = sum(self._trained(unit)) - sum(self._reduced_parameters(unit, is_whole=False))
        seconds = [self._reduction.adding_seconds(max(0, count - twice), replicas) for count in counts.tolist()]
        return np.array(seconds)[inverse.ravel()].reshape(num_parameters.shape)

    def _trained(self, unit: str) -> IntArray:
        """(L,) parameters of each layer that train, on one rank."""
        mesh = self.assignment.meshes[unit]
        return self.layer_costs.unit_costs(unit, mesh.tp, self.assignment.batch_split).parameters.astype(np.int64)

    def _apart(self, unit: str) -> list[int]:
        """Return how many of each layer's trained parameters belong to experts of which replicas hold others."""
        if unit not in self._apart_of_units:
            mesh = self.assignment.meshes[unit]
            self._apart_of_units[unit] = apart_parameters(self.layer_costs.shape, unit, mesh.tp)
        return self._apart_of_units[unit]

    @cached_property
    def _apart_of_units(self) -> dict[str, list[int]]:
        """Cache of `_apart`."""
        return {}

    def _held_of_unit(
        self, partitions: OrderedPartitions, ranks: Sequence[int], spans: LayerSpans
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return (ranks, n) layers of a unit on each rank, trained parameters of them, and the first chunk of them.

        Of parameters (2, ranks, n): all, and those of experts apart. Of the first chunk that holds any, (2, ranks, n):
        its first layer and the one after its last.
        """
        of_layers = np.stack([self._trained(spans.unit), self._apart(spans.unit)])
        before = np.concatenate([np.zeros((2, 1), np.int64), np.cumsum(of_layers, axis=1)], axis=1)
        held = _held_stages(partitions, ranks, spans)
        rows, columns = np.array(held, dtype=np.int64).reshape(-1, 2).T
        first, last = spans.first[:, columns].T, spans.last[:, columns].T
        num_layers = np.zeros((len(ranks), len(partitions)), dtype=np.int64)
        num_parameters = np.zeros((2, *num_layers.shape), dtype=np.int64)
        np.add.at(num_layers, rows, last - first)
        for of_kind, before_layer in zip(num_parameters, before, strict=True):
            np.add.at(of_kind, rows, before_layer[last] - before_layer[first])
        first_chunk = np.zeros((2, *num_layers.shape), dtype=np.int64)
        for row, stage_column in sorted(held, key=lambda row_and_column: -row_and_column[1]):
            of_stage = np.stack([spans.first[:, stage_column], spans.last[:, stage_column]])
            first_chunk[:, row] = np.where(of_stage[1] > of_stage[0], of_stage, first_chunk[:, row])
        return num_layers, num_parameters, first_chunk

    def _add_muon_seconds(
        self, muon_s: FloatArray, partitions: OrderedPartitions, ranks: Sequence[int], spans: LayerSpans
    ) -> None:
        """Add to (ranks, n) seconds those in which each rank moves and orthogonalizes the unit's matrices."""
        mesh, costs = self.assignment.meshes[spans.unit], self.layer_costs
        group = MuonGroup(mesh.tp, mesh.num_replicas, mesh.ep, self.machine.ranks_per_node)
        layers = costs.shape.unit(spans.unit).layers
        of_kind = {layer: group.seconds(layer, costs.costs, costs.precision) for layer in dict.fromkeys(layers)}
        before = np.concatenate([[0.0], np.cumsum([of_kind[layer] for layer in layers])])
        for row, column in _held_stages(partitions, ranks, spans):
            muon_s[row] += before[spans.last[:, column]] - before[spans.first[:, column]]

    def _waits_of_first_chunk(self, spans: LayerSpans, first_chunk: IntArray) -> FloatArray:
        """Return (2, ranks, n) seconds that gathering the chunk's parameters delays, and reducing its gradients adds.

        first_chunk: (2, ranks, n) its first layer and the one after its last.
        """
        pairs, inverse = unique_rows(first_chunk.reshape(2, -1).T)
        is_recomputed = self.layer_costs.recompute[spans.unit] == "all" or spans.recomputed_share is not None
        waits = [self._chunk_waits(spans.unit, first, last, is_recomputed) for first, last in pairs.tolist()]
        return np.array(waits).T[:, inverse].reshape(first_chunk.shape)

    def _chunk_waits(self, unit: str, first: int, last: int, is_recomputed: bool) -> tuple[float, float]:
        """Return how much gathers delay a chunk's first forward, and what reductions add to its last backward.

        The forward of a bucket's layers starts when its gather has ended, which follows those of the buckets before.
        Its reduction starts when the backward of its layers has ended; those of the buckets before follow it. Layers
        that compute meanwhile count as of the largest microbatch.
        """
        key = unit, first, last, is_recomputed
        if key not in self._waits:
            self._waits[key] = self._compute_chunk_waits(*key)
        return self._waits[key]

    @cached_property
    def _waits(self) -> dict[tuple[str, int, int, bool], tuple[float, float]]:
        """Cache of `_chunk_waits`."""
        return {}

    @cached_property
    def _longest(self) -> dict[str, FloatArray]:
        """By unit, (kinds, 3) seconds of a layer for its longest microbatch."""
        return {unit: times.by_kind.max(axis=(2, 3, 4)) for unit, times in self._unit_times.items()}

    def _compute_chunk_waits(self, unit: str, first: int, last: int, is_recomputed: bool) -> tuple[float, float]:
        mesh, times = self.assignment.meshes[unit], self._unit_times[unit]
        trained = self._reduced_parameters(unit, is_whole=last - first == len(times.kind))[first:last]
        if not any(trained):
            return 0.0, 0.0
        starts: tuple[int, ...] = (0,)
        apart = self._apart(unit)[first:last]
        if self.layer_costs.shape.unit(unit).is_splittable:
            starts = bucket_starts(trained, mesh.num_replicas, self.layer_costs.bucket_parameters, apart, mesh.ep)
        buckets = [slice(*bounds) for bounds in pairwise([*starts, last - first])]
        counts = [(sum(trained[bucket]), sum(apart[bucket])) for bucket in buckets]
        reductions, gathers = np.array([self._reduction_and_gather(*count, mesh) for count in counts]).T
        longest = self._longest[unit][times.kind[first:last]]  # (layers, 3)
        backward = longest[:, BACKWARD] + (longest[:, RECOMPUTE] if is_recomputed else 0.0)
        forward_before, backward_before = (
            np.concatenate([[0.0], np.cumsum(seconds)])[list(starts)] for seconds in (longest[:, FORWARD], backward)
        )
        return (
            float(max(0.0, (np.cumsum(gathers) - forward_before).max())),
            float(max(0.0, (np.cumsum(reductions) - backward_before).max())),
        )

    def _reduced_parameters(self, unit: str, is_whole: bool) -> Sequence[int]:
        """Return the parameters of each layer whose gradients a rank reduces; is_whole: one chunk holds all layers."""
        mesh = self.assignment.meshes[unit]
        key = (unit, mesh.tp, is_whole or mesh.pp == 1)
        if key not in self._reduced:
            self._reduced[key] = reduced_parameters(self.layer_costs.shape, unit, mesh.tp, 1 if key[2] else mesh.pp)
        return self._reduced[key]

    @cached_property
    def _reduced(self) -> dict[tuple[str, int, bool], Sequence[int]]:
        """Cache of `_reduced_parameters`."""
        return {}

    def _reduction_and_gather(self, num_parameters: int, num_apart: int, mesh: MeshSize) -> tuple[float, float]:
        """Return the seconds in which replicas reduce the gradients of so many parameters, and gather the weights.

        num_apart: those of experts of which only every `ep`-th replica holds the same.
        """
        joint = self._collective_seconds(num_parameters - num_apart, 1, mesh)
        if not num_apart:
            return joint
        apart = self._collective_seconds(num_apart, mesh.ep, mesh)
        return joint[0] + apart[0], joint[1] + apart[1]

    def _collective_seconds(self, num_parameters: int, step: int, mesh: MeshSize) -> tuple[float, float]:
        """Return the seconds of a reduction and of a gather among every `step`-th replica."""
        key = num_parameters, step, mesh
        if key not in self._collective_s:
            costs, weight_bytes = self.layer_costs.costs, ELEMENT_BYTES[self.layer_costs.precision]
            num_replicas, stride = mesh.num_replicas // step, mesh.tp * step
            first_ranks = [p * mesh.tp * mesh.num_replicas for p in range(mesh.pp)]
            layouts = {
                GroupLayout.strided(num_replicas, stride, self.machine.ranks_per_node, first) for first in first_ranks
            }
            reduction = self._reduction
            reductions = (
                reduction.rounding_seconds(num_parameters, g) + reduction.seconds(num_parameters, g) for g in layouts
            )
            gathers = (costs.collective("all_gather", num_parameters * weight_bytes, g) for g in layouts)
            self._collective_s[key] = max(reductions), min(gathers)
        return self._collective_s[key]

    @cached_property
    def _reduction(self) -> GradientReduction:
        return GradientReduction(self.layer_costs.costs, self.layer_costs.grad_reduce)

    @cached_property
    def _collective_s(self) -> dict[tuple[int, int, MeshSize], tuple[float, float]]:
        """Cache of `_collective_seconds`."""
        return {}


def _held_stages(partitions: OrderedPartitions, ranks: Sequence[int], spans: LayerSpans) -> list[tuple[int, int]]:
    """Return the number of the rank, and that of the stage in the unit, of each stage that a rank holds."""
    column = {stage: k for k, stage in enumerate(spans.stages)}
    return [
        (row, column[stage])
        for row, rank in enumerate(ranks)
        for stage in partitions.order.stages[rank]
        if stage in column
    ]


class _HeldParameters(NamedTuple):
    """What data parallelism does with the trained parameters of each rank, under each layer partition: (ranks, n)."""

    first_gather_s: FloatArray  # by which gathering parameters delays the rank's first forward
    last_reduction_s: FloatArray  # by which reducing gradients lasts longer than its last backward
    num_updated: IntArray  # parameters that its optimizer updates
    adding_s: FloatArray  # in which it adds up gradients that replicas sent in bf16
    muon_s: FloatArray  # in which it moves and orthogonalizes matrices for Muon


def _slowest_on_rank(by_kind: FloatArray, num_together: int) -> FloatArray:
    """Return (kinds, 3, batches, dp, microbatches) seconds with each run of `num_together` replicas as its slowest."""
    if num_together == 1:
        return by_kind
    *before, num_replicas, num_microbatches = by_kind.shape
    together = by_kind.reshape(*before, num_replicas // num_together, num_together, num_microbatches)
    return np.asarray(together.max(axis=-2))


def _runs_by_microbatch(seconds: FloatArray) -> FloatArray:
    """(n x batches x groups, replicas x microbatches) of (n, batches, groups, replicas x microbatches)."""
    return seconds.reshape(-1, seconds.shape[-1])
