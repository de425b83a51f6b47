"""Read the images that the assistant draws: what the generator learns to make, as patches of pixels or of latents.

They are drawn in the sizes of `drawing_sizes`: a square, or buckets of several aspect ratios (SDXL, arXiv 2307.01952).
Images of a bucket have one size, so they can be computed together, and little of an image is cut away.
"""

import math
from functools import lru_cache

import numpy as np

from mmtrain.data.media.image_grids import Grid, MediumItems, Size
from mmtrain.data.media.images import (
    CellArray,
    Float32Array,
    Uint8Array,
    load_rgb_images,
    patchify,
    read_image_size,
)
from mmtrain.data.media.latent_files import LatentHeader, LatentReader
from mmtrain.data.media.media_bytes import Media
from mmtrain.recipe.settings.data_settings import DataSettings
from mmtrain.recipe.settings.generator_settings import GeneratorSettings


class TargetImageReader:
    """Reads images in the sizes that are drawn. Its methods raise `BadMediaError` for images that cannot be used."""

    def __init__(self, settings: GeneratorSettings, data: DataSettings) -> None:
        """Read as the settings of the generator say; those of the data bound the size of a file's image."""
        self._patch = settings.patch
        self._pixels_per_patch = settings.latent_scale * settings.patch
        self._sizes = drawing_sizes(settings)
        self._latents = None
        if settings.latents is not None:
            self._latents = LatentReader(settings.latents, LatentHeader.of(settings, None))
        self._image = data.image.model_copy(update={"scheme": "fixed", "fit": "crop"})

    def read_items(self, media: Media) -> MediumItems:
        """Return the grid of patches of an image, which is one item, after a look at its header."""
        image_size = read_image_size(media, self._image.max_source_pixels)
        width, height = nearest_bucket(image_size, self._sizes)
        grid = (height // self._pixels_per_patch, width // self._pixels_per_patch)
        return MediumItems((grid,), image_size=image_size)

    def load_cells(self, media: Media, grid: Grid) -> CellArray:
        """Return the patches (rows * cols, channels * patch * patch) of an image, each ordered (channel, y, x).

        Pixels are bytes, latents are numbers. Raises DataError for an image without a latent.
        """
        size = grid[1] * self._pixels_per_patch, grid[0] * self._pixels_per_patch
        assert size in self._sizes, "the recipe changed under a running index"
        if self._latents is not None:
            latent = self._latents.read(media)
            if latent is None:
                self._load(media, size)  # one that cannot be decoded has no latent, and is set aside
                raise self._latents.missing(media)
            assert latent.shape[1:] == (grid[0] * self._patch, grid[1] * self._patch), "the header was compared"
            return _patches_of(latent, self._patch)
        return patchify(load_rgb_images(media, [size], self._image), self._patch)

    def load_pixels(self, media: Media) -> Uint8Array:
        """Return the pixels (height, width, 3) of an image, resized to the size that is drawn."""
        image_size = read_image_size(media, self._image.max_source_pixels)
        return self._load(media, nearest_bucket(image_size, self._sizes))

    def _load(self, media: Media, size: tuple[int, int]) -> Uint8Array:
        [image] = load_rgb_images(media, [size], self._image)
        return np.asarray(image)


def _patches_of(latent: Float32Array, patch: int) -> Float32Array:
    """Cut a latent image (channels, rows, columns) into patches, row by row."""
    channels, rows, cols = latent.shape
    split = latent.reshape(channels, rows // patch, patch, cols // patch, patch).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(split.reshape(-1, channels * patch**2))


def drawing_sizes(settings: GeneratorSettings) -> tuple[Size, ...]:
    """Return the sizes (width, height), in pixels, in which a generator draws samples."""
    assert settings.image_size is not None, "`check_generator` rejects samples without a size to draw"
    if settings.bucket_step is None:
        return ((settings.image_size, settings.image_size),)
    return aspect_buckets(settings.image_size, settings.bucket_step, settings.max_aspect)


@lru_cache(maxsize=8)
def aspect_buckets(side: int, step: int, max_aspect: float) -> tuple[Size, ...]:
    """Return the widths and heights of all buckets, the widest first.

    Each multiple of `step` is a shorter side. The longer side is the largest multiple that keeps the area within that
    of a square of `side` pixels, which is a bucket too. No side is more than `max_aspect` times the other.
    """
    wide = set()
    for shorter in range(step, side + 1, step):
        longer = side**2 // shorter // step * step
        if longer <= max_aspect * shorter:
            wide.add((longer, shorter))
    return tuple(sorted(wide | {(height, width) for width, height in wide}, key=lambda size: size[1] / size[0]))


def nearest_bucket(image: Size, buckets: tuple[Size, ...]) -> Size:
    """Return the bucket whose aspect ratio is nearest to that of an image, as a ratio; of equally near ones the first.

    image: width and height in any unit.
    """
    aspect = math.log(image[0] / image[1])
    return min(buckets, key=lambda bucket: abs(math.log(bucket[0] / bucket[1]) - aspect))
