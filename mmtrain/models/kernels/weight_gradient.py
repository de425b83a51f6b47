"""Gradients of weights, summed over microbatches in fp32 where Megatron-core's buffers hold them."""

from functools import lru_cache

import torch
from torch import Tensor, nn


def add_weight_gradient(weight: nn.Parameter, out_grad: Tensor, x: Tensor) -> Tensor | None:
    """Add `out_grad.T @ x` to `weight.main_grad` by one GEMM; where that cannot be done, return it for autograd.

    out_grad (T, outputs), x (T, inputs). Autograd would write the product first and add it in a second pass.
    Megatron-core's mark for this, `grad_added_to_main_grad`, stays False: it also drops what autograd brings to the
    same weight from elsewhere. Here autograd has no gradient of this use, and sums those of all others.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        return out_grad.T @ x
    if weight_gradient_problem(x.device, x.dtype) is not None:
        return out_grad.T @ x
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(out_grad.T, x)
    else:
        torch.addmm(main_grad, out_grad.T, x, out_dtype=torch.float32, out=main_grad)
    return None


@lru_cache
def weight_gradient_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no GEMM of matrices in `dtype` can add to a matrix in fp32 here; None if one can."""
    if dtype == torch.float32:
        return None
    if device.type != "cuda":
        return f"no GEMM adds {str(dtype).removeprefix('torch.')} to fp32 on `{device.type}`"
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.full((16, 16), 0.5, device=device)
    try:
        torch.addmm(total, ones.T, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError) as error:
        return f"torch {torch.__version__} cannot add {dtype} to fp32 here: {error}"
    return None if bool((total == 16.5).all()) else f"torch {torch.__version__} adds {dtype} to fp32 wrongly here"
