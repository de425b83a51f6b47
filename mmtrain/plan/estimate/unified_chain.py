"""Rates cuts of a unified pipeline as those of one line of layers, whatever units they belong to.

Where every unit feeds the next one and all have as many microbatches, a part computes what it holds of each unit one
after another, so all cuts share one order. In a graph of the units' own stages, each part in which a unit begins has
an order of its own, and orders take longer to work out than cuts to rate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mmtrain.costs import Hardware
from mmtrain.costs.hardware import ELEMENT_BYTES
from mmtrain.plan.artifact.layout import MeshSize
from mmtrain.plan.estimate.layer_costs import BACKWARD, FORWARD, RECOMPUTE, FloatArray, IntArray, LayerCosts
from mmtrain.plan.estimate.vectorized_1f1b import ComputeOrder, compute_order
from mmtrain.plan.search.mesh_enumeration import MeshAssignment
from mmtrain.program.ir.graph import LLM, Edge, Stage, StageGraph, StageId, UnitMesh
from mmtrain.program.simulation.timing import BYTES_PER_GRADIENT, NORM_BYTES


def is_unified_chain(sizing: MeshAssignment, pricing: LayerCosts) -> bool:
    """Whether the sizing's units are one line, each entered at its beginning by the one before."""
    names = [unit.name for unit in pricing.shape.units]
    edges = [(e.src, e.dst) for e in pricing.shape.edges if e.layer == 0]
    joined = list(pairwise(names)) == edges and len(edges) == len(pricing.shape.edges)
    return sizing.placement == "unified" and joined and len(set(sizing.num_microbatches.values())) == 1


def chain_order(size: MeshSize, num_microbatches: int, first_backward: int) -> ComputeOrder:
    """The order of a line cut into parts, of which those from `first_backward` on have a backward."""
    mesh = UnitMesh(LLM, 1, size.pp, 1, tuple(range(size.pp)), num_microbatches, size.vpp)
    parts = [StageId(LLM, k) for k in range(size.pp * size.vpp)]
    stages = [Stage(p, (p.index, p.index + 1), (mesh.tp_group(p.index, 0),), p.index == first_backward) for p in parts]
    return compute_order(StageGraph((mesh,), tuple(stages), tuple(Edge(a, b) for a, b in pairwise(parts))))


def first_backward_parts(cuts: IntArray, pricing: LayerCosts) -> IntArray:
    """(n,) the first part of each cut, (n, parts + 1), that has a backward; all of them if there is none."""
    trains = [layer.trainable for unit in pricing.shape.units for layer in unit.layers]
    first = trains.index(True) if any(trains) else len(trains)
    return np.asarray((cuts[:, 1:] <= first).sum(axis=1))


