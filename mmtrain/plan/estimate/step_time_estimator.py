"""Step times of many cuts of one sizing at once: bounds that the simulator rarely leaves by more than a percent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mmtrain.costs import Hardware
from mmtrain.costs.hardware import ELEMENT_BYTES
from mmtrain.plan.artifact.layout import Layout, MeshSize
from mmtrain.plan.artifact.plan_graph import build_stage_graph
from mmtrain.plan.estimate.layer_costs import BACKWARD, FORWARD, RECOMPUTE, LayerCosts
from mmtrain.plan.estimate.unified_chain import UnifiedChainRun, chain_order, first_backward_parts, is_unified_chain
from mmtrain.plan.estimate.vectorized_1f1b import ComputeOrder, compute_order
from mmtrain.plan.search.layer_partition import LayerChain, LayerPartition, partitioned_layout
from mmtrain.plan.search.mesh_enumeration import MeshAssignment
from mmtrain.program.ir.graph import LLM, StageGraph, StageId
from mmtrain.program.simulation.timing import BYTES_PER_GRADIENT, NORM_BYTES

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

AT_ONCE = 3_000_000  # numbers in the table of ends


@dataclass
class StepTimeEstimator:
    """Rates cuts; orders are worked out once for all that share them."""

    pricing: LayerCosts
    machine: Hardware
    groups: int | None  # replica groups of each batch that stand for all, those with most work; None: all
    _orders: dict[tuple[object, ...], tuple[StageGraph, ComputeOrder]] = field(default_factory=dict)
    _lines: dict[tuple[int, ...], ComputeOrder] = field(default_factory=dict)

    def estimate(
        self,
        sizing: MeshAssignment,
        tracks: Sequence[LayerChain],
        cuts: Sequence[LayerPartition],
        extra: Sequence[FloatArray | None],
    ) -> FloatArray:
        """(n,) seconds of the step under each of n cuts, mean over the batches, at least.

        extra: per track, seconds of recomputation by part and span (`cut.recomputed`).
        """
        if is_unified_chain(sizing, self.pricing):
            return self._rate_line(sizing, tracks[0], np.asarray([one[0] for one in cuts]), extra[0])
        found = np.zeros(len(cuts))
        alike: dict[tuple[object, ...], list[int]] = {}
        thin, num_groups = _one_group(sizing)
        layouts = [partitioned_layout(thin, self.pricing, c) for c in cuts]
        for at, layout in enumerate(layouts):
            alike.setdefault(self._key(thin, layout), []).append(at)
        for members in alike.values():
            graph, order = self._order(thin, layouts[members[0]])
            chosen = self._heaviest(sizing, num_groups)
            step = max(1, AT_ONCE // (order.num_actions * chosen.size))
            for first in range(0, len(members), step):
                some = members[first : first + step]
                run = _Run(self, sizing, graph, order, chosen, num_groups)
                found[some] = run.seconds(
                    [layouts[at] for at in some], _added(tracks, [cuts[at] for at in some], extra)
                )
        return found

    def _rate_line(
        self, sizing: MeshAssignment, track: LayerChain, cuts: IntArray, extra: FloatArray | None
    ) -> FloatArray:
        """The same of units that are one line."""
        num_groups = sizing.meshes[LLM].dp
        chosen = self._heaviest(sizing, num_groups)
        grids = [
            _of_groups(self.pricing.unit_times(n, s.tp, sizing.batch_split).by_kind, chosen, num_groups).reshape(
                -1, 3, *chosen.shape, sizing.num_microbatches[n]
            )
            for n, s in sizing.meshes.items()
        ]
        again = None if extra is None else _shares(track, cuts, extra)
        found, first = np.zeros(len(cuts)), first_backward_parts(cuts, self.pricing)
        for part in np.unique(first).tolist():
            order = self._line_order(sizing, part)
            alike = np.flatnonzero(first == part)
            step = max(1, AT_ONCE // (order.num_actions * chosen.size))
            for at in (alike[i : i + step] for i in range(0, len(alike), step)):
                own = None if again is None else again[at]
                found[at] = UnifiedChainRun(self.pricing, self.machine, sizing, order, cuts[at], own).seconds(grids)
        return found

    def _line_order(self, sizing: MeshAssignment, first_backward: int) -> ComputeOrder:
        size, count = sizing.meshes[LLM], sizing.num_microbatches[LLM]
        key = (size.pp, size.vpp, count, first_backward)
        if key not in self._lines:
            self._lines[key] = chain_order(size, count, first_backward)
        return self._lines[key]

    def in_flight(self, sizing: MeshAssignment, cuts: LayerPartition) -> Mapping[StageId, int]:
        """Microbatches that each stage holds at most."""
        thin, _ = _one_group(sizing)
        if is_unified_chain(sizing, self.pricing):
            of_parts = self._line_order(sizing, int(first_backward_parts(np.asarray(cuts), self.pricing)[0])).in_flight
            found: dict[StageId, int] = {}
            begin = 0
            for unit in self.pricing.shape.units:
                end = begin + len(unit.layers)
                parts = [k for k, (lo, hi) in enumerate(pairwise(cuts[0])) if lo < end and hi > begin]
                found |= {StageId(unit.name, i): of_parts[StageId(LLM, part)] for i, part in enumerate(parts)}
                begin = end
            return found
        return self._order(thin, partitioned_layout(thin, self.pricing, cuts))[1].in_flight

    def _order(self, thin: MeshAssignment, layout: Layout) -> tuple[StageGraph, ComputeOrder]:
        """A graph and the order that it shares with all that are alike."""
        key = self._key(thin, layout)
        if key not in self._orders:
            graph = build_stage_graph(layout.units, thin.num_microbatches, self.pricing.shape)
            self._orders[key] = graph, compute_order(graph)
        return self._orders[key]

    def _key(self, thin: MeshAssignment, layout: Layout) -> tuple[object, ...]:
        """What the order depends on: where stages lie, how many microbatches there are, who needs a backward."""
        shape = self.pricing.shape
        held = []
        for name, unit in layout.units.items():
            first = shape.unit(name).first_trainable
            trains = [first is not None and s.layers[1] > first for s in unit.stages]
            held.append((name, unit.tp, unit.pp, unit.dp, unit.vpp, unit.ranks, tuple(trains)))
        entered = tuple(
            next(s.stage for s in layout.units[e.dst].stages if s.layers[0] <= e.layer < s.layers[1])
            for e in shape.edges
        )
        return (*held, tuple(thin.num_microbatches.items()), entered)

    def _heaviest(self, sizing: MeshAssignment, num_groups: int) -> IntArray:
        """(batches, groups looked at) replica groups."""
        if self.groups is None or self.groups >= num_groups:
            return np.tile(np.arange(num_groups), (len(self.pricing.batches.groups), 1))
        work: FloatArray | float = 0.0
        for name, size in sizing.meshes.items():
            prices = self.pricing.unit_times(name, size.tp, sizing.batch_split)
            seconds = np.tensordot(prices.count[-1], prices.by_kind[:, :RECOMPUTE].sum(axis=1), 1).sum(axis=2)
            share = seconds.reshape(len(seconds), num_groups, -1).sum(axis=2) / (size.pp * size.dp)
            work = np.maximum(work, share) if sizing.placement != "unified" else work + share
        return np.argsort(-np.asarray(work), axis=1, kind="stable")[:, : self.groups]


@dataclass
class _Run:
    """One order, and the cuts that share it."""

    estimator: StepTimeEstimator
    sizing: MeshAssignment
    graph: StageGraph
    order: ComputeOrder
    groups: IntArray
    num_groups: int

    def seconds(self, layouts: Sequence[Layout], added: Mapping[str, FloatArray]) -> FloatArray:
        """(n,) mean over the batches of the slowest group's step."""
        taken = {s.id: self._stage(s.id, layouts, added) for s in self.graph.stages}
        ends = self.order.rank_ends(taken, np.asarray(self._delays()))
        n, (batches, groups) = len(layouts), self.groups.shape
        by_rank = {rank: end.reshape(n, batches, groups).max(axis=2) for rank, end in ends.items()}
        return np.asarray(self._closed(layouts, by_rank).mean(axis=1))

    def _stage(
        self, sid: StageId, layouts: Sequence[Layout], added: Mapping[str, FloatArray]
    ) -> tuple[FloatArray, FloatArray]:
        """Forward and backward of a stage under each layout: (n x batches x groups, replicas x microbatches)."""
        size = self.sizing.meshes[sid.unit]
        prices = self.estimator.pricing.unit_times(sid.unit, size.tp, self.sizing.batch_split)
        lo, hi = np.array([layout.units[sid.unit].stages[sid.index].layers for layout in layouts]).T
        counts = (prices.count[hi] - prices.count[lo]).astype(np.float64)
        grid = _of_groups(prices.by_kind, self.groups, self.num_groups)  # (K, 3, batches x groups, rest)
        forward = np.tensordot(counts, grid[:, FORWARD], 1)
        backward = np.tensordot(counts, grid[:, BACKWARD], 1)
        again = np.tensordot(counts, grid[:, RECOMPUTE], 1)
        if self.estimator.pricing.recompute[sid.unit] == "all":
            backward = backward + again
        elif sid.unit in added:
            backward = backward + again * added[sid.unit][:, sid.index, None, None]
        return forward.reshape(-1, forward.shape[-1]), backward.reshape(-1, backward.shape[-1])

    def _delays(self) -> list[float]:
        """What a message inside a unit takes at least; what goes between units is left out."""
        pricing, machine = self.estimator.pricing, self.estimator.machine
        found = []
        for edge in self.order.edges:
            if edge.crosses_units:
                found.append(0.0)
                continue
            size = self.sizing.meshes[edge.src.unit]
            nbytes = pricing.least_message(edge.src.unit, size.tp, self.sizing.batch_split)
            near = size.tp * size.dp < machine.ranks_per_node  # then some pair shares a node
            found.append(pricing.costs.transfer(nbytes, near) if nbytes else 0.0)
        return found

    def _closed(self, layouts: Sequence[Layout], ends: Mapping[int, FloatArray]) -> FloatArray:
        """(n, batches) with the last reduction of gradients, the optimizer's step for which all wait, and gathering."""
        pricing, costs, machine = self.estimator.pricing, self.estimator.pricing.costs, self.estimator.machine
        done: FloatArray | float = 0.0
        updated, gathered = np.zeros(len(layouts)), np.zeros(len(layouts))
        for rank, end in ends.items():
            shards, last = np.zeros(len(layouts)), np.zeros(len(layouts))
            gathers = np.zeros(len(layouts))
            for at, (unit, stages) in enumerate(self._held(rank).items()):
                size = self.sizing.meshes[unit]
                near = machine.ranks_per_node % (size.tp * size.dp) == 0
                trained = pricing.unit_costs(unit, size.tp, self.sizing.batch_split).parameters
                prefix = np.concatenate([[0.0], np.cumsum(trained)])
                bounds = np.array([[layout.units[unit].stages[i].layers for i in stages] for layout in layouts])
                counts = (prefix[bounds[:, :, 1]] - prefix[bounds[:, :, 0]]).sum(axis=1).astype(np.int64)
                nbytes, inverse = np.unique(counts, return_inverse=True)
                seconds = np.array([self._exchanged(int(n), size, near) for n in nbytes])[inverse]
                shards += counts // size.dp
                gathers += seconds[:, 1]
                if at == 0:  # sources come first, and their gradients are ready last
                    last = seconds[:, 0]
            done = np.maximum(done, end + last[:, None])
            updated = np.maximum(updated, [costs.optimizer(int(n)) for n in shards])
            gathered = np.maximum(gathered, gathers)
        ranks = self.sizing.ranks
        agreed = costs.collective("all_reduce", NORM_BYTES, ranks, ranks <= machine.ranks_per_node)
        return np.asarray(done + agreed + (updated + gathered)[:, None])

    def _exchanged(self, count: int, size: MeshSize, near: bool) -> tuple[float, float]:
        """Seconds in which the replicas of so many parameters reduce gradients, and gather weights."""
        if not count:
            return 0.0, 0.0
        costs, weight = self.estimator.pricing.costs, ELEMENT_BYTES[self.estimator.pricing.precision]
        reduced = costs.collective("reduce_scatter", count * BYTES_PER_GRADIENT, size.dp, near)
        return reduced, costs.collective("all_gather", count * weight, size.dp, near)

    def _held(self, rank: int) -> dict[str, list[int]]:
        """Stages on a rank by unit, sources first."""
        held: dict[str, list[int]] = {}
        for stage in self.graph.stages:
            if any(rank in tp_group for tp_group in stage.tp_groups):
                held.setdefault(stage.id.unit, []).append(stage.id.index)
        return held


