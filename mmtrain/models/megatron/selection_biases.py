"""Update what is added to the scores of experts where they are chosen, without a gradient (arXiv 2408.15664)."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmtrain.models.megatron.router import Router


class SelectionBiases:
    """The biases of a unit's routers on this rank that are updated every step.

    Args:
        stages: those of the unit.
        dp_group: ranks that hold the same stages, with all replicas of the unit.
        rate: how much a bias changes in a step.
    """

    def __init__(self, stages: Iterable[nn.Module], dp_group: dist.ProcessGroup, rate: float) -> None:
        routers = (module for stage in stages for module in stage.modules() if isinstance(module, Router))
        self._routers = [router for router in routers if router.rules.updates_bias]
        self._dp_group, self._rate = dp_group, rate

    def reset(self) -> None:
        """Forget how many tokens the experts had; a backward counts them from now on."""
        for router in self._routers:
            device = router.weight.device
            router.expert_tokens = torch.zeros(router.num_experts, dtype=torch.int64, device=device)

    def weights(self) -> list[Tensor]:
        """Return the biases, or the parts of them that this rank holds."""
        biases = [router.selection.bias for router in self._routers if router.selection is not None]
        return [bias.to_local() if isinstance(bias, DTensor) else bias for bias in biases]

    def step(self, skip: Tensor) -> None:
        """Raise the biases of experts with fewer tokens than the mean of their block, and lower those with more.

        All replicas call this together. skip: 1 if nothing may change, else 0.
        """
        counts = [router.expert_tokens for router in self._routers if router.expert_tokens is not None]
        if not counts:
            return
        total = torch.cat(counts)
        dist.all_reduce(total, group=self._dp_group)
        with torch.no_grad():
            for router, tokens in zip(
                self._routers, torch.split(total, [len(of_one) for of_one in counts]), strict=True
            ):
                assert router.selection is not None, "only a router with a bias updates it"
                missing = tokens.sum() - tokens * len(tokens)  # times the number of experts, so that it is whole
                _add(router.selection.bias, missing.sign() * self._rate * (1.0 - skip))


def _add(bias: nn.Parameter, change: Tensor) -> None:
    """Add a change to a bias, or to the part of it that this rank holds."""
    if not isinstance(bias, DTensor):
        bias.add_(change)
        return
    local = bias.to_local()
    rows_per_shard = -(-len(change) // bias.device_mesh.size(-1))
    first = min(bias.device_mesh.get_local_rank(bias.device_mesh.ndim - 1) * rows_per_shard, len(change))
    local += change[first : first + len(local)]
