"""Read the images that the assistant draws: what the generator learns to make, as patches of pixels."""

from mmtrain.data.media.image_grids import Grid, MediumItems
from mmtrain.data.media.images import Uint8Array, load_rgb_images, patchify, read_image_size
from mmtrain.data.media.media_bytes import Media
from mmtrain.recipe.data_settings import DataSettings
from mmtrain.recipe.generator_settings import GeneratorSettings


class TargetImageReader:
    """Reads images in one size. Its methods raise `BadMediaError` for images that cannot be used."""

    def __init__(self, settings: GeneratorSettings, data: DataSettings) -> None:
        """Read as the settings of the generator say; those of the data bound the size of a file's image."""
        assert settings.image_size is not None, "`check_generator` rejects samples without a size to draw"
        self._side, self._patch = settings.image_size, settings.patch
        self._image = data.image.model_copy(update={"scheme": "fixed", "size": self._side, "fit": "crop"})

    def read_items(self, media: Media) -> MediumItems:
        """Return the grid of patches of an image, which is one item, after a look at its header."""
        image_size = read_image_size(media, self._image.max_source_pixels)
        patches_per_side = self._side // self._patch
        return MediumItems(((patches_per_side, patches_per_side),), image_size=image_size)

    def load_cells(self, media: Media, grid: Grid) -> Uint8Array:
        """Return the patches (rows * cols, 3 * patch * patch) of an image as bytes, each ordered (channel, y, x)."""
        assert grid == (self._side // self._patch,) * 2, "the recipe changed under a running index"
        return patchify(load_rgb_images(media, [(self._side, self._side)], self._image), self._patch)
