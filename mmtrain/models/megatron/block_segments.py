"""A transformer block in pieces (`models.shape.BLOCK_PIECES`), so that other work can run between them.

Between two pieces flows a state of tensors: first the residual stream, then what the next piece reads. A run of pieces
that begins, or ends, where tensor parallelism communicates (see `costs.pieces`) leaves that communication to its
caller, who can let it go on beside something else; inside a run it is Megatron-core's own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmtrain.models.attention import PackedSequences
from mmtrain.models.layer_shape import BLOCK_PIECES
from mmtrain.models.megatron.parallel_groups import ParallelGroups

BlockState = tuple[Tensor, ...]

NORM, QKV, ATTENTION, PROJECTION, NORM_MLP, UP, DOWN, ADD = range(len(BLOCK_PIECES))
_ENTERED = (QKV, UP)  # pieces before which ranks join what each normalised, and sum up the gradients of it
_LEFT = (NORM_MLP, ADD)  # pieces before which they sum up what each multiplied


def run_pieces(block: Any, state: BlockState, packing: PackedSequences, pieces: range) -> BlockState:
    """Run consecutive pieces of a block (`parts.Block`) on at least one token; the first starts from (T, hidden).

    What they begin with must have been communicated, and what they end with must be: see `start_tp_communication`.
    """
    for piece in pieces:
        alone = piece == pieces.start if piece in _ENTERED else piece == pieces.stop - 1
        with _without_communication(_linear(block, piece), alone):
            state = _PIECES[piece](block, packing, *state)
    return state


def start_tp_communication(
    tensor: Tensor, before: int, groups: ParallelGroups, sliced: bool, backward: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """Begin what the ranks of a TP group exchange before piece `before`, or behind its backward.

    tensor: the state's second, behind the residual stream, or its gradient; may be overwritten. sliced: with sequence
    parallelism. Returns what becomes of it, and what must be waited for before it is read.
    """
    if groups.tp_size == 1 or before not in (*_ENTERED, *_LEFT):
        return tensor, None
    reduces = (before in _LEFT) != backward
    if not sliced and not reduces:
        return tensor, None
    tensor = tensor.contiguous()
    if not sliced:
        return tensor, dist.all_reduce(tensor, group=groups.tp, async_op=True)
    rows = len(tensor) // groups.tp_size if reduces else len(tensor) * groups.tp_size
    out = torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    collective = dist.reduce_scatter_tensor if reduces else dist.all_gather_into_tensor
    return out, collective(out, tensor, group=groups.tp, async_op=True)


def _linear(block: Any, piece: int) -> nn.Module | None:
    """The product of a piece around which ranks communicate."""
    attention, mlp = block.self_attention, block.mlp
    return {QKV: attention.linear_qkv, PROJECTION: attention.linear_proj, UP: mlp.linear_fc1, DOWN: mlp.linear_fc2}.get(
        piece
    )


@contextmanager
def _without_communication(linear: Any, wanted: bool) -> Iterator[None]:
    """Megatron-core's switch for products whose caller communicates, which it has for experts."""
    if linear is None or not wanted:
        yield
        return
    linear.explicit_expert_comm = True
    try:
        yield
    finally:
        linear.explicit_expert_comm = False


def _norm(block: Any, packing: PackedSequences, hidden: Tensor) -> BlockState:
    hidden = hidden.unsqueeze(1)  # Megatron-core wants (sequence, batch, hidden)
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
    bias = block.self_attention.linear_proj.bias
    hidden = hidden + (x if bias is None else x + bias)
    return hidden, block.pre_mlp_layernorm(hidden)


def _up(block: Any, packing: PackedSequences, hidden: Tensor, x: Tensor) -> BlockState:
    mlp = block.mlp
    inner, bias = mlp.linear_fc1(x)
    if bias is not None:
        inner = inner + bias
    if not mlp.config.gated_linear_unit:
        return hidden, mlp.activation_func(inner)
    gate, values = inner.chunk(2, dim=-1)
    return hidden, mlp.activation_func(gate) * values


def _down(block: Any, packing: PackedSequences, hidden: Tensor, x: Tensor) -> BlockState:
    return hidden, block.mlp.linear_fc2(x)[0]


def _add(block: Any, packing: PackedSequences, hidden: Tensor, x: Tensor) -> BlockState:
    bias = block.mlp.linear_fc2.bias
    return ((hidden + (x if bias is None else x + bias)).squeeze(1),)


_PIECES: tuple[Callable[..., BlockState], ...] = (_norm, _qkv, _attention, _projection, _norm_mlp, _up, _down, _add)
