"""What an image is resized to and cut into, from its size alone: the schemes of the field as functions of pixels.

A grid is (rows, columns) of an item in patches. `native_grid` is Qwen2-VL's (arXiv 2409.12191), `tiles` InternVL's
dynamic tiling (arXiv 2404.16821).
"""

import math
from functools import lru_cache

from mmtrain.recipe.schema import ImageSettings

Grid = tuple[int, int]


def item_grids(
    width: int, height: int, settings: ImageSettings, patch: int, merge: int = 1, max_side: int = 1 << 30
) -> tuple[Grid, ...]:
    """The grids of the items that an image of `width` x `height` pixels becomes: one, or one a tile."""
    if settings.scheme == "tiles":
        side = settings.tile // patch
        return ((side, side),) * num_tiles(width, height, settings)
    return (frame_grid(width, height, settings, patch, merge, max_side),)


def frame_grid(
    width: int, height: int, settings: ImageSettings, patch: int, merge: int = 1, max_side: int = 1 << 30
) -> Grid:
    """The grid of a picture that stays whole, as a frame of a video does: with `tiles` it is one tile."""
    if settings.scheme == "native":
        return native_grid(width, height, settings.min_pixels, settings.max_pixels, patch, merge, max_side)
    side = (settings.size if settings.scheme == "fixed" else settings.tile) // patch
    return side, side


def native_grid(
    width: int, height: int, min_pixels: int, max_pixels: int, patch: int, merge: int = 1, max_side: int = 1 << 30
) -> Grid:
    """Rows and columns, in patches, nearest to the image's own size whose area lies within the limits.

    Both are multiples of `merge` and at most `max_side`. Where the published rule (sides rounded apart, then scaled
    together) would break a limit, the nearest aspect that keeps it is taken; the upper limit always holds, the lower
    one where whole merged patches allow it.
    """
    unit = patch * merge
    longest = max_side // merge
    rows, cols = round(height / unit), round(width / unit)
    if rows * cols * unit**2 > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows, cols = math.floor(height / scale / unit), math.floor(width / scale / unit)
    elif rows * cols * unit**2 < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, cols = math.ceil(height * scale / unit), math.ceil(width * scale / unit)
    rows, cols = (min(max(side, 1), longest) for side in (rows, cols))
    aspect = width / height
    while rows * cols * unit**2 > max_pixels and rows * cols > 1:
        rows, cols = _nearest(aspect, [g for g in ((rows - 1, cols), (rows, cols - 1)) if min(g) > 0])
    while rows * cols * unit**2 < min_pixels:
        larger = [g for g in ((rows + 1, cols), (rows, cols + 1)) if max(g) <= longest]
        larger = [g for g in larger if g[0] * g[1] * unit**2 <= max_pixels]
        if not larger:
            break
        rows, cols = _nearest(aspect, larger)
    return rows * merge, cols * merge


def tile_canvas(width: int, height: int, tile: int, max_tiles: int) -> Grid:
    """Rows and columns of tiles, at most `max_tiles` in all, whose aspect is nearest to the image's.

    Of equally near ones the largest whose area is less than twice the image's.
    """
    best, nearest = (1, 1), math.inf
    for rows, cols in _canvases(max_tiles):
        distance = abs(width / height - cols / rows)
        if distance < nearest or (distance == nearest and 2 * width * height > tile**2 * rows * cols):
            best, nearest = (rows, cols), distance
    return best


def num_tiles(width: int, height: int, settings: ImageSettings) -> int:
    """Tiles of an image; where there are several, one more shows the whole of it."""
    rows, cols = tile_canvas(width, height, settings.tile, settings.max_tiles)
    return rows * cols + (rows * cols > 1)


@lru_cache(maxsize=8)
def _canvases(max_tiles: int) -> tuple[Grid, ...]:
    """Every canvas of at most `max_tiles` tiles, small ones first."""
    sides = range(1, max_tiles + 1)
    wide = [(rows, cols) for cols in sides for rows in sides if rows * cols <= max_tiles]
    return tuple(sorted(wide, key=lambda canvas: canvas[0] * canvas[1]))


def _nearest(aspect: float, grids: list[Grid]) -> Grid:
    """The grid whose aspect (width / height) is nearest, as a ratio."""
    return min(grids, key=lambda g: abs(math.log(g[1] / g[0] / aspect)))
