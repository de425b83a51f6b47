"""Muon's update of a matrix: its momentum, orthogonalized by Newton-Schulz iterations (Jordan et al. 2024).

The iterations are those of torch.optim.Muon, and of `emerging-optimizers` with coefficients `simple`; the scale is
`match_rms_adamw` of the former (Liu et al., arXiv 2502.16982), so that learning rates and decays of AdamW stay.
"""

import math

import torch
from torch import Tensor

from mmtrain.models.shapes.weight_matrices import WeightMatrices

NEWTON_SCHULZ_STEPS = 5
# Of x, x^3 and x^5, by which an iteration maps singular values: they end between 0.7 and 1.2.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
UPDATE_RMS = 0.2  # root mean square of an update's elements, as AdamW has it
_SMALLEST_NORM = 1e-7  # by which a matrix is divided: one of zeros stays zero


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return (rows, columns) with the singular vectors of a matrix and singular values near 1, in its type."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    norm = torch.linalg.vector_norm(wide, dtype=torch.float32).clamp(min=_SMALLEST_NORM)
    wide = (wide / norm).to(matrix.dtype)
    linear, cubic, quintic = NEWTON_SCHULZ_COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.T
        factor = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
        wide = torch.addmm(wide, factor, wide, beta=linear)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


def orthogonal_update(weight: Tensor, matrices: WeightMatrices) -> Tensor:
    """Orthogonalize each matrix of a weight (outputs, inputs) apart; scale it to an RMS of `UPDATE_RMS`."""
    blocks = weight.view(matrices.groups, -1, matrices.inputs)
    updates = []
    for part, width in zip(torch.split(blocks, list(matrices.widths), dim=1), matrices.widths, strict=True):
        matrix = part.reshape(-1, matrices.inputs)
        update = orthogonalize(matrix) * (UPDATE_RMS * math.sqrt(max(matrix.shape)))
        updates.append(update.reshape(matrices.groups, width, matrices.inputs))
    return torch.cat(updates, dim=1).view(weight.shape)
