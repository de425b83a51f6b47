"""Reduce-scatter gradients in bf16 over the wire and in fp32 on the ranks (`train.grad_reduce: bf16`).

NCCL's reduce-scatter of bf16 rounds the sum anew on every rank of its ring, and gloo's in another order. So each rank
rounds its own contribution once, an all-to-all brings the contributions to a shard to the rank that holds it, and that
rank adds them up in fp32, in the order of the ranks. Any backend gives the same bits. Megatron-core's
`reduce_scatter_with_fp32_accumulation` does likewise, from buffers that accumulate in bf16.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NUM_ROUNDED_FIRST = 1 << 16  # elements of which a copy exists while their place is taken: 128 KiB


class RoundedReduction:
    """The reduction of a flat fp32 buffer, which starts at once and takes no memory beside the buffer.

    The rounded contribution takes the lower half of the buffer, and what other ranks send the upper half.

    Args:
        buffer: (n,) this rank's gradients in fp32, where n is a multiple of the ranks. Undefined from now on.
        group: the ranks, each of which gets a shard of the sum.
    """

    def __init__(self, buffer: Tensor, group: dist.ProcessGroup) -> None:
        assert buffer.dtype == torch.float32, "gradients are handed over unrounded"
        rounded, received = torch.split(buffer.view(torch.bfloat16), buffer.numel())
        _round_in_place(buffer, rounded)
        self._shards = received.view(group.size(), -1)
        self._work = dist.all_to_all_single(received, rounded, group=group, async_op=True)

    def sum(self) -> Tensor:
        """Wait, and return the sum of this rank's shard (n / ranks,) in fp32, added up in the order of the ranks."""
        assert self._work is not None, "this rank belongs to the group"
        self._work.wait()
        total: Tensor = self._shards[0].float()
        for contribution in self._shards[1:]:
            total.add_(contribution)
        return total


def _round_in_place(buffer: Tensor, rounded: Tensor) -> None:
    """Round an fp32 buffer (n,) to bf16 (n,), where `rounded` is the lower half of its memory.

    What is written for elements [lo, 2 lo) lies below where these are read.
    """
    num_first = min(NUM_ROUNDED_FIRST, len(buffer))
    rounded[:num_first].copy_(buffer[:num_first].to(torch.bfloat16))
    lo = num_first
    while lo < len(buffer):
        hi = min(2 * lo, len(buffer))
        rounded[lo:hi].copy_(buffer[lo:hi])
        lo = hi


class RoundedReduceScatter:
    """A reduce-scatter of fp32 tensors for FSDP2 (`set_custom_reduce_scatter`), whose stream waits for its end."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor for what is reduced, or for its sum."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's shard of the sum over `group` of (n,) inputs to `output_tensor` (n / ranks,)."""
        assert op == dist.ReduceOp.SUM, "gradients are summed and never averaged"
        assert not async_op, "FSDP2 waits by its streams"
        output_tensor.copy_(RoundedReduction(input_tensor, group).sum())