@dataclass(frozen=True)
class UnifiedChainRun:
    """Cuts of one line that share an order."""

    pricing: LayerCosts
    machine: Hardware
    sizing: MeshAssignment
    order: ComputeOrder
    cuts: IntArray  # (n, parts + 1)
    again: FloatArray | None  # (n, parts) share of its layers' recomputation that each part needs to fit

    def seconds(self, grids: Sequence[FloatArray]) -> FloatArray:
        """(n,) mean over the batches of the slowest group's step.

        grids: of each unit, (kinds, 3, batches, groups, microbatches) seconds of a layer.
        """
        n, (batches, groups) = len(self.cuts), grids[0].shape[2:4]
        forward, backward = self._parts(grids)
        taken = {stage: (forward[stage.index], backward[stage.index]) for stage in self.order.rows}
        delays = self._delays()
        same = (delays == delays[:, :1]).all()
        ends = self.order.rank_ends(taken, delays[:, 0] if same else delays.repeat(batches * groups, axis=1))
        by_rank = [ends[rank].reshape(n, batches, groups).max(axis=2) for rank in range(self._size.pp)]
        return np.asarray(self._closed(by_rank).mean(axis=1))

    @property
    def _size(self) -> MeshSize:
        return self.sizing.meshes[LLM]

    def _held(self) -> Iterator[tuple[str, IntArray, IntArray]]:
        """By unit, the layers [lo, hi) of it in each part, (n, parts) each."""
        begin = 0
        for unit in self.pricing.shape.units:
            within = np.clip(self.cuts - begin, 0, len(unit.layers))
            yield unit.name, within[:, :-1], within[:, 1:]
            begin += len(unit.layers)

    def _parts(self, grids: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
        """Forward and backward of every part: (parts, n x batches x groups, microbatches)."""
        forward: FloatArray | float = 0.0
        backward: FloatArray | float = 0.0
        for (unit, lo, hi), grid in zip(self._held(), grids, strict=True):
            count = self.pricing.unit_times(unit, self._size.tp, self.sizing.batch_split).count
            held = (count[hi] - count[lo]).swapaxes(0, 1).astype(np.float64)  # (parts, n, kinds)
            forward = forward + np.tensordot(held, grid[:, FORWARD], 1)
            backward = backward + np.tensordot(held, grid[:, BACKWARD], 1)
            if self.pricing.recompute[unit] == "all":
                backward = backward + np.tensordot(held, grid[:, RECOMPUTE], 1)
            elif self.again is not None:
                backward = backward + np.tensordot(held * self.again.T[:, :, None], grid[:, RECOMPUTE], 1)
        shape = (self.cuts.shape[1] - 1, -1, grids[0].shape[-1])
        return np.asarray(forward).reshape(shape), np.asarray(backward).reshape(shape)

    def _delays(self) -> FloatArray:
        """(parts - 1, n) what a message from part to part takes at least; 0 between units."""
        found = np.zeros((self.cuts.shape[1] - 2, len(self.cuts)))
        near = self._size.tp * self._size.dp < self.machine.ranks_per_node  # then some pair shares a node
        for unit, lo, _ in self._held():
            nbytes = self.pricing.least_message(unit, self._size.tp, self.sizing.batch_split)
            inside = (lo[:, 1:] > 0) & (lo[:, 1:] < len(self.pricing.shape.unit(unit).layers))
            found += np.where(inside, self.pricing.costs.transfer(nbytes, near) if nbytes else 0.0, 0.0).T
        return found

    def _closed(self, ends: Sequence[FloatArray]) -> FloatArray:
        """(n, batches) with the last reduction of gradients, the optimizer's step for which all wait, and gathering."""
        n, size, ranks = len(self.cuts), self._size, self.sizing.ranks
        costs, machine = self.pricing.costs, self.machine
        shards, gathers = np.zeros((size.pp, n), np.int64), np.zeros((size.pp, n))
        last, is_first = np.zeros((size.pp, n)), np.ones((size.pp, n), dtype=np.bool_)
        for unit, lo, hi in self._held():
            trained = self.pricing.unit_costs(unit, size.tp, self.sizing.batch_split).parameters
            prefix = np.concatenate([[0.0], np.cumsum(trained)])
            counts = _by_rank((prefix[hi] - prefix[lo]).astype(np.int64), size.pp)
            reduced, gathered = self._exchanged(counts)
            shards += counts // size.dp
            gathers += gathered
            # Sources come first, and their gradients are ready last.
            held = _by_rank(hi - lo, size.pp) > 0
            last = np.where(held & is_first, reduced, last)
            is_first &= ~held
        done = np.max([end + wait[:, None] for end, wait in zip(ends, last, strict=True)], axis=0)
        updated = np.array([costs.optimizer(int(most)) for most in shards.max(axis=0)])
        agreed = costs.collective("all_reduce", NORM_BYTES, ranks, ranks <= machine.ranks_per_node)
        return np.asarray(done + agreed + (updated + gathers.max(axis=0))[:, None])

    def _exchanged(self, counts: IntArray) -> tuple[FloatArray, FloatArray]:
        """Seconds in which the replicas of so many parameters reduce gradients, and gather weights."""
        size, costs, weight = self._size, self.pricing.costs, ELEMENT_BYTES[self.pricing.precision]
        near = self.machine.ranks_per_node % (size.tp * size.dp) == 0
        different, at = np.unique(counts, return_inverse=True)
        each = np.array(
            [
                (
                    costs.collective("reduce_scatter", count * BYTES_PER_GRADIENT, size.dp, near),
                    costs.collective("all_gather", count * weight, size.dp, near),
                )
                if count
                else (0.0, 0.0)
                for count in different.tolist()
            ]
        )
        reduced, gathered = each[at.reshape(counts.shape)].transpose(2, 0, 1)
        return reduced, gathered


def _by_rank(of_parts: npt.NDArray[np.int64], pp: int) -> IntArray:
    """(pp, n) sums over each rank's parts, of (n, parts)."""
    return np.asarray(of_parts.reshape(len(of_parts), -1, pp).sum(axis=1).T)
