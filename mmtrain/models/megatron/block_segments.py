"""A transformer block in pieces (`models.layer_shape.BLOCK_PIECES`), so that other work can run between them.

A state of tensors flows from piece to piece: first the residual stream, then what the next piece reads. If a run of
pieces starts or ends where tensor parallelism communicates (see `costs.block_pieces`), that communication is left to
the caller, who can overlap it with other work. Inside a run Megatron-core communicates by itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmtrain.models.attention.packed_sequences import PackedSequences
from mmtrain.models.kernels.activations import activate, activate_gated
from mmtrain.models.kernels.liger import add_and_rms_norm
from mmtrain.models.megatron.block_parts import add_to_residual
from mmtrain.models.megatron.chunked_mlp import needs_chunks, run_mlp_in_chunks
from mmtrain.models.megatron.parallel_groups import ParallelGroups
from mmtrain.models.shapes.layer_shape import BLOCK_PIECES

BlockState = tuple[Tensor, ...]

NORM, QKV, ATTENTION, PROJECTION, NORM_MLP, UP, DOWN, ADD = range(len(BLOCK_PIECES))
_AFTER_GATHER = (QKV, UP)  # before these, forward gathers the normalized tokens, and backward reduces their gradients
_AFTER_REDUCE = (NORM_MLP, ADD)  # before these, forward reduces the partial sums of a row-parallel linear


def run_block(block: Any, hidden: Tensor, packing: PackedSequences) -> Tensor:
    """Run all pieces of a `PackedTransformerBlock`: (T, hidden) to (T, hidden), at least one token."""
    state: BlockState = (hidden,)
    for run_piece in _PIECES[:UP]:
        state = run_piece(block, packing, *state)
    state = (state[0], _mlp(block, packing, state[1]))
    return _add(block, packing, *state)[0]


def run_pieces(block: Any, state: BlockState, packing: PackedSequences, pieces: range) -> BlockState:
    """Run consecutive pieces of a `PackedTransformerBlock` on at least one token; the first piece reads (T, hidden).

    The caller communicates the state before the first piece and after the last one: see `start_tp_communication`.
    """
    for piece in pieces:
        is_callers = piece == pieces.start if piece in _AFTER_GATHER else piece == pieces.stop - 1
        with _without_communication(_linear(block, piece), is_callers):
            state = _PIECES[piece](block, packing, *state)
    return state


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
    """Return the linear of a piece that communicates; None for pieces that do not."""
    linears = {
        QKV: block.self_attention.linear_qkv,
        PROJECTION: block.self_attention.linear_proj,
        UP: block.mlp.linear_fc1,
        DOWN: block.mlp.linear_fc2,
    }
    return linears.get(piece)


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
    q, k, v = block.self_attention.get_query_key_value_tensors(x)
    return hidden, q, k, v


def _attention(block: Any, packing: PackedSequences, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor) -> BlockState:
    core = block.self_attention.core_attention
    out = core(q.squeeze(1), k.squeeze(1), v.squeeze(1), None, packed_seq_params=packing)
    return hidden, out.reshape(len(out), 1, -1)


def _projection(block: Any, packing: PackedSequences, hidden: Tensor, x: Tensor) -> BlockState:
    return hidden, block.self_attention.linear_proj(x)[0]


def _norm_mlp(block: Any, packing: PackedSequences, hidden: Tensor, x: Tensor) -> BlockState:
    add, norm, bias = block.self_attn_bda, block.pre_mlp_layernorm, block.self_attention.linear_proj.late_bias
    if block.fused_kernels and bias is None and norm.is_plain_rms and not isinstance(add, nn.Module):
        return add_and_rms_norm(x, hidden, norm.weight, norm.eps)
    hidden = add_to_residual(add, (x, bias), hidden)
    return hidden, norm(hidden)


def _mlp(block: Any, packing: PackedSequences, x: Tensor) -> Tensor:
    """Run the pieces from `up` to `down`, in chunks where the block is recomputed and has many tokens."""

    def run(rows: Tensor) -> Tensor:
        return _down(block, packing, *_up(block, packing, rows, rows))[1]

    num_ranks = block.mlp.linear_fc1.tp_group.size() if block.config.sequence_parallel else 1
    if not block.chunks_mlp or not needs_chunks(len(x) * num_ranks):
        return run(x)
    weights = [weight for weight in block.mlp.parameters() if weight.requires_grad]
    is_plain_add = not isinstance(block.mlp_bda, nn.Module)
    return run_mlp_in_chunks(run, x, weights, num_ranks, output_is_read=not is_plain_add)


def _up(block: Any, packing: PackedSequences, hidden: Tensor, x: Tensor) -> BlockState:
    inner = block.mlp.linear_fc1(x)[0]
    if block.recomputes_activation:
        return hidden, inner
    return hidden, _apply_activation(block, inner)


def _down(block: Any, packing: PackedSequences, hidden: Tensor, x: Tensor) -> BlockState:
    if block.recomputes_activation:
        return hidden, _activate_again_in_backward(block, x)
    return hidden, block.mlp.linear_fc2(x)[0]


def _apply_activation(block: Any, inner: Tensor) -> Tensor:
    if block.is_gated:
        return activate_gated(inner, block.activation, fused=block.fused_kernels)
    return activate(inner, block.activation)


def _activate_again_in_backward(block: Any, inner: Tensor) -> Tensor:
    """Compute the MLP's last linear of the activated `inner`, whose activation autograd does not keep.

    The activation function keeps its input anyway. Whatever else would keep its output, the linear or an adapter on
    it, gets the output computed again.
    """
    activated = _apply_activation(block, inner)
    # Autograd keeps both functions, so neither may refer to the output itself.
    kept, address, num_elements = inner.detach(), activated.data_ptr(), activated.numel()

    def pack(tensor: Tensor) -> Tensor | torch.Size:
        is_activated = tensor.data_ptr() == address and tensor.numel() == num_elements
        return tensor.shape if is_activated else tensor

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return _apply_activation(block, kept).view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out: Tensor = block.mlp.linear_fc2(activated)[0]
    return out


def _add(block: Any, packing: PackedSequences, hidden: Tensor, x: Tensor) -> BlockState:
    return (add_to_residual(block.mlp_bda, (x, block.mlp.linear_fc2.late_bias), hidden).squeeze(1),)


_PIECES: tuple[Callable[..., BlockState], ...] = (_norm, _qkv, _attention, _projection, _norm_mlp, _up, _down, _add)
