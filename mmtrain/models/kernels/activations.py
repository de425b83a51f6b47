"""Activations of MLPs, plain and gated."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmtrain.models.kernels import liger
from mmtrain.recipe.settings.encoder_settings import Activation

_QUICK_GELU_SCALE = 1.702


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply an activation to each element; `quick_gelu` is CLIP's approximation of GELU, `x * sigmoid(1.702 x)`."""
    if activation == "quick_gelu":
        return cast(Tensor, _QuickGelu.apply(x))  # type: ignore[no-untyped-call]
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate=_approximation(activation))


def activate_gated(inner: Tensor, activation: Activation, *, fused: bool) -> Tensor:
    """Multiply the values of a gated MLP by their activated gates: (..., 2 * ffn), gates first, to (..., ffn)."""
    if fused and activation == "silu":
        return liger.multiply_by_silu(inner)
    return cast(Tensor, _Gated.apply(inner, activation))  # type: ignore[no-untyped-call]


class _QuickGelu(torch.autograd.Function):
    """SiLU of the scaled input, scaled back. Autograd would keep the sigmoid and two products beside the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _plain(x, "quick_gelu")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _gradient(grad, x, "quick_gelu")


class _Gated(torch.autograd.Function):
    """A gated activation that keeps its input only and activates the gates again in backward.

    Backward is where a block needs most memory, so all its steps write into the gradient that it returns.
    """

    @staticmethod
    def forward(ctx: Any, inner: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(inner)
        ctx.activation = activation
        gates, values = inner.chunk(2, dim=-1)
        return _plain(gates, activation).mul_(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (inner,) = ctx.saved_tensors
        gates, values = inner.chunk(2, dim=-1)
        inner_grad = torch.empty_like(inner)
        gates_grad, values_grad = inner_grad.chunk(2, dim=-1)
        _plain(gates, ctx.activation, out=values_grad).mul_(grad)
        torch.mul(grad, values, out=gates_grad)
        _gradient(gates_grad, gates, ctx.activation, out=gates_grad)
        return inner_grad, None


def _plain(x: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
    """Return the activation of each element, in a new tensor or in `out`, without a backward of its own."""
    out = torch.empty_like(x) if out is None else out
    match activation:
        case "silu":
            torch.ops.aten.silu.out(x, out=out)
        case "quick_gelu":
            torch.mul(x, _QUICK_GELU_SCALE, out=out)
            F.silu(out, inplace=True).mul_(1 / _QUICK_GELU_SCALE)
        case _:
            torch.ops.aten.gelu.out(x, approximate=_approximation(activation), out=out)
    return out


def _gradient(grad: Tensor, x: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
    """Return the gradient at x of a loss whose gradient at the activation of x is `grad`; into `out` if it is given.

    `out` may be `grad` itself.
    """
    out = torch.empty_like(x) if out is None else out
    match activation:
        case "silu":
            torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out)
        case "quick_gelu":  # the scales before and behind the SiLU cancel in the chain rule
            scaled = x * _QUICK_GELU_SCALE if out is grad else torch.mul(x, _QUICK_GELU_SCALE, out=out)
            torch.ops.aten.silu_backward.grad_input(grad, scaled, grad_input=out)
        case _:
            torch.ops.aten.gelu_backward.grad_input(grad, x, approximate=_approximation(activation), grad_input=out)
    return out


def _approximation(activation: Activation) -> str:
    """Return how torch's GELU is to compute an activation."""
    return "tanh" if activation == "gelu_tanh" else "none"
