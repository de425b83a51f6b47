"""The GEMM of a tensor-parallel linear, with the communication of its backward, and in chunks also of its forward.

It takes the place of Megatron-core's function. That one needs Apex to sum gradients of weights in fp32, adds a bias in
a pass of its own, gives biases of frozen weights no gradient, and always computes the gradient of the input.

With GEMMs in chunks of tokens, the collective of one chunk runs while its neighbour is computed (arXiv 2408.04275).
Under sequence parallelism a chunk holds some tokens of every rank's shard, so its rows lie apart in the tensor of all
tokens. No pass puts them in order: the GEMM reads or writes them where they lie, as one batch of a rank's rows each,
and what is gathered goes to its place when it arrives. So layers before and after know nothing of chunks, and sums over
tokens keep their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmtrain.models.kernels.weight_gradient import add_weight_gradient


def tp_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tp_group: dist.ProcessGroup,
    *,
    sums_input_grad: bool = False,
    gathers_tokens: bool = False,
    num_chunks: int = 1,
) -> Tensor:
    """Compute (T, ..., outputs) of (T, ..., inputs).

    sums_input_grad: backward sums the gradient of the input over the group, while it computes that of the weight.
    gathers_tokens: `x` is this rank's shard of the tokens; backward reduces its gradient to that of the shard.
    num_chunks: of the tokens; a chunk is gathered or reduced while a neighbour is computed. See `chunked_gemms`.
    """
    communication = _Communication(tp_group, sums_input_grad, gathers_tokens, num_chunks)
    return cast(Tensor, _TensorParallelLinear.apply(x, weight, bias, communication))  # type: ignore[no-untyped-call]


def reduced_linear(
    x: Tensor, weight: Tensor, tp_group: dist.ProcessGroup, *, scatters_tokens: bool, num_chunks: int
) -> Tensor:
    """Compute the sum over the group of each rank's (T, ..., outputs) of (T, ..., inputs / tp), in chunks of tokens.

    scatters_tokens: return this rank's shard of the tokens; backward gathers its gradient.
    """
    arguments = (x, weight, tp_group, scatters_tokens, num_chunks)
    return cast(Tensor, _ReducedLinear.apply(*arguments))  # type: ignore[no-untyped-call]


class Reductions:
    """Reductions under way, with what they read."""

    def __init__(self, works: Sequence[dist.Work], summands: Sequence[Tensor]) -> None:
        self._works = works
        self._summands = summands

    def wait(self) -> None:
        """Wait for all of them; on a GPU the current stream does."""
        for work in self._works:
            work.wait()
        self._summands = ()


@dataclass(frozen=True)
class _Communication:
    """What the group of a linear communicates; see `tp_linear`."""

    group: dist.ProcessGroup
    sums_input_grad: bool
    gathers_tokens: bool
    num_chunks: int


class _TensorParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, communication: _Communication) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.communication = communication
        if not communication.gathers_tokens:
            return F.linear(x, weight, bias)
        if communication.num_chunks > 1:
            return gather_then_multiply(x, weight.T, bias, communication.group, communication.num_chunks)[0]
        return F.linear(_gather(x, communication.group)[0], weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathering: dist.Work | None = None
        if ctx.communication.gathers_tokens and needs_weight:
            x, gathering = _gather(x, ctx.communication.group, async_op=True)
        x_grad, reduction = _input_grad(ctx, out_grad, weight) if needs_x else (None, None)
        rows = out_grad.flatten(0, -2)
        bias_grad = rows.sum(0) if needs_bias else None
        if gathering is not None:
            gathering.wait()
        weight_grad = add_weight_gradient(weight, rows, x.flatten(0, -2)) if needs_weight else None
        if reduction is not None:
            reduction.wait()
        return x_grad, weight_grad, bias_grad, None


class _ReducedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, tp_group: dist.ProcessGroup, scatters_tokens: bool, num_chunks: int
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.tp_group = tp_group
        ctx.scatters_tokens = scatters_tokens
        ctx.num_chunks = num_chunks
        out, reductions = multiply_then_reduce(x, weight.T, tp_group, num_chunks, scatters=scatters_tokens)
        reductions.wait()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x_grad: Tensor | None = None
        if not ctx.scatters_tokens:
            x_grad = out_grad @ weight if needs_x else None
        elif needs_x:
            x_grad, out_grad = gather_then_multiply(out_grad, weight, None, ctx.tp_group, ctx.num_chunks)
        else:
            out_grad, _ = _gather(out_grad, ctx.tp_group)
        weight_grad = None
        if needs_weight:
            weight_grad = add_weight_gradient(weight, out_grad.flatten(0, -2), x.flatten(0, -2))
        return x_grad, weight_grad, None, None, None


def _input_grad(ctx: Any, out_grad: Tensor, weight: Tensor) -> tuple[Tensor, dist.Work | Reductions | None]:
    """Return where the input's gradient will be, and the work to wait for before anyone reads it.

    The GEMM of the weight's gradient, if there is one, hides the reduction; only without one are there chunks.
    """
    communication: _Communication = ctx.communication
    group, scatters = communication.group, communication.gathers_tokens
    is_hidden = ctx.needs_input_grad[1]
    if communication.num_chunks > 1 and not is_hidden and (communication.sums_input_grad or scatters):
        return multiply_then_reduce(out_grad, weight, group, communication.num_chunks, scatters=scatters)
    x_grad = out_grad @ weight
    if communication.sums_input_grad:
        return x_grad, dist.all_reduce(x_grad, group=group, async_op=True)
    if not scatters:
        return x_grad, None
    shard_grad = x_grad.new_empty(len(x_grad) // group.size(), *x_grad.shape[1:])
    return shard_grad, dist.reduce_scatter_tensor(shard_grad, x_grad, group=group, async_op=True)


def _gather(shard: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> tuple[Tensor, dist.Work | None]:
    """Gather the tokens of all ranks; return where they will be, and the work to wait for if it is asynchronous."""
    rows = shard.new_empty(len(shard) * group.size(), *shard.shape[1:])
    return rows, dist.all_gather_into_tensor(rows, shard.contiguous(), group=group, async_op=async_op)


def chunk_bounds(num_rows: int, num_chunks: int) -> list[tuple[int, int]]:
    """Return [start, stop) of each chunk: equally many rows but for one, and at least one, so maybe fewer chunks."""
    num_chunks = max(1, min(num_chunks, num_rows))
    bounds = [num_rows * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return [(bounds[chunk], bounds[chunk + 1]) for chunk in range(num_chunks)]


def gather_then_multiply(
    shard: Tensor, matrix: Tensor, bias: Tensor | None, group: dist.ProcessGroup, num_chunks: int
) -> tuple[Tensor, Tensor]:
    """Gather the tokens of all ranks in chunks, and multiply each chunk while the next one arrives.

    Args:
        shard: (T / tp, ..., inputs) this rank's tokens.
        matrix: (inputs, outputs).
        bias: (outputs,), added to the products.
        group: the TP group.
        num_chunks: at most.

    Returns:
        The products (T, ..., outputs), and the gathered tokens (T, ..., inputs).
    """
    shard = shard.contiguous()
    rows = shard.view(-1, shard.shape[-1])
    size = group.size()
    gathered = rows.new_empty(size, *rows.shape)
    products = rows.new_empty(size, len(rows), matrix.shape[1])
    bounds = chunk_bounds(len(rows), num_chunks)
    arrivals = []
    for start, stop in bounds:
        places = [of_rank[start:stop] for of_rank in gathered]
        arrivals.append(dist.all_gather(places, rows[start:stop], group=group, async_op=True))
    for (start, stop), arrival in zip(bounds, arrivals, strict=True):
        arrival.wait()
        _multiply(gathered[:, start:stop], matrix, bias, products[:, start:stop])
    num_tokens = size * len(shard)
    return _with_tokens(products, num_tokens, shard), _with_tokens(gathered, num_tokens, shard)


def multiply_then_reduce(
    x: Tensor, matrix: Tensor, group: dist.ProcessGroup, num_chunks: int, *, scatters: bool
) -> tuple[Tensor, "Reductions"]:
    """Multiply tokens in chunks, and sum each chunk's products over the ranks while the next one is computed.

    Args:
        x: (T, ..., inputs) all tokens.
        matrix: (inputs, outputs).
        group: the TP group.
        num_chunks: at most.
        scatters: each rank gets the sums of its shard of the tokens, not those of all.

    Returns:
        Where the sums (T, ..., outputs), or (T / tp, ..., outputs), will be, and the reductions to wait for.
    """
    rows = x.contiguous().view(-1, x.shape[-1])
    if not scatters:
        sums = rows.new_empty(len(rows), matrix.shape[1])
        works = []
        for start, stop in chunk_bounds(len(rows), num_chunks):
            torch.mm(rows[start:stop], matrix, out=sums[start:stop])
            works.append(dist.all_reduce(sums[start:stop], group=group, async_op=True))
        return _with_tokens(sums, len(x), x), Reductions(works, [])
    size = group.size()
    of_ranks = rows.view(size, -1, rows.shape[-1])
    num_rows = of_ranks.shape[1]
    sums = rows.new_empty(num_rows, matrix.shape[1])
    works, summands = [], []
    for start, stop in chunk_bounds(num_rows, num_chunks):
        products = rows.new_empty(size, stop - start, matrix.shape[1])
        _multiply(of_ranks[:, start:stop], matrix, None, products)
        summands.append(products.view(-1, matrix.shape[1]))
        works.append(dist.reduce_scatter_tensor(sums[start:stop], summands[-1], group=group, async_op=True))
    return _with_tokens(sums, len(x) // size, x), Reductions(works, summands)


def _multiply(rows: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write rows (ranks, n, inputs) @ matrix (+ bias) to `out` (ranks, n, outputs); the ranks' rows may lie apart."""
    matrices = matrix.expand(len(rows), *matrix.shape)
    if bias is None:
        torch.bmm(rows, matrices, out=out)
    else:
        torch.baddbmm(bias, rows, matrices, out=out)


def _with_tokens(rows: Tensor, num_tokens: int, like: Tensor) -> Tensor:
    """View rows as (tokens, ..., width) with the dimensions between those of `like`."""
    return rows.view(num_tokens, *like.shape[1:-1], rows.shape[-1])
