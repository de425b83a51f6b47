"""Rotary frequencies for contexts that are longer than those of pretraining."""

import math

import torch
from torch import Tensor

from mmtrain.recipe.settings.llm_settings import RopeScalingSettings

_MIN_RAMP = 0.001  # pairs of features; keeps the ramp of YaRN finite, as in `transformers`


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
