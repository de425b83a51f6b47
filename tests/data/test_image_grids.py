"""The grids and tiles of the schemes against the processors of the model families that they come from."""

import importlib
from functools import cache
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.data.media.image_grids import (
    best_canvas,
    frame_grid,
    item_grids,
    native_grid,
    num_tiles,
    size_on_canvas,
    tile_canvas,
)
from mmtrain.recipe.data_settings import ImageSettings


@cache
def _processor(family: str) -> ModuleType:
    """Return the image processor of a family in `transformers` that needs no torchvision."""
    names = (f"image_processing_pil_{family}", f"image_processing_{family}")  # the first one since version 5
    for name in names:
        try:
            return importlib.import_module(f"transformers.models.{family}.{name}")
        except ImportError:
            continue
    pytest.skip(f"this version of transformers has no {family}")


@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    patch=st.sampled_from([1, 7, 14, 16]),
    merge=st.sampled_from([1, 2, 3]),
    low=st.integers(1, 10_000),
    extra=st.integers(0, 100_000),
    max_side=st.integers(3, 64),
)
def test_native_grids_keep_their_limits(
    width: int, height: int, patch: int, merge: int, low: int, extra: int, max_side: int
) -> None:
    high = max(low, (patch * merge) ** 2) + extra
    image = ImageSettings(min_pixels=low, max_pixels=high)
    rows, cols = frame_grid(width, height, image, patch, merge, max_side)
    assert rows % merge == cols % merge == 0
    assert 0 < max(rows, cols) <= max_side
    assert rows * cols * patch**2 <= high
    if rows * cols * patch**2 < low:  # only where one more row or column would break another limit
        larger = [(r, c) for r, c in ((rows + merge, cols), (rows, cols + merge)) if max(r, c) <= max_side]
        assert any(r * c * patch**2 > high for r, c in larger) or not larger


@given(width=st.integers(100, 4000), height=st.integers(100, 4000))
def test_native_grids_keep_the_aspect_and_use_the_area(width: int, height: int) -> None:
    image = ImageSettings(min_pixels=128 * 128, max_pixels=448 * 448)
    rows, cols = frame_grid(width, height, image, patch=14)
    assert abs(cols - rows * width / height) <= 1 or abs(rows - cols * height / width) <= 1
    target = min(max(width * height, 128 * 128), 448 * 448)
    assert 0.7 * target <= rows * cols * 14**2 <= max(1.3 * target, 448 * 448)


def test_small_images_grow_and_fixed_ignores_the_aspect() -> None:
    assert frame_grid(8, 8, ImageSettings(min_pixels=64 * 64, max_pixels=128 * 128), patch=16) == (4, 4)
    assert frame_grid(80, 48, ImageSettings(min_pixels=64, max_pixels=10_000), patch=16) == (3, 5)
    assert frame_grid(10, 1000, ImageSettings(scheme="fixed", size=224), patch=14, merge=2) == (16, 16)


@given(
    width=st.integers(30, 4000),
    height=st.integers(30, 4000),
    patch=st.sampled_from([14, 16]),
    low=st.integers(1, 400_000),
    extra=st.integers(0, 1_000_000),
)
def test_native_equals_qwen_where_that_keeps_its_own_limits(
    width: int, height: int, patch: int, low: int, extra: int
) -> None:
    high = low + (2 * patch) ** 2 + extra
    expected = _processor("qwen2_vl").smart_resize(height, width, 2 * patch, low, high)
    if low <= expected[0] * expected[1] <= high:
        rows, cols = native_grid(width, height, low, high, patch, 2)
        assert (rows * patch, cols * patch) == expected


@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    tile=st.sampled_from([224, 448]),
    max_tiles=st.integers(1, 14),
)
def test_tiles_equal_internvl(width: int, height: int, tile: int, max_tiles: int) -> None:
    canvas = _processor("got_ocr2").get_optimal_tiled_canvas((height, width), (tile, tile), 1, max_tiles)
    assert tile_canvas(width, height, tile, max_tiles) == canvas[::-1]


@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    canvases=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=36),
)
def test_canvases_equal_llava_next(width: int, height: int, canvases: list[tuple[int, int]]) -> None:
    utils = pytest.importorskip("transformers.image_processing_utils")
    pinpoints = tuple((336 * rows, 336 * cols) for rows, cols in canvases)
    canvas = best_canvas(width, height, pinpoints)
    assert canvas == utils.select_best_resolution((height, width), pinpoints)
    image = np.empty((3, height, width), np.bool_)
    size = utils.get_patch_output_size(image, canvas, "channels_first")
    assert size_on_canvas(width, height, canvas) == size[::-1]


def test_several_tiles_come_with_a_thumbnail() -> None:
    image = ImageSettings(scheme="tiles", tile=448, max_tiles=6)
    assert num_tiles(300, 300, image) == 1
    assert tile_canvas(900, 448, 448, 6) == (1, 2)
    assert item_grids(900, 448, image, 14, 2) == ((32, 32),) * 3
    assert frame_grid(900, 448, image, 14, 2) == (32, 32)
    assert item_grids(900, 448, ImageSettings(), 14) == (frame_grid(900, 448, ImageSettings(), 14),)
