"""Normalize pixels on the device: they come as bytes, a quarter of what numbers in fp32 take to pass on and to copy."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

_MAX_BYTE = 255.0
_NUM_CHANNELS = 3


@dataclass(frozen=True)
class PixelScale:
    """What turns the bytes of patches into the numbers that an encoder was trained on."""

    mean: Tensor  # (F,) fp32, of each feature of a patch
    std: Tensor  # (F,) fp32

    @classmethod
    def of(cls, mean: tuple[float, ...], std: tuple[float, ...], num_features: int, device: torch.device) -> Self:
        """Scale patches whose features are ordered by channel first, as `data.image.mean` and `std` say."""
        per_channel = num_features // _NUM_CHANNELS
        return cls(_of_features(mean, per_channel, device), _of_features(std, per_channel, device))

    def normalize(self, patches: Tensor, blank_cells: tuple[tuple[int, int], ...] = ()) -> Tensor:
        """Return (byte / 255 - mean) / std in fp32: (N, F) uint8 -> (N, F).

        blank_cells: [start, stop) of patches that become zeros.
        """
        normalized = patches.float().div_(_MAX_BYTE).sub_(self.mean).div_(self.std)
        for start, stop in blank_cells:
            normalized[start:stop].zero_()
        return normalized


@lru_cache(maxsize=64)
def _of_features(values: tuple[float, ...], per_channel: int, device: torch.device) -> Tensor:
    """Repeat the value of each channel; once for a run, since the copy to the device may have to wait."""
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(per_channel).to(device)
