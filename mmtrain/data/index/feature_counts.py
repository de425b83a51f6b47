"""How many LLM tokens the media of an encoder become."""

from dataclasses import dataclass

from mmtrain.data.media.image_grids import MediumItems, item_grids
from mmtrain.data.media.joined_tiles import TileJoin
from mmtrain.recipe.settings.data_settings import ImageSettings
from mmtrain.recipe.settings.encoder_settings import EncoderSettings
from mmtrain.recipe.settings.vision_settings import VisionSettings


@dataclass(frozen=True)
class FeatureCounter:
    """Counts the features of a medium from its items."""

    cells_per_feature: int
    partial_cells: int  # that may be missing in the last token of an item
    extra_features: int  # of each item
    join: TileJoin | None  # of several items of an image

    @classmethod
    def of(cls, settings: EncoderSettings, image: ImageSettings) -> "FeatureCounter":
        """Return the counter of an encoder."""
        join = TileJoin.of(settings, image) if isinstance(settings, VisionSettings) else None
        return cls(settings.cells_per_feature, settings.partial_cells, settings.extra_features, join)

    def count(self, items: MediumItems) -> int:
        """Return the LLM tokens of a medium, without marks that a chat template writes around them."""
        if self.join is not None:
            return self.join.num_features(items.image_size, len(items.grids))
        num_cells = [rows * cols + self.partial_cells for rows, cols in items.grids]
        return sum([cells // self.cells_per_feature + self.extra_features for cells in num_cells])


def count_image_features(width: int, height: int, settings: VisionSettings, image: ImageSettings) -> int:
    """Return the LLM tokens of an image of `width` x `height` pixels that is alone in its sample."""
    grids = item_grids(width, height, image, settings.patch, settings.merge, settings.max_side)
    return FeatureCounter.of(settings, image).count(MediumItems(grids, image_size=(width, height)))
