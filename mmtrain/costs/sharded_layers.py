"""Seconds of layers whose weights are shared out over replicas (FSDP, arXiv 2304.11277; hybrid sharding, too).

A layer's weights are gathered while the layer before it computes, and its gradients are reduced while the next one
does. All ranks run a pass together, as every layer's weights come from all of them. Between a layer's own tensors and
the buffers that travel lie copies, which a rank makes itself and which no compute hides.

With expert parallelism a layer's experts are shared out over the replicas that hold the same ones alone. They are
gathered and reduced by collectives of their own, one after the other parameters'.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmtrain.costs.collectives import GroupLayout
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.gradient_reduction import BYTES_PER_GRADIENT, GradientReduction
from mmtrain.costs.hardware import Precision
from mmtrain.costs.layer_arithmetic import (
    num_apart_parameters,
    num_held_apart,
    num_parameters,
    num_trained_parameters,
)
from mmtrain.models.shapes.layer_shape import MoeMlp, expert_shard
from mmtrain.models.shapes.model_shape import LayerShape

FloatArray = npt.NDArray[np.floating[Any]]
_BYTES_PER_MASTER = 4  # shards are held in fp32
# Kernels that torch's FSDP2 starts for one layer, in the time of small ones with the Python around them: by passes over
# layers of 4 to 16 tiny weights on a CPU (torch 2.13), where a layer is whole on its rank and where it is shared out.
_GATHER_KERNELS, _SHARED_GATHER_KERNELS = 6, 16
_REDUCE_KERNELS = 9


@dataclass(frozen=True)
class _Part:
    """Parameters of a layer that the same ranks share out."""

    count: int  # of a rank, before they are shared out
    shard: int  # ranks that hold one copy of them together
    copy: GroupLayout
    owners: GroupLayout  # ranks with equal shards, of all copies


@dataclass(frozen=True)
class ShardedLayers:
    """Prices the collectives of layers of which `shard` replicas hold one copy together.

    With tensor parallelism a replica is a TP group. The ranks at one place in the groups gather and reduce what that
    place holds, all places at once.
    """

    costs: CostModel
    num_replicas: int
    shard: int
    element_bytes: int  # of a parameter that is gathered
    ranks_per_node: int
    tp: int = 1
    grad_reduce: Precision = "fp32"  # in which ranks of a copy send each other gradients; between copies it is fp32

    def gather_seconds(self, layer: LayerShape) -> float:
        """Return the seconds in which a layer's weights are gathered inside a copy."""
        return sum(
            self.costs.collective("all_gather", part.count * self.element_bytes, part.copy)
            for part in self._held(layer)
        )

    def reduce_seconds(self, layer: LayerShape, is_last: bool) -> float:
        """Return the seconds in which a layer's gradients are reduced: inside a copy, and at last between the copies.

        is_last: whether no other backward of the step follows.
        """
        if self.costs.reduces_once and not is_last:
            return 0.0
        seconds = 0.0
        for part in self._trained(layer):
            seconds += self._reduction.seconds(part.count, part.copy)
            if is_last:
                nbytes = part.count * BYTES_PER_GRADIENT
                seconds += self.costs.collective("all_reduce", nbytes // part.shard, part.owners)
        return seconds

    def gather_copies_seconds(self, layer: LayerShape) -> float:
        """Return the seconds in which a rank copies gathered weights, into the buffer that travels and out of it."""
        return sum(map(self._gather_copies_of_part, self._held(layer)))

    def _gather_copies_of_part(self, part: _Part) -> float:
        element_bytes = self.element_bytes
        nbytes = 2.0 * element_bytes * part.count
        if element_bytes != _BYTES_PER_MASTER:
            nbytes += (_BYTES_PER_MASTER + element_bytes) * part.count / part.shard
        if part.shard == 1:
            return self.costs.shard_copies(nbytes, _GATHER_KERNELS)
        return self.costs.shard_copies(nbytes + 2 * element_bytes * part.count / part.shard, _SHARED_GATHER_KERNELS)

    def reduce_copies_seconds(self, layer: LayerShape, is_first: bool) -> float:
        """Return the seconds in which a rank copies gradients into the buffer that travels, and adds up what comes.

        is_first: whether the step has no gradients yet to which these are added.
        """
        return sum(self._reduce_copies_of_part(part, is_first) for part in self._trained(layer))

    def _reduce_copies_of_part(self, part: _Part, is_first: bool) -> float:
        count, shard = part.count, part.shard
        # A layer's price holds that GEMMs add to a sum in fp32. Where it is sharded, they write what is copied here.
        nbytes = float(self.element_bytes + BYTES_PER_GRADIENT - self.costs.gradient_bytes) * count
        if shard == 1:  # FSDP2 divides by 1 and copies once more where nothing travels
            nbytes += 4 * BYTES_PER_GRADIENT * count
        if not is_first:
            nbytes += 3 * BYTES_PER_GRADIENT * (count if self.costs.reduces_once else count / shard)
        return self.costs.shard_copies(nbytes, _REDUCE_KERNELS)

    def rounded_copies_seconds(self, layer: LayerShape) -> float:
        """Return the seconds in which a rank rounds gradients to bf16, if they travel so, and adds up what comes."""
        reduction = self._reduction
        return sum(
            reduction.rounding_seconds(part.count, part.copy) + reduction.adding_seconds(part.count, part.copy)
            for part in self._trained(layer)
        )

    def _held(self, layer: LayerShape) -> Sequence[_Part]:
        return self._parts(layer, num_parameters(layer, self.tp), num_held_apart(layer, self.tp))

    def _trained(self, layer: LayerShape) -> Sequence[_Part]:
        if not layer.trainable:
            return ()
        return self._parts(layer, num_trained_parameters(layer, self.tp), num_apart_parameters(layer, self.tp))

    def _parts(self, layer: LayerShape, count: int, num_apart: int) -> Sequence[_Part]:
        """Return how a layer's parameters are shared out, `num_apart` of them those of experts held apart."""
        joint = self._part(count - num_apart, 1)
        if not num_apart or not isinstance(layer.mlp, MoeMlp):
            return (joint,)
        return joint, self._part(num_apart, layer.mlp.ep)

    def _part(self, count: int, ep: int) -> _Part:
        shard, stride = expert_shard(self.shard, ep), self.tp * ep
        num_copies = self.num_replicas // (shard * ep)
        copy = GroupLayout.strided(shard, stride, self.ranks_per_node)
        return _Part(count, shard, copy, GroupLayout.strided(num_copies, shard * stride, self.ranks_per_node))

    @property
    def _reduction(self) -> GradientReduction:
        return GradientReduction(self.costs, self.grad_reduce)


def overlapped_seconds(
    compute: FloatArray, gathers: FloatArray, reductions: FloatArray, slowdown: float = 0.0
) -> FloatArray:
    """Return the seconds of layers whose weights are gathered before them and whose gradients are reduced after them.

    While layer i is computed, the weights of layer i + 1 arrive and the gradients of layer i - 1 leave. Layer i + 1
    starts when all three are done. Nothing hides the first gather and the last reduction.

    Args:
        compute: (L, ...) of each layer.
        gathers: (L,) of each layer's weights.
        reductions: (L, ...) of each layer's gradients.
        slowdown: share of the communication beside a layer by which the layer takes longer.

    Returns:
        (...) seconds of all layers.
    """
    if not len(compute):
        return np.zeros(compute.shape[1:])
    communication = np.zeros_like(compute)  # while each layer is computed
    communication[:-1] += gathers[1:].reshape(-1, *(1,) * (compute.ndim - 1))
    communication[1:] += reductions[:-1]
    slowed = compute + slowdown * np.minimum(compute, communication)
    return np.asarray(gathers[0] + np.maximum(slowed, communication).sum(axis=0) + reductions[-1])
