"""An all-to-all of rows between the ranks of a group, with gradients."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange_rows(
    rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send rows (R, ...) to all ranks of the group and return those that they send, both in the order of the ranks.

    All ranks call this together, and again in backward. num_sent, num_received: rows to and from each of them.
    """
    exchanged: Tensor = _RowExchange.apply(  # type: ignore[no-untyped-call]
        rows, tuple(num_sent), tuple(num_received), group
    )
    return exchanged


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, num_sent: tuple[int, ...], num_received: tuple[int, ...], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.num_sent, ctx.num_received, ctx.group = num_sent, num_received, group
        return _exchange(rows, num_sent, num_received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        return _exchange(gradient, ctx.num_received, ctx.num_sent, ctx.group), None, None, None


def _exchange(
    rows: Tensor, num_sent: tuple[int, ...], num_received: tuple[int, ...], group: dist.ProcessGroup
) -> Tensor:
    received = rows.new_empty(sum(num_received), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), list(num_received), list(num_sent), group=group)
    return received
