"""Sinusoidal features of timesteps and of positions, as `diffusers` computes them."""

import math
from functools import lru_cache

import torch
from torch import Tensor

_MAX_PERIOD = 10_000.0
_NUM_KEPT_TABLES = 64  # position tables by image size: a bucketed data set has a few dozen sizes


def timestep_features(timesteps: Tensor, width: int) -> Tensor:
    """Return cosines, then sines, of timesteps (images,), whole or not: (images, width) in fp32; `width` is even."""
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
    angles = timesteps.float()[:, None] * torch.exp(-math.log(_MAX_PERIOD) * exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@lru_cache(maxsize=_NUM_KEPT_TABLES)
def position_table(
    rows: int, cols: int, stretched_side: float, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the positions of an image's patches, row by row: (rows * cols, width).

    The first half of the features is of the column, the second of the row: sines, then cosines. Both sides of an image
    of any size are stretched to `stretched_side`, as in `diffusers`' PixArt. The device computes them: a copy from the
    host would make it wait at every size that is new.
    """
    column = torch.arange(cols, dtype=torch.float32, device=device) / (cols / stretched_side)
    row = torch.arange(rows, dtype=torch.float32, device=device) / (rows / stretched_side)
    by_column = _sines_and_cosines(column, width // 2).repeat(rows, 1)
    by_row = _sines_and_cosines(row, width // 2).repeat_interleave(cols, dim=0)
    return torch.cat((by_column, by_row), dim=1).to(dtype)


def _sines_and_cosines(positions: Tensor, width: int) -> Tensor:
    half = width // 2
    frequencies = _MAX_PERIOD ** -(torch.arange(half, dtype=torch.float64, device=positions.device) / half)
    angles = torch.outer(positions.double(), frequencies)
    return torch.cat((angles.sin(), angles.cos()), dim=1)
