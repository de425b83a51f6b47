"""Muon over this rank's shards of the weights of linears, beside the AdamW of all other parameters.

Momentum lies where the weights' shards do. In a step each weight is gathered on one rank, which orthogonalizes its
matrices and sends each rank the update of its shard (see `matrix_exchange`), some weights at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.optim.clip_factors import ClipFactors
from mmtrain.models.optim.matrix_exchange import DividedWeight, MatrixExchange
from mmtrain.models.optim.orthogonal_update import orthogonal_update
from mmtrain.models.shapes.weight_matrices import WeightMatrices

MOMENTUM = "momentum"  # a shard of it is named like its weight, with `#` and this


@dataclass(frozen=True)
class MuonWeight:
    """A weight that Muon trains, with what this rank holds of it."""

    divided: DividedWeight
    matrices: WeightMatrices
    master: Tensor | None  # this rank's elements, in fp32, whose gradient is the summed one; None: it has none
    momentum: Tensor | None  # as many
    lr_scale: float
    weight_decay: float


class Muon:
    """Steps the weights of one unit that have the same replicas.

    Args:
        weights: in an order that is the same on all ranks.
        replicas: the ranks that share out what one TP rank holds.
        tp: the ranks that split the weights.
        decay_rate: of the momentum.
        dtype: in which matrices travel and are orthogonalized.
        device: where they are.
    """

    def __init__(
        self,
        weights: Sequence[MuonWeight],
        replicas: dist.ProcessGroup,
        tp: dist.ProcessGroup,
        decay_rate: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        specs = [weight.divided.spec for weight in weights]
        assert tp.size() == 1 or all(spec.dim is not None for spec in specs), "tensor parallelism splits all linears"
        self._weights, self._decay_rate, self._dtype, self._device = weights, decay_rate, dtype, device
        self._exchange = MatrixExchange([weight.divided for weight in weights], replicas, tp, dtype, device)

    @torch.no_grad()
    def step(self, lr: float, clip: ClipFactors) -> None:
        """Divide the gradients by `clip.divisor` and update this rank's shards; all ranks call this together.

        Nothing changes where `clip.skip` is 1. The host does not wait for the device.
        """
        skip = clip.skip.bool()
        for numbers in self._exchange.rounds:
            directions = [self._direction(self._weights[i], clip, skip) for i in numbers]
            whole = self._exchange.gather(numbers, directions)
            directions.clear()  # they take as much memory as a whole weight
            if whole is not None:
                owned = self._exchange.owned(numbers)
                assert owned is not None, "a weight was gathered"
                whole = orthogonal_update(whole, self._weights[owned].matrices)
            for i, update in zip(numbers, self._exchange.scatter(numbers, whole), strict=True):
                _apply(self._weights[i], update, lr, skip)

    def _direction(self, weight: MuonWeight, clip: ClipFactors, skip: Tensor) -> Tensor:
        """Update the momentum of a weight's shard; return what Nesterov's rule makes of it and the gradient."""
        if weight.master is None or weight.momentum is None:
            return torch.empty(0, dtype=self._dtype, device=self._device)
        assert weight.master.grad is not None, "parameters that nothing reached have a gradient of zeros"
        gradient = weight.master.grad.view(-1)
        if clip.divisor is not None:
            gradient.div_(clip.divisor)  # the fused AdamW leaves gradients clipped too
        momentum = weight.momentum.view(-1)
        change = torch.sub(gradient, momentum).mul_(1 - self._decay_rate)
        momentum.add_(change.masked_fill_(skip, 0.0))
        return torch.lerp(gradient, momentum, self._decay_rate, out=change).to(self._dtype)


def _apply(weight: MuonWeight, update: Tensor, lr: float, skip: Tensor) -> None:
    """Decay this rank's elements of a weight, and take the update off them."""
    if weight.master is None:
        return
    rate = lr * weight.lr_scale
    master = weight.master.view(-1)
    change = update.float().mul_(rate).add_(master, alpha=rate * weight.weight_decay)
    master.sub_(change.masked_fill_(skip, 0.0))


class AdamWBesideMuon(torch.optim.AdamW):
    """AdamW that leaves out the groups of parameters marked `is_muon`."""

    def step(self, closure: Any = None) -> Any:
        """Update the parameters of all other groups."""
        all_groups = self.param_groups
        self.param_groups = [group for group in all_groups if not group["is_muon"]]
        try:
            return super().step(closure)
        finally:
            self.param_groups = all_groups
