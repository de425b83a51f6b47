"""Compute what an image is resized to and cut into, from its size alone.

A grid is (rows, columns) of an item in patches. `native_grid` is Qwen2-VL's scheme (arXiv 2409.12191), `tiles` is
InternVL's dynamic tiling (arXiv 2404.16821), `pinpoints` is that of LLaVA-NeXT (any resolution, arXiv 2407.07895).
A picture is brought to the size of its item stretched, cropped or padded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from PIL import Image

from mmtrain.recipe.settings.data_settings import ImageSettings
from mmtrain.recipe.settings.vision_settings import VisionSettings

Grid = tuple[int, int]
Canvases = tuple[tuple[int, int], ...]  # height, width in pixels
MAX_ASPECT = 200  # of the longer side to the shorter one, with `native`: `smart_resize` refuses more
Size = tuple[int, int]  # width, height in pixels

_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


@dataclass(frozen=True, slots=True)
class MediumItems:
    """The items that an image, a video or a clip becomes for one encoder, in order."""

    grids: tuple[Grid, ...]
    times: tuple[int, ...] | None = None  # rotary position of each item in time, from 0; None: its number
    tenths: tuple[int, ...] | None = None  # of a second, at which each item of a video is shown, where text may say it
    image_size: tuple[int, int] | None = None  # width and height in pixels, if it is an image


@dataclass(frozen=True)
class MediumGrid:
    """The features of an image, or of a video whose items are equal pictures one after another."""

    times: Sequence[int]  # rotary position of each item, from 0
    rows: int  # of features
    cols: int


class Patches(NamedTuple):
    """How an encoder cuts its pictures."""

    side: int  # of a patch in pixels
    merge: int = 1  # patches that are merged along each side
    max_side: int = 1 << 30  # most patches along a side
    frames: int = 1  # that a patch joins

    @classmethod
    def of(cls, vision: VisionSettings) -> "Patches":
        """Return those of an encoder's settings."""
        return cls(vision.patch, vision.merge, vision.max_side, vision.temporal_patch)

    @property
    def merged_side(self) -> int:
        """Return the side of a merged patch in pixels."""
        return self.side * self.merge


def item_grids(width: int, height: int, settings: ImageSettings, patches: Patches) -> tuple[Grid, ...]:
    """Return the grids of the items of an image of `width` x `height` pixels: one item, or one for each tile."""
    if settings.scheme in ("tiles", "pinpoints"):
        side = settings.tile // patches.side
        return ((side, side),) * num_tiles(width, height, settings)
    return (frame_grid(width, height, settings, patches),)


def frame_grid(width: int, height: int, settings: ImageSettings, patches: Patches) -> Grid:
    """Return the grid of a picture that becomes one item, as a frame of a video does; with tiles it is one tile.

    The frames that a patch joins count where they share the limits of pixels.
    """
    if settings.scheme == "native" and settings.pixel_limits == "frames":
        return video_grid(width, height, patches.frames, settings, patches)
    if settings.scheme == "native" and settings.pixel_limits == "sides":
        return grid_in_square(width, height, math.isqrt(settings.max_pixels), patches)
    if settings.scheme == "native" and settings.pixel_limits == "area":
        return grid_of_area(width, height, settings.max_pixels, patches)
    if settings.scheme == "native":
        side, merge, max_side, _ = patches
        return native_grid(width, height, settings.min_pixels, settings.max_pixels, side, merge, max_side)
    side = (settings.size if settings.scheme == "fixed" else settings.tile) // patches.side
    return side, side


def native_grid(
    width: int, height: int, min_pixels: int, max_pixels: int, patch: int, merge: int = 1, max_side: int = 1 << 30
) -> Grid:
    """Return the grid of an image whose area is scaled into [`min_pixels`, `max_pixels`], as Qwen2-VL resizes it.

    Rows and columns are multiples of `merge`, at least that and at most `max_side`. This is `smart_resize` of
    `transformers`, step by step: both sides are rounded apart, so that narrow limits are kept only about.
    """
    unit = patch * merge
    rows, cols = round(height / unit), round(width / unit)
    if rows * cols * unit**2 > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows, cols = math.floor(height / scale / unit), math.floor(width / scale / unit)
    elif rows * cols * unit**2 < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, cols = math.ceil(height * scale / unit), math.ceil(width * scale / unit)
    return _within_sides(rows, cols, merge, max_side)


