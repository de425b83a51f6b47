"""What a block computes element by element, in one kernel each.

Activations of MLPs (plain and gated), the rotation of queries and keys by their positions (RoFormer, arXiv 2104.09864)
and RMSNorm (arXiv 1910.07467).
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmtrain.models.kernels import liger
from mmtrain.models.kernels.rotary_positions import RotaryTables
from mmtrain.recipe.settings.encoder_settings import Activation

_QUICK_GELU_SCALE = 1.702


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply an activation to each element; `quick_gelu` is CLIP's approximation of GELU, `x * sigmoid(1.702 x)`."""
    if activation == "quick_gelu":
        return cast(Tensor, _QuickGelu.apply(x))  # type: ignore[no-untyped-call]
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate=_approximation(activation))


def activate_gated(inner: Tensor, activation: Activation, weights: Tensor | None = None, *, fused: bool) -> Tensor:
    """Multiply the values of a gated MLP by their activated gates: (..., 2 * ffn), gates first, to (..., ffn).

    weights: (rows, 1) in fp32, which multiply the products of rows (rows, 2 * ffn).
    """
    if fused and activation == "silu":
        if weights is not None:
            return cast(Tensor, _WeightedSilu.apply(inner, weights))  # type: ignore[no-untyped-call]
        return liger.multiply_by_silu(inner)
    return cast(Tensor, _Gated.apply(inner, activation, weights))  # type: ignore[no-untyped-call]


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
    def forward(ctx: Any, inner: Tensor, activation: Activation, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(inner, weights)
        ctx.activation = activation
        gates, values = inner.chunk(2, dim=-1)
        out = _plain(gates, activation).mul_(values)
        return out if weights is None else out.mul_(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:
        inner, weights = ctx.saved_tensors
        gates, values = inner.chunk(2, dim=-1)
        inner_grad = torch.empty_like(inner)
        gates_grad, values_grad = inner_grad.chunk(2, dim=-1)
        _plain(gates, ctx.activation, out=values_grad)
        weights_grad: Tensor | None = None
        if weights is not None:
            weights_grad = _row_products(torch.mul(values_grad, values, out=gates_grad), grad).to(weights.dtype)
        values_grad.mul_(grad)
        torch.mul(grad, values, out=gates_grad)
        if weights is not None:
            inner_grad.mul_(weights)
        _gradient(gates_grad, gates, ctx.activation, out=gates_grad)
        return inner_grad, None, weights_grad


class _WeightedSilu(torch.autograd.Function):
    """The fused gated SiLU, whose products are multiplied by a weight of their row; backward computes them again."""

    @staticmethod
    def forward(ctx: Any, inner: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(inner, weights)
        return liger.multiply_by_silu(inner).mul_(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        inner, weights = ctx.saved_tensors
        inner = inner.detach().requires_grad_()
        with torch.enable_grad():
            activated = liger.multiply_by_silu(inner)
        weights_grad = _row_products(activated.detach(), grad).to(weights.dtype)
        products_grad = torch.mul(grad, weights, out=torch.empty_like(grad))
        (inner_grad,) = torch.autograd.grad(activated, inner, products_grad)
        return inner_grad, weights_grad


def _row_products(rows: Tensor, others: Tensor) -> Tensor:
    """Return the inner product of each of (rows, width) with its counterpart, as (rows, 1)."""
    return torch.bmm(rows.unsqueeze(1), others.unsqueeze(2)).squeeze(2)


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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide the last dimension by its root mean square, computed in fp32, and multiply it by `weight`."""
    if x.device.type != "cpu":
        return F.rms_norm(x, weight.shape, weight, eps)  # one kernel each way
    return cast(Tensor, _RmsNorm.apply(x, weight, eps))  # type: ignore[no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    """RMSNorm for CPUs, where torch computes it and its gradient by about twenty elementary operations.

    Its sums over features and over tokens are products of a matrix and a vector, the fastest sums that a CPU has.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        precision = torch.promote_types(x.dtype, torch.float32)
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precision)
        factor = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, factor)
        return (x * factor).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, factor = ctx.saved_tensors
        width = x.shape[-1]
        rows, row_grads = (t.reshape(-1, width).to(factor.dtype) for t in (x, grad))
        row_factors, weights = factor.view(-1, 1), weight.to(factor.dtype)
        products = row_grads * rows
        weight_grad: Tensor | None = None
        if ctx.needs_input_grad[1]:
            weight_grad = torch.mv(products.T, row_factors[:, 0]).to(weight.dtype)
        # Of d(x_i * f * w_i): the factor f depends on every x_j of the row, with df/dx_j = -f^3 x_j / width.
        shares = torch.mv(products, weights)[:, None].mul_(row_factors.pow(3)).div_(width)
        x_grad = (row_grads * weights).mul_(row_factors).addcmul_(rows, shares, value=-1)
        return x_grad.to(x.dtype).view_as(x), weight_grad, None
