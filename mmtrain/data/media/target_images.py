"""Read the images that the assistant draws: what the generator learns to make, as patches of pixels or of latents."""

import numpy as np

from mmtrain.data.media.image_grids import Grid, MediumItems
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
from mmtrain.recipe.data_settings import DataSettings
from mmtrain.recipe.generator_settings import GeneratorSettings


class TargetImageReader:
    """Reads images in one size. Its methods raise `BadMediaError` for images that cannot be used."""

    def __init__(self, settings: GeneratorSettings, data: DataSettings) -> None:
        """Read as the settings of the generator say; those of the data bound the size of a file's image."""
        assert settings.image_size is not None, "`check_generator` rejects samples without a size to draw"
        self._side, self._patch = settings.image_size, settings.patch
        self._patches_per_side = settings.image_size // (settings.latent_scale * settings.patch)
        self._latents = None
        if settings.latents is not None:
            header = LatentHeader(self._side, settings.channels, self._side // settings.latent_scale, None)
            self._latents = LatentReader(settings.latents, header)
        self._image = data.image.model_copy(update={"scheme": "fixed", "size": self._side, "fit": "crop"})

    def read_items(self, media: Media) -> MediumItems:
        """Return the grid of patches of an image, which is one item, after a look at its header."""
        image_size = read_image_size(media, self._image.max_source_pixels)
        return MediumItems(((self._patches_per_side, self._patches_per_side),), image_size=image_size)

    def load_cells(self, media: Media, grid: Grid) -> CellArray:
        """Return the patches (rows * cols, channels * patch * patch) of an image, each ordered (channel, y, x).

        Pixels are bytes, latents are numbers. Raises DataError for an image without a latent.
        """
        assert grid == (self._patches_per_side,) * 2, "the recipe changed under a running index"
        if self._latents is not None:
            latent = self._latents.read(media)
            if latent is None:
                self.load_pixels(media)  # one that cannot be decoded has no latent, and is set aside
                raise self._latents.missing(media)
            return _patches_of(latent, self._patch)
        return patchify(load_rgb_images(media, [(self._side, self._side)], self._image), self._patch)

    def load_pixels(self, media: Media) -> Uint8Array:
        """Return the pixels (side, side, 3) of an image."""
        [image] = load_rgb_images(media, [(self._side, self._side)], self._image)
        return np.asarray(image)


def _patches_of(latent: Float32Array, patch: int) -> Float32Array:
    """Cut a latent image (channels, side, side) into patches, row by row."""
    channels, side, _ = latent.shape
    split = latent.reshape(channels, side // patch, patch, side // patch, patch).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(split.reshape(-1, channels * patch**2))
