"""Rotary positions (RoFormer, arXiv 2104.09864): tables of the cosines and sines of packed tokens."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mmtrain.models.kernels.rotary_scaling import rotary_amplitude, scale_frequencies
from mmtrain.recipe.settings.llm_settings import RopeScalingSettings

RotaryTables = tuple[Tensor, Tensor]  # cosines and sines, each (T, 1, d / 2)
_FEWEST_ROWS = 4096  # of a table of positions; longer ones have a power of two, so that a run makes few


class Rotation(NamedTuple):
    """How fast the pairs of a head's features turn from one position to the next."""

    width: int  # features that are rotated
    base: float
    scaling: RopeScalingSettings | None = None


def look_up_rotations(positions: Tensor, num_positions: int, rotation: Rotation, dtype: torch.dtype) -> RotaryTables:
    """Return cosines and sines of positions (T,) below `num_positions`, from tables that stay on their device.

    The first call for a rotation, or for far positions, makes the device wait for a new table.
    """
    num_rows = max(_FEWEST_ROWS, 1 << max(num_positions - 1, 0).bit_length())
    cos, sin = _table_of_positions(num_rows, rotation, dtype, positions.device)
    return cos.index_select(0, positions).unsqueeze(1), sin.index_select(0, positions).unsqueeze(1)


@lru_cache(maxsize=16)
def _table_of_positions(num_rows: int, rotation: Rotation, dtype: torch.dtype, device: torch.device) -> RotaryTables:
    """Compute cosines and sines of all positions below `num_rows`, each (num_rows, width / 2)."""
    angles = torch.outer(torch.arange(num_rows, dtype=torch.float32), rotary_frequencies(*rotation))
    amplitude = rotary_amplitude(rotation.scaling)
    return (amplitude * torch.cos(angles)).to(device, dtype), (amplitude * torch.sin(angles)).to(device, dtype)


def rotary_frequencies(width: int, base: float, scaling: RopeScalingSettings | None = None) -> Tensor:
    """Return the angles per position, (width / 2,), by which rotary positions rotate the pairs of `width` features."""
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    return frequencies if scaling is None else scale_frequencies(frequencies, base, scaling)


def rotate_by_axes(positions: Tensor, axes: tuple[int, ...], rotation: Rotation, dtype: torch.dtype) -> RotaryTables:
    """Compute cosines and sines of tokens with positions (axes, T) along several axes, such as row and column.

    `axes[i]` is the axis that rotates pair i of a head.
    """
    axis_of_pair, frequencies = _constants_of_pairs(axes, rotation, positions.device)
    angles = (positions.index_select(0, axis_of_pair).T.float() * frequencies).unsqueeze(1)
    amplitude = rotary_amplitude(rotation.scaling)
    return (amplitude * torch.cos(angles)).to(dtype), (amplitude * torch.sin(angles)).to(dtype)


@lru_cache(maxsize=16)
def _constants_of_pairs(axes: tuple[int, ...], rotation: Rotation, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return on the device the axis that rotates each pair of a head, and the angle of each pair per position."""
    return torch.tensor(axes).to(device), rotary_frequencies(*rotation).to(device)
