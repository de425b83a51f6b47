"""Normalize patches as the device does, and compare them with what `transformers` normalizes; break images."""

import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmtrain.models.stage.stage_inputs import PixelScale
from mmtrain.recipe.settings.data_settings import ImageSettings

ONE_GREY_LEVEL = 1.01 / 255 / 0.26  # after division by the smallest deviation of CLIP's


def normalized(patches: npt.NDArray[Any], image: ImageSettings) -> npt.NDArray[np.float32]:
    """Normalize the bytes of patches (N, F)."""
    assert patches.dtype == np.uint8
    scale = PixelScale.of(image.mean, image.std, patches.shape[1], torch.device("cpu"))
    return np.asarray(scale.normalize(torch.from_numpy(patches)).numpy(), dtype=np.float32)


def assert_same_pixels(ours: npt.ArrayLike, theirs: npt.ArrayLike) -> None:
    """Compare normalized pixels: equal to a processor that resizes by Pillow, as we do.

    Where torchvision is installed, processors resize by it, and it rounds some values to the next grey level.
    """
    differences = np.abs(np.asarray(ours) - np.asarray(theirs))
    if importlib.util.find_spec("torchvision") is None:
        assert differences.max() <= 1e-4
    else:
        assert differences.max() <= ONE_GREY_LEVEL


def undecodable_png(content: bytes) -> bytes:
    """Return a PNG file whose header and end are whole, so that only decoding shows that its pixels are not."""
    position = content.index(b"IDAT") + 6
    return content[:position] + bytes(8) + content[position + 8 :]
