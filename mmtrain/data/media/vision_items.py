"""The items of the vision unit: what an image or a video is cut into, and the patches of each part.

An image is one item or, with tiles, several; a video is one item for each of its frames. An item is named by the place
of its medium among those of its sample, and by the part of it.
"""

import numpy as np
from PIL import Image

from mmtrain.data.formats.sample import Sight
from mmtrain.data.media.image_grids import Grid, frame_grid, item_grids, num_tiles, tile_canvas
from mmtrain.data.media.images import Float32Array, load_rgb_images, patchify, read_image_size
from mmtrain.data.media.media_bytes import BadMediaError, Media
from mmtrain.data.media.video import load_video_frames, read_video_size
from mmtrain.recipe.model_settings import VisionSettings
from mmtrain.recipe.schema import ImageSettings, VideoSettings


def read_item_grids(
    kind: Sight, media: Media, image: ImageSettings, video: VideoSettings, vision: VisionSettings
) -> tuple[Grid, ...]:
    """The grid of each item that an image or video becomes, from its header. Raises `BadMediaError`."""
    sides = vision.patch, vision.merge, vision.max_side
    if kind == "image":
        width, height = read_image_size(media, image.max_source_pixels)
        return item_grids(width, height, image, *sides)
    width, height, frames = read_video_size(media, video.max_frames, image.max_source_pixels)
    return (frame_grid(width, height, image, *sides),) * frames


class VisionItemDecoder:
    """Decodes items one at a time, and keeps the last medium decoded: its other parts are mostly asked for next."""

    def __init__(self, settings: ImageSettings, patch: int) -> None:
        """Prepare patches of `patch` x `patch` pixels as `settings` say."""
        self._settings, self._patch = settings, patch
        self._last: tuple[object, list[Image.Image] | BadMediaError] = None, []

    def patches(self, kind: Sight, media: Media, part: int, parts: int, grid: Grid) -> Float32Array:
        """Patches (rows * cols, 3 * patch * patch) of one of the `parts` of an image or video, all of one grid.

        Raises `BadMediaError`.
        """
        key = kind, media, parts, grid
        if self._last[0] != key:
            try:
                self._last = key, self._decoded(kind, media, parts, grid)
            except BadMediaError as bad:
                self._last = key, bad
        decoded = self._last[1]
        if isinstance(decoded, BadMediaError):
            raise decoded
        return patchify(decoded[part], self._settings, self._patch)

    def blank(self, grid: Grid) -> Float32Array:
        """Zeros in place of an item's patches."""
        return np.zeros((grid[0] * grid[1], 3 * self._patch**2), dtype=np.float32)

    def _decoded(self, kind: Sight, media: Media, parts: int, grid: Grid) -> list[Image.Image]:
        size, limit = (grid[1] * self._patch, grid[0] * self._patch), self._settings.max_source_pixels
        if kind == "video":
            return load_video_frames(media, parts, size, limit)
        if self._settings.scheme == "tiles":
            return _tiles(media, parts, self._settings)
        return load_rgb_images(media, [size], limit)


def _tiles(media: Media, parts: int, settings: ImageSettings) -> list[Image.Image]:
    """The `parts` tiles of an image, row-major, and the whole of it last where there are several."""
    side, limit = settings.tile, settings.max_source_pixels
    width, height = read_image_size(media, limit)
    if num_tiles(width, height, settings) != parts:
        reason = f"{media}: {width} x {height} pixels are not {parts} tiles: it has changed since lengths were read"
        raise BadMediaError("undecodable", f"{reason}; touch the data file, so that they are read again")
    rows, cols = tile_canvas(width, height, side, settings.max_tiles)
    if (rows, cols) == (1, 1):
        return load_rgb_images(media, [(side, side)], limit)
    canvas, thumbnail = load_rgb_images(media, [(cols * side, rows * side), (side, side)], limit)
    boxes = [(c * side, r * side, (c + 1) * side, (r + 1) * side) for r in range(rows) for c in range(cols)]
    return [*(canvas.crop(box) for box in boxes), thumbnail]
