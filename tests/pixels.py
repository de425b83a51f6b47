"""Normalize patches as the device does, for comparison with what `transformers` normalizes; break images."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmtrain.models.pixel_scale import PixelScale
from mmtrain.recipe.data_settings import ImageSettings


def normalized(patches: npt.NDArray[Any], image: ImageSettings) -> npt.NDArray[np.float32]:
    """Normalize the bytes of patches (N, F)."""
    assert patches.dtype == np.uint8
    scale = PixelScale.of(image.mean, image.std, patches.shape[1], torch.device("cpu"))
    return np.asarray(scale.normalize(torch.from_numpy(patches)).numpy(), dtype=np.float32)


def undecodable_png(content: bytes) -> bytes:
    """Return a PNG file whose header and end are whole, so that only decoding shows that its pixels are not."""
    position = content.index(b"IDAT") + 6
    return content[:position] + bytes(8) + content[position + 8 :]
