"""Linears of the experts of a mixture, each on its own rows: by one GEMM after another, or by one grouped GEMM."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mmtrain.models.kernels.weight_gradient import add_weight_gradient

_ROW_BYTES = 16  # the kernel reads rows of whole multiples of these


def grouped_gemm_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no grouped GEMM is used here; None if one is."""
    if device.type != "cuda":
        return f"on `{device.type}` torch has no faster kernel for it"
    if dtype != torch.bfloat16:
        return f"it takes bfloat16 alone, found {str(dtype).removeprefix('torch.')}"
    return _kernel_problem(device)


@lru_cache
def _kernel_problem(device: torch.device) -> str | None:
    """Return why a small grouped GEMM fails here; None if it gives the right numbers."""
    try:
        rows, weights = (torch.ones(shape, device=device, dtype=torch.bfloat16) for shape in ((16, 16), (2, 16, 16)))
        out = _grouped_mm(rows, weights, torch.tensor([4, 16], device=device, dtype=torch.int32))
    except (RuntimeError, TypeError, AttributeError) as error:
        return f"torch {torch.__version__} has none here: {error}"
    return None if bool((out == 16).all()) else f"torch {torch.__version__} computes it wrongly here"


def expert_linear(rows: Tensor, weights: Sequence[nn.Parameter], sizes: list[int]) -> Tensor:
    """Compute (rows, outputs) of (rows, inputs), of which each weight (outputs, inputs) takes the next of `sizes`.

    Where one is used, a grouped GEMM makes the outputs, and one the gradients of rows, over copies of the weights side
    by side. Else each weight's GEMM writes where its rows are, so that parts never lie beside the whole. Gradients of
    weights are one GEMM each, which adds to the optimizer's sum in fp32 where it can: see `add_weight_gradient`.
    """
    return cast(Tensor, _ExpertLinear.apply(rows, sizes, *weights))  # type: ignore[no-untyped-call]


class _ExpertLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], *weights: nn.Parameter) -> Tensor:
        needs_weights = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(rows if needs_weights else None)
        # Not saved by autograd: in a block that is recomputed it gives back others, without the optimizer's sums.
        ctx.weights, ctx.sizes = weights, sizes
        return _multiplied(rows, [weight.T for weight in weights], sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        weights = ctx.weights
        needs_rows, _, *need_weights = ctx.needs_input_grad
        out_grad = out_grad.contiguous()
        rows_grad = _multiplied(out_grad, weights, ctx.sizes) if needs_rows else None
        weight_grads: list[Tensor | None] = [None] * len(weights)
        if any(need_weights):
            parts = zip(weights, torch.split(out_grad, ctx.sizes), torch.split(rows, ctx.sizes), strict=True)
            weight_grads = [
                _summed(weight, grad, x) if needed else None
                for needed, (weight, grad, x) in zip(need_weights, parts, strict=True)
            ]
        return rows_grad, None, *weight_grads


def _summed(weight: nn.Parameter, out_grad: Tensor, x: Tensor) -> Tensor | None:
    """Add a weight's gradient to the optimizer's sum, if there is one, else return it.

    Where a GEMM cannot add it, it is added here: returned to autograd, those of all experts would exist together.
    """
    gradient = add_weight_gradient(weight, out_grad, x)
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if gradient is None or main_grad is None:
        return gradient
    main_grad.add_(gradient)
    return None


def _multiplied(rows: Tensor, matrices: Sequence[Tensor], sizes: list[int]) -> Tensor:
    """Multiply rows (T, k), the next of `sizes` with each of the matrices (k, n)."""
    k, n = matrices[0].shape
    suits_kernel = len(rows) > 0 and k * rows.element_size() % _ROW_BYTES == n * rows.element_size() % _ROW_BYTES == 0
    if suits_kernel and grouped_gemm_problem(rows.device, rows.dtype) is None:
        return _grouped_mm(rows, torch.stack(list(matrices)), _ends(sizes, rows.device))
    out = rows.new_empty(len(rows), n)
    parts = zip(torch.split(rows, sizes), matrices, torch.split(out, sizes), strict=True)
    for part, matrix, of_part in parts:
        torch.mm(part, matrix, out=of_part)
    return out


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return where the rows of each weight end, (weights,) int32."""
    return torch.tensor(sizes).cumsum(0).to(device, torch.int32)


def _grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows (T, k) by weights (experts, k, n). Newer versions of torch export it."""
    named: Callable[..., Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return named(rows, weights, offs=ends)
