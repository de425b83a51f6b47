"""A transformer block in pieces (`models.layer_shape.BLOCK_PIECES`), so that other work can run between them.

A state of tensors flows from piece to piece: first the residual stream, then what the next piece reads. If a run of
pieces starts or ends where tensor parallelism communicates (see `costs.block_pieces`), that communication is left to
the caller, who can overlap it with other work. Inside a run Megatron-core communicates by itself.

The MLP of a recomputed block runs in chunks of tokens, so that its inner widths never exist for all tokens at once.
Long sequences need this: the inner widths of a gated MLP and their gradients are most of what a block holds while it is
computed backward. Chunks of an MLP are independent (ALST, arXiv 2506.13996, calls it tiled MLP).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mmtrain.models.attention.packed_sequences import PackedSequences
from mmtrain.models.kernels.elementwise import activate, activate_gated
from mmtrain.models.kernels.keyed_dropout import with_token_keys
from mmtrain.models.kernels.liger import add_and_rms_norm
from mmtrain.models.megatron.block_parts import add_to_residual
from mmtrain.models.megatron.experts import ExpertMlp, RoutedTokens, Routing, SharedInner
from mmtrain.models.megatron.grouped_attention import GroupedAttention
from mmtrain.models.megatron.parallel_groups import ParallelGroups
from mmtrain.models.shapes.layer_shape import BLOCK_PIECES, MLP_CHUNK_TOKENS

BlockState = tuple[Tensor, ...]

NORM, QKV, ATTENTION, PROJECTION, NORM_MLP, UP, DOWN, ADD = range(len(BLOCK_PIECES))
_AFTER_GATHER = (QKV, UP)  # before these, forward gathers the normalized tokens, and backward reduces their gradients
_AFTER_REDUCE = (NORM_MLP, ADD)  # before these, forward reduces the partial sums of a row-parallel linear


def run_block(block: Any, hidden: Tensor, packing: PackedSequences) -> Tensor | BlockState:
    """Run all pieces of a `PackedTransformerBlock`: (T, hidden) to (T, hidden), at least one token.

    If later blocks read keys and values of this one, these are a second result.
    """
    state: BlockState = (hidden,)
    kept: BlockState = ()
    with with_token_keys(block.dropping, packing.token_keys):
        for piece, run_piece in enumerate(_PIECES[:UP]):
            state = run_piece(block, packing, *state)
            if piece == ATTENTION and _keeps_kv(block):
                state, kept = state[:-1], state[-1:]
        state = (state[0], _mlp(block, packing, state[1]))
        (out,) = _add(block, packing, *state)
    return (out, *kept) if kept else out


def run_pieces(block: Any, state: BlockState, packing: PackedSequences, pieces: range) -> BlockState:
    """Run consecutive pieces of a `PackedTransformerBlock` on at least one token; the first piece reads (T, hidden).

    The caller communicates the state before the first piece and after the last one: see `start_tp_communication`.
    Behind attention, keys and values that later blocks read are the last tensor of the state.
    """
    kept: BlockState = ()
    if _keeps_kv(block) and pieces.start > ATTENTION:
        state, kept = state[:-1], state[-1:]
    for piece in pieces:
        is_callers = piece == pieces.start if piece in _AFTER_GATHER else piece == pieces.stop - 1
        with (
            _without_communication(_linear(block, piece), is_callers),
            with_token_keys(block.dropping, packing.token_keys),
        ):
            state = _PIECES[piece](block, packing, *state)
        if piece == ATTENTION and _keeps_kv(block):
            state, kept = state[:-1], state[-1:]
    return (*state, *kept)


def _keeps_kv(block: Any) -> bool:
    """Return whether later blocks read keys and values of this one."""
    return isinstance(block.self_attention, GroupedAttention) and block.self_attention.shape.keeps_kv


def start_tp_communication(
    tensor: Tensor, piece: int, groups: ParallelGroups, sequence_parallel: bool, backward: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """Start the communication of the TP group before forward of `piece`, or after its backward.

    Args:
        tensor: the second tensor of the state, after the residual stream, or its gradient; may be overwritten.
        piece: index in `BLOCK_PIECES`.
        groups: the unit's process groups.
        sequence_parallel: whether the ranks shard the tokens between GEMMs.
        backward: whether `tensor` is a gradient.

    Returns:
        The tensor that will hold the result, and the work to wait for before reading it (None: nothing to wait for).
    """
    if groups.tp_size == 1 or piece not in (*_AFTER_GATHER, *_AFTER_REDUCE):
        return tensor, None
    reduces = (piece in _AFTER_REDUCE) != backward
    if not sequence_parallel and not reduces:
        return tensor, None
    tensor = tensor.contiguous()
    if not sequence_parallel:
        return tensor, dist.all_reduce(tensor, group=groups.tp, async_op=True)
    num_rows = len(tensor) // groups.tp_size if reduces else len(tensor) * groups.tp_size
    out = torch.empty(num_rows, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    collective = dist.reduce_scatter_tensor if reduces else dist.all_gather_into_tensor
    return out, collective(out, tensor, group=groups.tp, async_op=True)


def _linear(block: Any, piece: int) -> nn.Module | None:
    """Return the linear of a piece that communicates, or what does so for experts; None for pieces that do not."""
    linears = {
        QKV: block.self_attention.first_linear,
        PROJECTION: block.self_attention.linear_proj,
        UP: block.mlp.gather if isinstance(block.mlp, ExpertMlp) else block.mlp.linear_fc1,
        DOWN: _last_of_mlp(block),
    }
    return linears.get(piece)


def _last_of_mlp(block: Any) -> Any:
    """Return the module of an MLP that sums over the ranks, and that may leave a bias to be added later."""
    return block.mlp.reduction if isinstance(block.mlp, ExpertMlp) else block.mlp.linear_fc2


@contextmanager
def _without_communication(linear: Any, enabled: bool) -> Iterator[None]:
    """Turn off the communication of a linear by a switch that Megatron-core has for experts."""
    if linear is None or not enabled:
        yield
        return
    linear.explicit_expert_comm = True
    try:
        yield
    finally:
        linear.explicit_expert_comm = False


def _norm(block: Any, packing: PackedSequences, hidden: Tensor) -> BlockState:
    hidden = hidden.unsqueeze(1)  # Megatron-core expects (sequence, batch, hidden)
    return hidden, block.input_layernorm(hidden)


def _qkv(block: Any, packing: PackedSequences, hidden: Tensor, x: Tensor) -> BlockState:
    return hidden, *block.self_attention.project(x)


def _attention(block: Any, packing: PackedSequences, hidden: Tensor, *projected: Tensor) -> BlockState:
    return hidden, *block.self_attention.mix(packing, *projected)


def _projection(block: Any, packing: PackedSequences, hidden: Tensor, x: Tensor) -> BlockState:
    return hidden, block.self_attention.linear_proj(x)[0]


def _norm_mlp(block: Any, packing: PackedSequences, hidden: Tensor, x: Tensor) -> BlockState:
    add, norm, bias = block.self_attn_bda, block.pre_mlp_layernorm, block.self_attention.linear_proj.late_bias
    if block.fused_kernels and bias is None and norm.is_plain_rms and not isinstance(add, nn.Module):
        return add_and_rms_norm(x, hidden, norm.weight, norm.eps)
    hidden = add_to_residual(add, (x, bias), hidden)
    return hidden, norm(hidden)


def _mlp(block: Any, packing: PackedSequences, x: Tensor) -> Tensor:
    """Run the pieces from `up` to `down`, in chunks where the block is recomputed and has many tokens.

    A mixture runs in chunks too where a rank gets more rows than it has room for.
    """

    def run(rows: Tensor, routed: RoutedTokens | None = None) -> Tensor:
        return _down(block, packing, *_up(block, packing, rows, rows, routed))[1]

    def run_chunk(rows: Tensor, chunk: slice) -> Tensor:
        # A chunk holds parts of samples.
        routed = block.mlp.route(rows, packing=None) if isinstance(block.mlp, ExpertMlp) else None
        with with_token_keys(block.dropping, _keys_of_chunk(packing.token_keys, chunk, num_ranks)):
            return run(rows, routed)

    num_ranks = _last_of_mlp(block).tp_group.size() if block.config.sequence_parallel else 1
    chunks, losses = _chunks(len(x), num_ranks), None
    if isinstance(block.mlp, ExpertMlp):
        routed = block.mlp.route(x, packing)
        losses = routed.losses
        num_chunks = block.mlp.num_chunks(routed.counts, MLP_CHUNK_TOKENS if block.chunks_mlp else None)
        if num_chunks == 1:
            return run(x, routed)
        chunks = _even_chunks(len(x), num_chunks)
    elif not block.chunks_mlp or not needs_chunks(len(x) * num_ranks):
        return run(x)
    is_mixture = isinstance(block.mlp, ExpertMlp)
    weights = block.mlp.trained if is_mixture else [w for w in block.mlp.parameters() if w.requires_grad]
    is_plain_add = not isinstance(block.mlp_bda, nn.Module)
    out = run_mlp_in_chunks(run_chunk, x, weights, chunks, output_is_read=not is_plain_add)
    return out if losses is None else losses.enter(out)


def _keys_of_chunk(keys: Tensor | None, chunk: slice, num_ranks: int) -> Tensor | None:
    """Return the keys of the tokens that ranks gather of a chunk, of those of all tokens (T,), rank by rank."""
    return None if keys is None else keys.view(num_ranks, -1)[:, chunk].flatten()


def _up(
    block: Any, packing: PackedSequences, hidden: Tensor, x: Tensor, routed: RoutedTokens | None = None
) -> BlockState:
    if not isinstance(block.mlp, ExpertMlp):
        inner = block.mlp.linear_fc1(x)[0]
        return hidden, inner if block.recomputes_activation else _apply_activation(block, inner)
    inner, routing, shared = block.mlp.up(block.mlp.route(x, packing) if routed is None else routed)
    if not block.recomputes_activation:
        inner = _apply_activation(block, inner, routing.weights)
        if block.mlp.shared is not None:
            shared = shared._replace(inner=_apply_activation(block, shared.inner))
    return hidden, inner, *routing.tensors(), *shared


def _down(block: Any, packing: PackedSequences, hidden: Tensor, x: Tensor, *tensors: Tensor) -> BlockState:
    if not isinstance(block.mlp, ExpertMlp):
        return hidden, _run_activated(block, x, lambda activated: block.mlp.linear_fc2(activated)[0])
    num_shared = len(SharedInner._fields)
    routing, shared = Routing.of_tensors(tensors[:-num_shared]), SharedInner(*tensors[-num_shared:])
    outputs = _run_activated(block, x, lambda activated: block.mlp.down(activated, routing), routing.weights)
    if block.mlp.shared is not None:
        gate = shared.gate
        outputs = outputs + _run_activated(block, shared.inner, lambda inner: block.mlp.down_shared(inner, gate))
    return hidden, block.mlp.reduction(outputs)


def _run_activated(block: Any, x: Tensor, run: Callable[[Tensor], Tensor], weights: Tensor | None = None) -> Tensor:
    """Compute `run` of what the activation function made, or makes now where backward makes it again."""
    return _activate_again_in_backward(block, x, run, weights) if block.recomputes_activation else run(x)


def _apply_activation(block: Any, inner: Tensor, weights: Tensor | None = None) -> Tensor:
    """Apply the activation function; `weights` (rows, 1) of experts multiply what it makes."""
    if block.is_gated:
        return activate_gated(inner, block.activation, weights, fused=block.fused_kernels)
    return activate(inner, block.activation)


def _activate_again_in_backward(
    block: Any, inner: Tensor, run: Callable[[Tensor], Tensor], weights: Tensor | None
) -> Tensor:
    """Compute `run`, the MLP's last linear, of the activated `inner`, whose activation autograd does not keep.

    The activation function keeps its input anyway. Whatever else would keep its output, the linear or an adapter on
    it, gets the output computed again.
    """
    activated = _apply_activation(block, inner, weights)
    # Autograd keeps both functions, so neither may refer to the output itself.
    kept, address, num_elements = inner.detach(), activated.data_ptr(), activated.numel()
    kept_weights = None if weights is None else weights.detach()

    def pack(tensor: Tensor) -> Tensor | torch.Size:
        # Empty tensors all have one address.
        is_activated = num_elements > 0 and tensor.data_ptr() == address and tensor.numel() == num_elements
        return tensor.shape if is_activated else tensor

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return _apply_activation(block, kept, kept_weights).view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return run(activated)


def _add(block: Any, packing: PackedSequences, hidden: Tensor, x: Tensor) -> BlockState:
    out = add_to_residual(block.mlp_bda, (x, _last_of_mlp(block).late_bias), hidden).squeeze(1)
    if block.layer_input is not None:
        assert packing.layer_input is not None, "the embedding made one"
        out = block.layer_input(out, packing.layer_input)
    return (out if block.output_scale is None else out * block.output_scale,)


_PIECES: tuple[Callable[..., BlockState], ...] = (_norm, _qkv, _attention, _projection, _norm_mlp, _up, _down, _add)


def needs_chunks(num_tokens: int) -> bool:
    """Return whether an MLP has more tokens than one chunk."""
    return num_tokens > MLP_CHUNK_TOKENS


def run_mlp_in_chunks(
    mlp: Callable[[Tensor, slice], Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    chunks: Sequence[slice],
    *,
    output_is_read: bool,
) -> Tensor:
    """Compute `mlp(x)` with gradients as if at once; what `mlp` keeps is made again in backward, chunk by chunk.

    Args:
        mlp: called with a chunk of x and its slice of the rows; returns as many rows, each computed by itself.
        x: (T, ...) normalized hidden states.
        weights: parameters of `mlp` that train.
        chunks: the rows of each chunk.
        output_is_read: whether something keeps the output for backward. If not, recomputation of the block skips it.
    """
    out: Tensor = _ChunkedMlp.apply(mlp, x, chunks, output_is_read, *weights)  # type: ignore[no-untyped-call]
    return out


class _ChunkedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mlp: Callable[[Tensor, slice], Tensor],
        x: Tensor,
        chunks: Sequence[slice],
        output_is_read: bool,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.mlp, ctx.chunks, ctx.weights = mlp, chunks, weights
        if not output_is_read and _is_recomputed():
            return x.new_empty(1).expand(x.shape)
        out = torch.empty_like(x)
        for rows in chunks:
            out[rows] = mlp(x[rows], rows)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[1]
        x_grad = torch.empty_like(x) if needs_x else None
        weight_grads: list[Tensor | None] = [None] * len(ctx.weights)
        for rows in ctx.chunks:
            x_rows = x[rows].detach().requires_grad_(needs_x)
            with torch.enable_grad():
                out = ctx.mlp(x_rows, rows)
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


def _chunks(num_rows: int, num_ranks: int) -> list[slice]:
    """Return the rows of each chunk; so many ranks gather theirs inside the MLP."""
    size = -(-MLP_CHUNK_TOKENS // num_ranks)
    return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


def _even_chunks(num_rows: int, num_chunks: int) -> list[slice]:
    """Return the rows of so many chunks, of which the last may have none: other ranks may have more rows."""
    size = -(-num_rows // num_chunks)
    bounds = [min(i * size, num_rows) for i in range(num_chunks + 1)]
    return [slice(first, last) for first, last in pairwise(bounds)]


def _added(weight: Tensor, total: Tensor | None, grad: Tensor | None) -> Tensor | None:
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