def _one_group(sizing: MeshAssignment) -> tuple[MeshAssignment, int]:
    """The sizing of one replica group with TP groups of one rank, and how many groups there are."""
    num = int(np.gcd.reduce([size.dp for size in sizing.meshes.values()]))
    sizes = {n: MeshSize(1, s.pp, s.dp // num, s.vpp) for n, s in sizing.meshes.items()}
    return MeshAssignment(sizing.placement, sizes, sizing.num_microbatches), num


def _of_groups(by_kind: FloatArray, groups: IntArray, num_groups: int) -> FloatArray:
    """(K, 3, batches x groups, replicas x microbatches) of some groups of each batch."""
    kinds, three, batches = by_kind.shape[:3]
    split = by_kind.reshape(kinds, three, batches, num_groups, -1)
    picked = np.take_along_axis(split, groups[None, None, :, :, None], axis=3)
    return picked.reshape(kinds, three, -1, picked.shape[-1])


def _added(
    tracks: Sequence[LayerChain], cuts: Sequence[LayerPartition], extra: Sequence[FloatArray | None]
) -> dict[str, FloatArray]:
    """By unit (n, stages): recomputation that memory demands, as a share of all there could be. The cuts are alike."""
    found = {}
    for at, (track, seconds) in enumerate(zip(tracks, extra, strict=True)):
        if seconds is None:
            continue
        rows = np.asarray([c[at] for c in cuts])
        share = _shares(track, rows, seconds)
        for unit, begin in zip(track.units, track.bounds, strict=False):
            first_part = int(np.searchsorted(rows[0], begin, side="right")) - 1
            found[unit] = share[:, first_part:]
    return found


def _shares(track: LayerChain, cuts: IntArray, extra: FloatArray) -> FloatArray:
    """(n, parts) of each part's recomputation, the share that it needs to fit."""
    prefix = np.concatenate([[0.0], np.cumsum(track.costs.again)])
    most = np.maximum(np.diff(prefix[cuts], axis=1), 1e-30)
    # Where a part alone would not fit, others on its rank may leave it room: all of it is recomputed then.
    return np.asarray(np.minimum(extra[np.arange(track.num_chunks), cuts[:, :-1], cuts[:, 1:]] / most, 1.0))
