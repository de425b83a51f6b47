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
    return _trial_problem(device)


@lru_cache
def _trial_problem(device: torch.device) -> str | None:
    """Return why a small grouped GEMM fails here; None if it gives the right numbers."""
    try:
        rows, weights = (torch.ones(shape, device=device, dtype=torch.bfloat16) for shape in ((16, 16), (2, 16, 16)))
        out = _grouped_mm(rows, weights, torch.tensor([4, 16], device=device, dtype=torch.int32))
    except (RuntimeError, TypeError, AttributeError) as error:
        return f"torch {torch.__version__} has none here: {error}"
    return None if bool((out == 16).all()) else f"torch {torch.__version__} computes it wrongly here"


def grouped_linear(rows: Tensor, weights: Sequence[nn.Parameter], sizes: Sequence[int]) -> Tensor:
    """Compute (rows, outputs) of (rows, inputs), of which each weight (outputs, inputs) takes the next of `sizes`.

    Forward and gradients of rows are one GEMM each, over copies of the weights that lie side by side. Gradients of
    weights are one GEMM for each, which adds to the optimizer's sum in fp32 where it can: see `add_weight_gradient`.
    """
    return cast(Tensor, _GroupedLinear.apply(rows, tuple(sizes), *weights))  # type: ignore[no-untyped-call]


def takes_grouped_gemm(rows: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether linears of these sizes can be one grouped GEMM: there are rows, and widths suit the kernel."""
    return len(rows) > 0 and all(side * rows.element_size() % _ROW_BYTES == 0 for side in weights[0].shape)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...], *weights: nn.Parameter) -> Tensor:
        needs_weights = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(rows if needs_weights else None, *weights)
        ctx.sizes = sizes
        return _grouped_mm(rows, torch.stack(weights).transpose(1, 2), _ends(sizes, rows.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        needs_rows, _, *need_weights = ctx.needs_input_grad
        out_grad = out_grad.contiguous()
        rows_grad = None
        if needs_rows:
            rows_grad = _grouped_mm(out_grad, torch.stack(weights), _ends(ctx.sizes, out_grad.device))
        weight_grads: list[Tensor | None] = [None] * len(weights)
        if any(need_weights):
            parts = zip(weights, torch.split(out_grad, ctx.sizes), torch.split(rows, ctx.sizes), strict=True)
            weight_grads = [
                add_weight_gradient(weight, grad, x) if needed else None
                for needed, (weight, grad, x) in zip(need_weights, parts, strict=True)
            ]
        return rows_grad, None, *weight_grads


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return where the rows of each weight end, (weights,) int32."""
    return torch.tensor(sizes).cumsum(0).to(device, torch.int32)


def _grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows (T, k) by weights (experts, k, n). Newer versions of torch export it."""
    named: Callable[..., Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return named(rows, weights, offs=ends)
