"""Join the features of an image's tiles to one picture in the LLM, as LLaVA-NeXT and LLaVA-OneVision do.

The encoder sends the features of every item, row by row, and its newline behind them; where the items lie does not
matter. The LLM reads these rows: first the features of the first item, which shows all of the image. Then come those of
the joined tiles row by row, without borders and with a newline behind each row. So the borders and most newlines are
sent for nothing, which keeps items independent of each other. A picture of many tiles may be shrunk, and so may frames
of videos, by bilinear interpolation: then a feature is a weighted sum of four rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.media.image_grids import Canvases, best_canvas
from mmtrain.data.media.images import Float32Array
from mmtrain.recipe.settings.data_settings import ImageSettings
from mmtrain.recipe.settings.vision_settings import VisionSettings

Size = tuple[int, int]  # width, height in pixels


@dataclass(frozen=True)
class FeatureMix:
    """What features of the LLM are made of: of which rows that an encoder sends, numbered in order."""

    rows: IntArray  # (F, n)
    weights: Float32Array  # (F, n)

    @classmethod
    def of_rows(cls, rows: IntArray) -> "FeatureMix":
        """Make features that are rows (F,) as they are."""
        return cls(rows[:, None], np.ones((len(rows), 1), dtype=np.float32))

    @classmethod
    def join(cls, mixes: Sequence["FeatureMix"], first_rows: Sequence[int]) -> "FeatureMix":
        """Join the features of several images; each numbers rows from its first one."""
        width = max((mix.rows.shape[1] for mix in mixes), default=1)
        rows, weights = [np.empty((0, width), dtype=np.int64)], [np.empty((0, width), dtype=np.float32)]
        for mix, first_row in zip(mixes, first_rows, strict=True):
            missing = ((0, 0), (0, width - mix.rows.shape[1]))
            rows.append(np.pad(mix.rows, missing, mode="edge") + first_row)
            weights.append(np.pad(mix.weights, missing))
        return cls(np.concatenate(rows), np.concatenate(weights))


@dataclass(frozen=True)
class TileJoin:
    """How the items of a medium become features of the LLM."""

    side: int  # of a tile, in features
    tile: int  # its side in pixels
    pinpoints: Canvases
    vision: VisionSettings

    @classmethod
    def of(cls, vision: VisionSettings, image: ImageSettings) -> "TileJoin | None":
        """Return how an encoder's tiles are joined; None if each item stays as it is."""
        if not vision.join_tiles:
            return None
        side = image.tile // (vision.patch * vision.merge)
        return cls(side, image.tile, image.pinpoints, vision)

    @property
    def rows_per_item(self) -> int:
        """Return the rows that the encoder sends of an item: its features and the newline."""
        return self.side**2 + 1

    def num_features(self, image: Size | None, num_items: int) -> int:
        """Return the LLM tokens of an image of this size; None: of a video, whose frames are one tile each."""
        if image is None:
            return num_items * self._pooled_side**2 + self.vision.pool_frames
        if num_items == 1:
            return self.rows_per_item
        rows, cols = self._joined_size(image)
        return self.side**2 + rows * (cols + 1)

    def features(self, image: Size | None, num_items: int) -> FeatureMix:
        """Return the features of the LLM of a medium; rows are those that the encoder sends of it."""
        in_tile = np.arange(self.side**2, dtype=np.int64)
        newline = np.array([self.side**2], dtype=np.int64)
        if image is None:
            frames = np.arange(num_items, dtype=np.int64)[:, None] * self.rows_per_item + in_tile
            return self._video(frames.reshape(num_items, self.side, self.side), newline)
        if num_items == 1:
            return FeatureMix.of_rows(np.concatenate([in_tile, newline]))
        rows, cols = self._shown(image)
        height, width = self._canvas(image)
        firsts = np.arange(1, num_items, dtype=np.int64) * self.rows_per_item
        tiles = firsts.reshape(height, 1, width, 1) + in_tile.reshape(1, self.side, 1, self.side)
        picture = tiles.reshape(height * self.side, width * self.side)[rows.start : rows.stop, cols.start : cols.stop]
        size = self._joined_size(image)
        neighbors, weights = _resize(picture, *size)
        # All neighbors of a newline are the newline.
        neighbors = np.pad(neighbors, ((0, 0), (0, 1), (0, 0)), constant_values=self.side**2)
        weights = np.pad(weights, ((0, 0), (0, 1), (0, 0)))
        weights[:, -1, 0] = 1
        num_neighbors = neighbors.shape[-1]
        joined = FeatureMix(neighbors.reshape(-1, num_neighbors), weights.reshape(-1, num_neighbors))
        return FeatureMix.join([FeatureMix.of_rows(in_tile), joined], [0, 0])

    def _video(self, frames: IntArray, newline: IntArray) -> FeatureMix:
        """Return the features of a video with the rows (frames, side, side)."""
        if not self.vision.pool_frames:
            return FeatureMix.of_rows(frames.ravel())
        pooled = [_resize(frame, self._pooled_side, self._pooled_side) for frame in frames]
        mixes = [
            FeatureMix(rows.reshape(-1, rows.shape[-1]), weights.reshape(-1, rows.shape[-1]))
            for rows, weights in pooled
        ]
        mixes.append(FeatureMix.of_rows(newline))
        return FeatureMix.join(mixes, [0] * len(mixes))

    @property
    def _pooled_side(self) -> int:
        """Return the features on a side of a frame."""
        return -(-self.side // 2) if self.vision.pool_frames else self.side

    def _joined_size(self, image: Size) -> tuple[int, int]:
        """Return the rows and columns of features of the joined picture, newlines not counted."""
        rows, cols = self._shown(image)
        return self.vision.joined_size(len(rows), len(cols), self.side)

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


def join_media(join: TileJoin, images: Sequence[Size | None], num_items: Sequence[int]) -> FeatureMix:
    """Return `TileJoin.features` of media whose items are sent one after another."""
    mixes, first_rows = [], []
    first_row = 0
    for image, of_medium in zip(images, num_items, strict=True):
        mixes.append(join.features(image, of_medium))
        first_rows.append(first_row)
        first_row += of_medium * join.rows_per_item
    return FeatureMix.join(mixes, first_rows)


def _resize(grid: IntArray, rows: int, cols: int) -> tuple[IntArray, Float32Array]:
    """Resize a picture of features by bilinear interpolation, as `interpolate` of torch does in fp32.

    grid: (height, width) which row each feature is. Returns (rows, cols, n) neighbors, and the weight of each.
    """
    if grid.shape == (rows, cols):
        return grid[:, :, None], np.ones((rows, cols, 1), dtype=np.float32)
    above, below, down = _neighbors(grid.shape[0], rows)
    left, right, across = _neighbors(grid.shape[1], cols)
    neighbors = [grid[y][:, x] for y in (above, below) for x in (left, right)]
    weights = [np.multiply.outer(y, x) for y in (1 - down, down) for x in (1 - across, across)]
    return np.stack(neighbors, axis=-1), np.stack(weights, axis=-1)


def _neighbors(old: int, new: int) -> tuple[IntArray, IntArray, Float32Array]:
    """Return for each of `new` places on a side of `old` the two places around it, and the weight of the second."""
    scale = np.float32(old) / np.float32(new)
    places = np.maximum(scale * (np.arange(new, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5), np.float32(0))
    before = places.astype(np.int64)
    return before, np.minimum(before + 1, old - 1), places - before.astype(np.float32)
