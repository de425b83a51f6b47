"""The sizes of items to measure encoders and generators on: valid ones near those of the data, and synthetic ones."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmtrain.data.media.target_images import drawing_sizes
from mmtrain.recipe.settings.audio_settings import LOG_MEL_FRAMES_PER_SECOND, AudioSettings
from mmtrain.recipe.settings.data_settings import DataSettings
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.recipe.settings.modalities import GENERATOR
from mmtrain.recipe.settings.vision_settings import VisionSettings

NUM_SYNTHETIC_ITEMS = 64  # items of a recipe without data
SMALLEST_SYNTHETIC_SHARE = 0.25  # of the largest item that the recipe allows

ItemSize = tuple[int, int]  # rows and columns of cells; a clip has frames rows and one column


@dataclass(frozen=True)
class ItemSizes:
    """Functions of a modality's settings that return sizes of items."""

    nearest: Callable[[Any, ItemSize], ItemSize]  # (settings, size in the data) -> a size that the encoder accepts
    synthetic: Callable[[Any, DataSettings], list[ItemSize]]  # (settings, data) -> sizes that the recipe allows


def synthetic_shares() -> np.ndarray:
    """Return `NUM_SYNTHETIC_ITEMS` shares of the largest size, evenly spaced."""
    return np.linspace(SMALLEST_SYNTHETIC_SHARE, 1.0, NUM_SYNTHETIC_ITEMS)


def _nearest_image(settings: VisionSettings, size: ItemSize) -> ItemSize:
    """Return the size if the encoder accepts it, else the most square image of about as many patches.

    Stated lengths give the number of patches only.
    """
    merge, max_side = settings.merge, settings.max_side
    if all(side % merge == 0 and side <= max_side for side in size):
        return size
    patches = size[0] * size[1]
    max_merged = max_side // merge
    side = min(max_merged, max(1, round(math.sqrt(patches) / merge))) * merge
    return side, min(max_merged, max(1, round(patches / (side * merge)))) * merge


def _synthetic_images(settings: VisionSettings, data: DataSettings) -> list[ItemSize]:
    if settings.positions == "grid":
        return [(settings.max_side, settings.max_side)]
    image = data.image
    pixels = image.max_pixels if image.scheme == "native" else image.size**2
    side = min(settings.max_side, math.isqrt(pixels) // settings.patch)
    if image.scheme != "native":
        return [(side, side)]
    merge = settings.merge
    sides = [max(merge, int(side * share**0.5) // merge * merge) for share in synthetic_shares()]
    return [*zip(sides, sides[::-1], strict=True)]


def _nearest_clip(settings: AudioSettings, size: ItemSize) -> ItemSize:
    """Return the size without a frame that alone is half a token, or none."""
    return size[0] // settings.cells_per_token * settings.cells_per_token, size[1]


def _synthetic_clips(settings: AudioSettings, data: DataSettings) -> list[ItemSize]:
    max_frames = int(LOG_MEL_FRAMES_PER_SECOND * data.audio.max_seconds)
    if settings.longest_clip_frames is not None:
        max_frames = min(settings.longest_clip_frames, max_frames)
    if data.audio.item_seconds is not None:
        max_frames = min(settings.frames_per_item(data.audio.item_seconds), max_frames)
    num_features = [int(max_frames * share) // settings.cells_per_feature for share in synthetic_shares()]
    return [(max(1, n) * settings.cells_per_feature, 1) for n in num_features]


def _nearest_drawing(settings: GeneratorSettings, size: ItemSize) -> ItemSize:
    """Return the size if the generator divides it, else the most square image of about as many positions."""
    divisor = 2 ** (len(settings.widths) - 1)
    if all(side % divisor == 0 for side in size):
        return size
    side = max(1, round(math.sqrt(size[0] * size[1]) / divisor)) * divisor
    return side, max(1, round(size[0] * size[1] / (side * divisor))) * divisor


def _synthetic_drawings(settings: GeneratorSettings, data: DataSettings) -> list[ItemSize]:
    pixels_per_patch = settings.latent_scale * settings.patch
    if settings.image_size is None:
        side = settings.sample_size // settings.patch
        return [_nearest_drawing(settings, (side, side))]
    sizes = drawing_sizes(settings)
    return [(height // pixels_per_patch, width // pixels_per_patch) for width, height in sizes]


# By the name of the modality, or of the generator.
ITEM_SIZES: Mapping[str, ItemSizes] = {
    "vision": ItemSizes(_nearest_image, _synthetic_images),
    "audio": ItemSizes(_nearest_clip, _synthetic_clips),
    GENERATOR: ItemSizes(_nearest_drawing, _synthetic_drawings),
}
