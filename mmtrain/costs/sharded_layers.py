"""Seconds of layers whose weights are shared out over replicas (FSDP, arXiv 2304.11277; hybrid sharding, too).

A layer's weights are gathered while the layer before it computes, and its gradients are reduced while the next one
does. All ranks run a pass together, as every layer's weights come from all of them. Between a layer's own tensors and
the buffers that travel lie copies, which a rank makes itself and which no compute hides.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmtrain.costs.collectives import GroupLayout
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.gradient_reduction import BYTES_PER_GRADIENT, GradientReduction
from mmtrain.costs.hardware import Precision
from mmtrain.costs.layer_arithmetic import num_parameters, num_trained_parameters
from mmtrain.models.shapes.model_shape import LayerShape

FloatArray = npt.NDArray[np.floating[Any]]
_BYTES_PER_MASTER = 4  # shards are held in fp32
# Kernels that torch's FSDP2 starts for one layer, in the time of small ones with the Python around them: by passes over
# layers of 4 to 16 tiny weights on a CPU (torch 2.13), where a layer is whole on its rank and where it is shared out.
_GATHER_KERNELS, _SHARED_GATHER_KERNELS = 6, 16
_REDUCE_KERNELS = 9


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
        nbytes = num_parameters(layer, self.tp) * self.element_bytes
        return self.costs.collective("all_gather", nbytes, self._copy)

    def reduce_seconds(self, layer: LayerShape, is_last: bool) -> float:
        """Return the seconds in which a layer's gradients are reduced: inside a copy, and at last between the copies.

        is_last: whether no other backward of the step follows.
        """
        if not layer.trainable or (self.costs.reduces_once and not is_last):
            return 0.0
        count = num_trained_parameters(layer, self.tp)
        seconds = self._reduction.seconds(count, self._copy)
        if is_last:
            nbytes = count * BYTES_PER_GRADIENT
            num_copies = self.num_replicas // self.shard
            owners = GroupLayout.strided(num_copies, self.shard * self.tp, self.ranks_per_node)
            seconds += self.costs.collective("all_reduce", nbytes // self.shard, owners)
        return seconds

    def gather_copies_seconds(self, layer: LayerShape) -> float:
        """Return the seconds in which a rank copies gathered weights, into the buffer that travels and out of it."""
        count, element_bytes = num_parameters(layer, self.tp), self.element_bytes
        nbytes = 2.0 * element_bytes * count
        if element_bytes != _BYTES_PER_MASTER:
            nbytes += (_BYTES_PER_MASTER + element_bytes) * count / self.shard
        if self.shard == 1:
            return self.costs.shard_copies(nbytes, _GATHER_KERNELS)
        return self.costs.shard_copies(nbytes + 2 * element_bytes * count / self.shard, _SHARED_GATHER_KERNELS)

    def reduce_copies_seconds(self, layer: LayerShape, is_first: bool) -> float:
        """Return the seconds in which a rank copies gradients into the buffer that travels, and adds up what comes.

        is_first: whether the step has no gradients yet to which these are added.
        """
        if not layer.trainable:
            return 0.0
        count = num_trained_parameters(layer, self.tp)
        # A layer's price holds that GEMMs add to a sum in fp32. Where it is sharded, they write what is copied here.
        nbytes = float(self.element_bytes + BYTES_PER_GRADIENT - self.costs.gradient_bytes) * count
        if self.shard == 1:  # FSDP2 divides by 1 and copies once more where nothing travels
            nbytes += 4 * BYTES_PER_GRADIENT * count
        if not is_first:
            nbytes += 3 * BYTES_PER_GRADIENT * (count if self.costs.reduces_once else count / self.shard)
        return self.costs.shard_copies(nbytes, _REDUCE_KERNELS)

    def rounded_copies_seconds(self, layer: LayerShape) -> float:
        """Return the seconds in which a rank rounds gradients to bf16, if they travel so, and adds up what comes."""
        count = num_trained_parameters(layer, self.tp) if layer.trainable else 0
        rounding_s = self._reduction.rounding_seconds(count, self._copy)
        return rounding_s + self._reduction.adding_seconds(count, self._copy)

    @property
    def _reduction(self) -> GradientReduction:
        return GradientReduction(self.costs, self.grad_reduce)

    @property
    def _copy(self) -> GroupLayout:
        return GroupLayout.strided(self.shard, self.tp, self.ranks_per_node)


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
