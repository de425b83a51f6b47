"""What the update of a step needs to know of the gradient norm, as tensors that the host never reads.

A host that reads the norm waits until the device has caught up, and launches the update only then.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Elements whose squares are summed at once: torch makes a copy of them in float64, 128 MiB.
NORM_CHUNK_ELEMENTS = 2**24


class ClipFactors(NamedTuple):
    """How the fused AdamW treats the gradients of a step; scalars in fp32 on the device of the norm."""

    divisor: Tensor | None  # of all gradients; None if nothing clips
    skip: Tensor  # 1 if no weight may change, else 0


def sum_of_squares(gradient: Tensor) -> Tensor:
    """Return the sum of the squares of a gradient: a scalar in float64 on its device."""
    total = torch.zeros((), dtype=torch.float64, device=gradient.device)
    for part in torch.split(gradient.flatten(), NORM_CHUNK_ELEMENTS):
        total += torch.linalg.vector_norm(part, dtype=torch.float64).square()
    return total


def clip_factors(norm: Tensor, limit: float | None) -> ClipFactors:
    """Return the factors for gradients with the global `norm` (scalar, float64).

    limit: the norm that gradients are clipped to; None does not clip. Nothing is updated if the norm is not finite.
    """
    divisor = None if limit is None else (norm / limit).clamp(min=1.0).float()
    return ClipFactors(divisor, (~(norm < math.inf)).float())  # neither infinite nor NaN is less


def set_clip_factors(adam: torch.optim.Optimizer, clip: ClipFactors) -> None:
    """Let the next `step` of a fused AdamW divide by, and obey, `clip`, as it does what a loss scaler finds."""
    fused: Any = adam
    fused.grad_scale, fused.found_inf = clip
