"""The MLP of a recomputed block in chunks of tokens, so that its inner widths never exist for all tokens at once.

Long sequences need it: the inner widths of a gated MLP and their gradients are most of what a block holds while it is
computed backward. Chunks of an MLP are independent (ALST, arXiv 2506.13996, calls it tiled MLP).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mmtrain.models.shapes.layer_shape import MLP_CHUNK_TOKENS


def needs_chunks(num_tokens: int) -> bool:
    """Return whether an MLP has more tokens than one chunk."""
    return num_tokens > MLP_CHUNK_TOKENS


def run_mlp_in_chunks(
    mlp: Callable[[Tensor], Tensor], x: Tensor, weights: Sequence[nn.Parameter], num_ranks: int, *, output_is_read: bool
) -> Tensor:
    """Compute `mlp(x)` with gradients as if at once; what `mlp` keeps is made again in backward, chunk by chunk.

    Args:
        mlp: maps rows of x to as many rows, each by itself.
        x: (T, ...) normalized hidden states.
        weights: parameters of `mlp` that train.
        num_ranks: that gather their rows inside `mlp`, which has so many times as many there.
        output_is_read: whether something keeps the output for backward. If not, recomputation of the block skips it.
    """
    out: Tensor = _ChunkedMlp.apply(mlp, x, num_ranks, output_is_read, *weights)  # type: ignore[no-untyped-call]
    return out


class _ChunkedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mlp: Callable[[Tensor], Tensor],
        x: Tensor,
        num_ranks: int,
        output_is_read: bool,
        *weights: nn.Parameter,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.mlp, ctx.num_ranks, ctx.weights = mlp, num_ranks, weights
        if not output_is_read and _is_recomputed():
            return x.new_empty(1).expand(x.shape)
        out = torch.empty_like(x)
        for rows in _chunks(len(x), num_ranks):
            out[rows] = mlp(x[rows])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[1]
        x_grad = torch.empty_like(x) if needs_x else None
        weight_grads: list[Tensor | None] = [None] * len(ctx.weights)
        for rows in _chunks(len(x), ctx.num_ranks):
            x_rows = x[rows].detach().requires_grad_(needs_x)
            with torch.enable_grad():
                out = ctx.mlp(x_rows)
            sources = [x_rows, *ctx.weights] if needs_x else list(ctx.weights)
            grads = list(torch.autograd.grad(out, sources, out_grad[rows], allow_unused=True))
            del out
            if x_grad is not None:
                x_grad[rows] = grads.pop(0)
            for i, weight in enumerate(ctx.weights):
                weight_grads[i] = _added(weight, weight_grads[i], grads[i])
            del grads
        in_their_types = (
            None if grad is None else grad.to(weight.dtype)
            for weight, grad in zip(ctx.weights, weight_grads, strict=True)
        )
        return None, x_grad, None, None, *in_their_types


def _chunks(num_rows: int, num_ranks: int) -> Iterator[slice]:
    """Yield the rows of each chunk."""
    size = -(-MLP_CHUNK_TOKENS // num_ranks)
    for first in range(0, num_rows, size):
        yield slice(first, min(first + size, num_rows))


def _added(weight: nn.Parameter, total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Add the gradient of a chunk to those of the chunks before, in fp32: bf16 would round each sum.

    Where the optimizer sums gradients in fp32 they go there, and autograd gets none. Most GEMMs have done so before.
    """
    if grad is None:
        return total
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(grad)
        return None
    return grad.float() if total is None else total.add_(grad)


def _is_recomputed() -> bool:
    """Return whether this forward runs inside a backward, which computes a layer again for what its backward reads."""
    return bool(torch._C._current_graph_task_id() != -1)
