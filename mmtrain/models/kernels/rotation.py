"""Rotation of queries and keys by their positions (RoFormer, arXiv 2104.09864)."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmtrain.models.kernels import liger
from mmtrain.models.kernels.rotary_positions import RotaryTables


def rotate_heads(q: Tensor, k: Tensor, rope: RotaryTables, *, fused: bool) -> tuple[Tensor, Tensor]:
    """Rotate queries (T, heads, d) and keys (T, kv heads, d) by their positions; `fused` may write over them."""
    if fused:
        return liger.rotate_heads(q, k, rope)
    return apply_rotary(q, rope), apply_rotary(k, rope)


def apply_rotary(x: Tensor, rope: RotaryTables) -> Tensor:
    """Rotate each pair (x[i], x[i + d/2]) of heads (T, heads, d) by the angle of its position, paired as in Llama."""
    return cast(Tensor, _Rotation.apply(x, *rope))  # type: ignore[no-untyped-call]


class _Rotation(torch.autograd.Function):
    """A rotation, whose gradient is rotated back: three kernels each way, where autograd takes seven or more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, direction=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, direction=-1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Rotate heads (T, heads, d) by angles with these cosines and sines (T, 1, d / 2), or by their negatives."""
    halves = x.view(*x.shape[:-1], 2, x.shape[-1] // 2)
    rotated: Tensor = halves * cos.unsqueeze(-2)
    rotated[..., 0, :].addcmul_(halves[..., 1, :], sin, value=-direction)
    rotated[..., 1, :].addcmul_(halves[..., 0, :], sin, value=direction)
    return rotated.flatten(-2)
