"""RMSNorm (arXiv 1910.07467)."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


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
