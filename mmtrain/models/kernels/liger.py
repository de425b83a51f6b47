"""Fused forms: kernels of liger-kernel (arXiv 2410.10989), written in Triton.

Each wrapper takes what the form in torch takes. The package is imported where it is used: it needs Triton, which has no
use without a GPU.
"""

import importlib
from functools import lru_cache

import torch
from torch import Tensor

from mmtrain.models.kernels.rotary_positions import RotaryTables

_FUNCTIONS = {
    "rope": "LigerRopeFunction",
    "swiglu": "LigerFusedGateUpSiLUMulFunction",
    "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
}


def fused_problem(device: torch.device) -> str | None:
    """Return why the fused forms cannot run here; None if they can."""
    if device.type != "cuda":
        return f"they need a CUDA device, and this run uses `{device.type}`"
    return _import_problem()


@lru_cache
def _import_problem() -> str | None:
    """Return why a function that we call cannot be imported; a package may be there without it."""
    try:
        for module, function in _FUNCTIONS.items():
            getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function)
    except (ImportError, AttributeError) as error:
        return f"liger-kernel cannot be used (pip install 'mmtrain[cuda]'): {error}"
    return None


def rotate_heads(q: Tensor, k: Tensor, rope: RotaryTables) -> tuple[Tensor, Tensor]:
    """Rotate queries (T, heads, d) and keys (T, kv heads, d) by one kernel.

    It writes over contiguous inputs: nothing else may read them later, in backward either.
    """
    from liger_kernel.ops.rope import LigerRopeFunction

    cos, sin = (table.squeeze(1) for table in rope)
    heads = (x.unsqueeze(0).transpose(1, 2) for x in (q, k))  # (1, heads, T, d)
    rotated = LigerRopeFunction.apply(*heads, cos, sin, None, 1, q.shape[-1])
    rotated_q, rotated_k = (x.transpose(1, 2).squeeze(0) for x in rotated)
    return rotated_q, rotated_k


def multiply_by_silu(inner: Tensor) -> Tensor:
    """Multiply the values of a gated MLP by the SiLU of their gates: (..., 2 * ffn), gates first, to (..., ffn)."""
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    # Its backward returns rows, whatever its forward got.
    out: Tensor = LigerFusedGateUpSiLUMulFunction.apply(inner.flatten(0, -2))
    return out.view(*inner.shape[:-1], -1)


def add_and_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x + residual` and its RMSNorm, computed in fp32 as in torch; all (..., hidden)."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    normed, total = LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, 0.0, "gemma", False)
    return total, normed
