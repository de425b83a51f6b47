"""Join the features of an image's tiles to one picture in the LLM, as LLaVA-NeXT does.

The encoder sends the features of every item, row by row, and its newline behind them; where the items lie does not
matter. What the LLM reads is made of these rows: the features of the first item, which shows all of the image, then
those of the joined tiles row by row, without its borders, and with a newline behind each row. So the borders and most
newlines are sent for nothing, which keeps items independent of each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.media.image_grids import Canvases, best_canvas
from mmtrain.recipe.data_settings import ImageSettings
from mmtrain.recipe.vision_settings import VisionSettings

Size = tuple[int, int]  # width, height in pixels


@dataclass(frozen=True)
class TileJoin:
    """How the items of a medium become features of the LLM."""

    side: int  # of a tile, in features
    tile: int  # its side in pixels
    pinpoints: Canvases

    @classmethod
    def of(cls, vision: VisionSettings, image: ImageSettings) -> "TileJoin | None":
        """Return how an encoder's tiles are joined; None if each item stays as it is."""
        if not vision.join_tiles:
            return None
        return cls(image.tile // (vision.patch * vision.merge), image.tile, image.pinpoints)

    @property
    def rows_per_item(self) -> int:
        """Return the rows that the encoder sends of an item: its features and the newline."""
        return self.side**2 + 1

    def num_features(self, image: Size | None, num_items: int) -> int:
        """Return the LLM tokens of an image of this size; None: of a video, whose frames are one tile each."""
        if image is None:
            return num_items * self.side**2
        rows, cols = self._shown(image)
        return self.side**2 + len(rows) * (len(cols) + 1)

    def feature_rows(self, image: Size | None, num_items: int) -> IntArray:
        """Return for each feature of the LLM which row it is of those that the encoder sends of the medium."""
        in_tile = np.arange(self.side**2, dtype=np.int64)
        firsts = np.arange(num_items, dtype=np.int64) * self.rows_per_item
        if image is None:
            return (firsts[:, None] + in_tile).ravel()
        rows, cols = self._shown(image)
        height, width = self._canvas(image)
        tiles = firsts[1:].reshape(height, 1, width, 1) + in_tile.reshape(1, self.side, 1, self.side)
        picture = tiles.reshape(height * self.side, width * self.side)[rows.start : rows.stop, cols.start : cols.stop]
        newlines = np.full((len(picture), 1), self.side**2, dtype=np.int64)
        return np.concatenate([in_tile, np.concatenate([picture, newlines], axis=1).ravel()])

    def _canvas(self, image: Size) -> tuple[int, int]:
        """Return the rows and columns of tiles."""
        height, width = best_canvas(*image, self.pinpoints)
        return height // self.tile, width // self.tile

    def _shown(self, image: Size) -> tuple[range, range]:
        """Return the rows and columns of joined features that show the image, as `unpad_image` of `transformers` does.

        Both borders of a side lose as many features; where that is less than all of their pixels, they are kept.
        """
        width, height = image
        rows, cols = (tiles * self.side for tiles in self._canvas(image))
        if width / height > cols / rows:
            border = (rows - int(round(height * (cols / width), 7))) // 2
            return range(border, rows - border), range(cols)
        border = (cols - int(round(width * (rows / height), 7))) // 2
        return range(rows), range(border, cols - border)


def join_media(join: TileJoin, images: Sequence[Size | None], num_items: Sequence[int]) -> IntArray:
    """Return `feature_rows` of media whose items are sent one after another."""
    rows = [np.empty(0, dtype=np.int64)]
    first = 0
    for image, of_medium in zip(images, num_items, strict=True):
        rows.append(first + join.feature_rows(image, of_medium))
        first += of_medium * join.rows_per_item
    return np.concatenate(rows)