def grid_in_square(width: int, height: int, longest: int, patches: Patches) -> Grid:
    """Return the grid of an image whose sides are at most `longest` pixels, and then rounded up to merged patches.

    This is `get_resize_output_image_size` of `PixtralImageProcessor` in `transformers`, step by step.
    """
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    unit = patches.merged_side
    return _within_sides(-(-height // unit), -(-width // unit), patches.merge, patches.max_side)


def grid_of_area(width: int, height: int, area: int, patches: Patches) -> Grid:
    """Return the grid of an image that is scaled to `area` pixels, with sides rounded down to merged patches.

    A side that is less than one becomes one, and the other as many as the aspect ratio says. This is
    `get_aspect_ratio_preserving_size` of `Gemma4ImageProcessor` in `transformers`, step by step.
    """
    unit = patches.merged_side
    factor = math.sqrt(area / (height * width))
    rows, cols = math.floor(factor * height / unit), math.floor(factor * width / unit)
    longest = area // unit**2
    if rows == 0:
        rows, cols = 1, min(width // height, longest)
    elif cols == 0:
        rows, cols = min(height // width, longest), 1
    return _within_sides(rows, cols, patches.merge, patches.max_side)


def video_grid(width: int, height: int, num_frames: int, settings: ImageSettings, patches: Patches) -> Grid:
    """Return the grid of each frame of a video whose frames share the limits of `settings`, as Qwen3-VL resizes it.

    This is `smart_resize` of `Qwen3VLVideoProcessor` in `transformers`.
    """
    unit = patches.merged_side
    width, height = enlarge_to_patch(width, height, unit)
    rows, cols = round(height / unit), round(width / unit)
    pixels = round(num_frames / patches.frames) * patches.frames * rows * cols * unit**2
    if pixels > settings.max_pixels:
        scale = math.sqrt(num_frames * height * width / settings.max_pixels)
        rows, cols = math.floor(height / scale / unit), math.floor(width / scale / unit)
    elif pixels < settings.min_pixels:
        scale = math.sqrt(settings.min_pixels / (num_frames * height * width))
        rows, cols = math.ceil(height * scale / unit), math.ceil(width * scale / unit)
    return _within_sides(rows, cols, patches.merge, patches.max_side)


def enlarge_to_patch(width: int, height: int, unit: int) -> tuple[int, int]:
    """Return width and height of a frame that is at least one merged patch of `unit` pixels wide and high."""
    if min(width, height) >= unit:
        return width, height
    scale = max(unit / height, unit / width)
    return int(width * scale), int(height * scale)


def _within_sides(rows: int, cols: int, merge: int, max_side: int) -> Grid:
    """Return a grid in patches from one in merged patches, with 1 to `max_side` patches a side."""
    longest = max_side // merge
    return min(max(rows, 1), longest) * merge, min(max(cols, 1), longest) * merge


def tile_canvas(width: int, height: int, tile: int, max_tiles: int) -> Grid:
    """Return the rows and columns of tiles, at most `max_tiles` in all, whose aspect is nearest to the image's.

    Of equally near canvases, the largest one with less than twice the image's area is chosen.
    """
    best = (1, 1)
    best_distance = math.inf
    for rows, cols in _canvases(max_tiles):
        distance = abs(width / height - cols / rows)
        is_small_enough = 2 * width * height > tile**2 * rows * cols
        if distance < best_distance or (distance == best_distance and is_small_enough):
            best = (rows, cols)
            best_distance = distance
    return best


@lru_cache(maxsize=1 << 12)
def best_canvas(width: int, height: int, canvases: Canvases) -> tuple[int, int]:
    """Return the canvas, (height, width), that shows an image largest without a change of its aspect ratio.

    An image is never larger than it is; of canvases that show it equally large, the one with the least border, or the
    first, is chosen. This is `select_best_resolution` of `transformers`.
    """
    best = canvases[0]
    best_shown, best_border = 0, math.inf
    for canvas in canvases:
        scale = min(canvas[1] / width, canvas[0] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        border = canvas[0] * canvas[1] - shown
        if shown > best_shown or (shown == best_shown and border < best_border):
            best, best_shown, best_border = canvas, shown, border
    return best


def size_on_canvas(width: int, height: int, canvas: tuple[int, int]) -> tuple[int, int]:
    """Return the largest width and height of an image on a canvas (height, width), rounded up."""
    across, down = canvas[1] / width, canvas[0] / height
    if across < down:
        return canvas[1], min(math.ceil(height * across), canvas[0])
    return min(math.ceil(width * down), canvas[1]), canvas[0]


def num_tiles(width: int, height: int, settings: ImageSettings) -> int:
    """Count the tiles of an image.

    With `tiles`, an image of several has one more, which shows all of it; with `pinpoints`, every image has.
    """
    if settings.scheme == "pinpoints":
        canvas = best_canvas(width, height, settings.pinpoints)
        return 1 + canvas[0] * canvas[1] // settings.tile**2
    rows, cols = tile_canvas(width, height, settings.tile, settings.max_tiles)
    return rows * cols + (rows * cols > 1)


@lru_cache(maxsize=8)
def _canvases(max_tiles: int) -> tuple[Grid, ...]:
    """Return every canvas of at most `max_tiles` tiles, in ascending order of their number."""
    sides = range(1, max_tiles + 1)
    canvases = [(rows, cols) for cols in sides for rows in sides if rows * cols <= max_tiles]
    return tuple(sorted(canvases, key=lambda canvas: canvas[0] * canvas[1]))


def fit_picture(rgb: Image.Image, size: Size, settings: ImageSettings) -> Image.Image:
    """Return the picture in this size; `settings.fit` says what becomes of another aspect ratio."""
    if settings.fit == "crop":
        resized = _resize(rgb, covering_size(rgb.size, size), settings)
        left, top = (resized.width - size[0]) // 2, (resized.height - size[1]) // 2
        return resized.crop((left, top, left + size[0], top + size[1]))
    if settings.fit == "pad" and rgb.width != rgb.height:
        side = max(rgb.size)
        red, green, blue = (int(255 * channel) for channel in settings.mean)
        square = Image.new("RGB", (side, side), (red, green, blue))
        square.paste(rgb, ((side - rgb.width) // 2, (side - rgb.height) // 2))
        rgb = square
    return _resize(rgb, size, settings)


def covering_size(source: Size, target: Size) -> Size:
    """Return the smallest size with the aspect ratio of `source` that covers `target`.

    The side that reaches beyond is rounded down, as torchvision and `transformers` do, but not below the target's.
    """
    width, height = source
    if width * target[1] <= height * target[0]:  # narrower than the target
        return target[0], max(target[1], target[0] * height // width)
    return max(target[0], target[1] * width // height), target[1]


def _resize(rgb: Image.Image, size: Size, settings: ImageSettings) -> Image.Image:
    return rgb if rgb.size == size else rgb.resize(size, _FILTERS[settings.resample])
