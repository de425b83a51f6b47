"""Rotary positions (RoFormer, arXiv 2104.09864): tables of the cosines and sines of packed tokens.

Frequencies are scaled for contexts that are longer than those of pretraining.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.recipe.settings.llm_settings import RopeScalingSettings

RotaryTables = tuple[Tensor, Tensor]  # cosines and sines, each (T, 1, d / 2)
_FEWEST_ROWS = 4096  # of a table of positions; longer ones have a power of two, so that a run makes few
_MIN_RAMP = 0.001  # pairs of features; keeps the ramp of YaRN finite, as in `transformers`


class Rotation(NamedTuple):
    """How fast the pairs of a head's features turn from one position to the next."""

    width: int  # features
    base: float
    scaling: RopeScalingSettings | None = None
    turning: int | None = None  # features that turn, those of the first pairs; None: all do
    as_whole_head: bool = False  # those that turn do so as if all did


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


def rotary_frequencies(
    width: int,
    base: float,
    scaling: RopeScalingSettings | None = None,
    turning: int | None = None,
    as_whole_head: bool = False,
) -> Tensor:
    """Return the angles per position, (width / 2,), by which rotary positions rotate the pairs of `width` features.

    turning, as_whole_head: see `Rotation`; the angles of other pairs are 0.
    """
    num_turning = width if turning is None else turning
    num_features = width if as_whole_head else num_turning
    frequencies = base ** (-torch.arange(0, num_turning, 2, dtype=torch.float32) / num_features)
    if scaling is not None:
        frequencies = scale_frequencies(frequencies, base, scaling)
    return F.pad(frequencies, (0, width // 2 - len(frequencies)))


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


def scale_frequencies(frequencies: Tensor, base: float, scaling: RopeScalingSettings) -> Tensor:
    """Slow frequencies (d / 2,) down by the factor: all of them, or those that turn seldom in pretraining's context."""
    if scaling.kind == "dynamic":
        return frequencies  # samples are not longer than the context of pretraining: `check_rope_context`
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    share_kept = (
        _llama3_share(frequencies, scaling) if scaling.kind == "llama3" else _yarn_share(frequencies, base, scaling)
    )
    return frequencies * (share_kept + (1 - share_kept) / scaling.factor)


def rotary_amplitude(scaling: RopeScalingSettings | None) -> float:
    """Return the factor on cosines and sines: that of YaRN, which keeps the entropy of attention, or 1."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.amplitude is not None:
        return scaling.amplitude
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def _llama3_share(frequencies: Tensor, scaling: RopeScalingSettings) -> Tensor:
    """Return the share of each frequency that stays, on a ramp over its turns in the context of pretraining."""
    low, high, positions = _context(scaling)
    turns = positions * frequencies / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_share(frequencies: Tensor, base: float, scaling: RopeScalingSettings) -> Tensor:
    """Return the share of each frequency that stays, on a ramp over pairs of features (YaRN, arXiv 2309.00071)."""
    low, high, positions = _context(scaling)
    num_pairs = len(frequencies)

    def pair_with_turns(turns: float) -> float:
        """Return the place, among all pairs, of one that turns so often in the context of pretraining."""
        return num_pairs * math.log(positions / (turns * 2 * math.pi)) / math.log(base)

    first_slowed = max(math.floor(pair_with_turns(high)), 0)
    first_slow = min(math.ceil(pair_with_turns(low)), 2 * num_pairs - 1)
    width = first_slow - first_slowed or _MIN_RAMP
    return 1 - ((torch.arange(num_pairs, dtype=torch.float32) - first_slowed) / width).clamp(0, 1)


def _context(scaling: RopeScalingSettings) -> tuple[float, float, int]:
    """Return the turns below which a rotation is slow and above which it is fast, in how many positions."""
    low, high, positions = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_positions
    assert low is not None, "checked by the settings"
    assert high is not None, "checked by the settings"
    assert positions is not None, "checked by the settings"
    return low, high, positions
