"""The grids and tiles of the schemes against the processors of the model families that they come from."""

import importlib
import random
from functools import cache
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.data.media.image_grids import (
    MAX_ASPECT,
    Patches,
    best_canvas,
    enlarge_to_patch,
    frame_grid,
    grid_in_square,
    item_grids,
    native_grid,
    num_tiles,
    size_on_canvas,
    tile_canvas,
)
from mmtrain.families.image_processors import LLAVA_NEXT_PINPOINTS, LLAVA_ONEVISION_PINPOINTS
from mmtrain.recipe.settings.data_settings import ImageSettings


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


LIMITS = ((200_704, 200_704), (3136, 12_544), (784, 784), (1, 1024), (3136, 1_003_520), (65_536, 16_777_216))
MAX_SIDE = 4096


def _drawn_size(rng: random.Random) -> tuple[int, int]:
    """Return width and height: of pictures, of icons, and of strips in both directions."""
    longest = rng.choice(((4000, 4000), (4000, 4000), (120, 120), (40, 8000), (8000, 40)))
    return rng.randint(1, longest[0]), rng.randint(1, longest[1])


def _drawn_limits(rng: random.Random, unit: int) -> tuple[int, int]:
    """Return fewest and most pixels, often equal or near each other."""
    if rng.random() < 0.6:
        low, high = rng.choice(LIMITS)
    else:
        low, high = sorted((rng.randint(1, 1_000_000), rng.randint(1, 3_000_000)))
    return low, max(high, unit**2)


def _native_differences(num_sizes: int, seed: int) -> int:
    """Compare drawn sizes of pictures with Qwen's rule, in what it refuses too."""
    rng = random.Random(seed)
    differences = 0
    for _ in range(num_sizes):
        width, height = _drawn_size(rng)
        patch = rng.choice((14, 16))
        low, high = _drawn_limits(rng, 2 * patch)
        try:
            expected = _processor("qwen2_vl").smart_resize(height, width, 2 * patch, low, high)
        except ValueError:
            differences += max(width, height) / min(width, height) <= MAX_ASPECT
            continue
        rows, cols = native_grid(width, height, low, high, patch, 2, MAX_SIDE)
        differences += (rows * patch, cols * patch) != expected or max(width, height) > MAX_ASPECT * min(width, height)
    return differences


def test_native_grids_are_those_of_qwen_for_any_size_and_limits() -> None:
    assert _native_differences(5000, seed=1) == 0


def test_grids_in_a_square_are_those_of_pixtral_for_any_size_and_square() -> None:
    rng = random.Random(5)
    for _ in range(5000):
        width, height = _drawn_size(rng)
        patch, merge = rng.choice((14, 16)), rng.choice((1, 2))
        longest = rng.choice((1540, 1024, rng.randint(patch * merge, 2000)))
        if max(width, height) > MAX_ASPECT * min(width, height):
            continue
        picture = np.empty((3, height, width), dtype=np.uint8)
        expected = _processor("pixtral").get_resize_output_image_size(picture, longest, patch * merge, "channels_first")
        if 0 in expected:  # a side of no pixels, of which `transformers` makes no picture
            continue
        rows, cols = grid_in_square(width, height, longest, Patches(patch, merge, MAX_SIDE))
        assert (rows * patch, cols * patch) == expected, (width, height, longest)


def test_grids_within_limits_of_frames_are_those_of_glm_for_any_size_and_limits() -> None:
    rng = random.Random(4)
    for _ in range(3000):
        width, height = _drawn_size(rng)
        low, high = _drawn_limits(rng, 28)
        if max(enlarge_to_patch(width, height, 28)) > MAX_ASPECT * min(enlarge_to_patch(width, height, 28)):
            continue
        image = ImageSettings(min_pixels=low, max_pixels=2 * high, pixel_limits="frames")
        expected = _processor("glm4v").smart_resize(2, height, width, 2, 28, low, 2 * high)
        rows, cols = frame_grid(width, height, image, Patches(14, 2, frames=2))
        assert (14 * rows, 14 * cols) == expected, (width, height, low, high)


@pytest.mark.slow
def test_grids_of_all_schemes_are_those_of_their_processors_for_50_000_sizes() -> None:
    assert _native_differences(50_000, seed=2) == 0
    utils = pytest.importorskip("transformers.image_processing_utils")
    optimal_canvas = _processor("got_ocr2").get_optimal_tiled_canvas
    rng = random.Random(3)
    for _ in range(50_000):
        width, height = _drawn_size(rng)
        tile, max_tiles = rng.choice((224, 384, 448)), rng.randint(1, 16)
        canvas = optimal_canvas((height, width), (tile, tile), 1, max_tiles)
        assert tile_canvas(width, height, tile, max_tiles) == canvas[::-1], (width, height, tile, max_tiles)
        pinpoints = rng.choice((LLAVA_NEXT_PINPOINTS, LLAVA_ONEVISION_PINPOINTS))
        best = best_canvas(width, height, pinpoints)
        assert best == utils.select_best_resolution((height, width), pinpoints), (width, height)


@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    patch=st.sampled_from([1, 7, 14, 16]),
    merge=st.sampled_from([1, 2, 3]),
    low=st.integers(1, 10_000),
    extra=st.integers(0, 100_000),
    max_side=st.integers(3, 64),
)
def test_native_grids_have_whole_merged_patches_within_the_positions(
    width: int, height: int, patch: int, merge: int, low: int, extra: int, max_side: int
) -> None:
    high = max(low, (patch * merge) ** 2) + extra
    image = ImageSettings(min_pixels=low, max_pixels=high)
    rows, cols = frame_grid(width, height, image, Patches(patch, merge, max_side))
    assert rows % merge == cols % merge == 0
    assert 0 < max(rows, cols) <= max_side


@given(width=st.integers(100, 4000), height=st.integers(100, 4000))
def test_native_grids_keep_the_aspect_and_use_the_area(width: int, height: int) -> None:
    image = ImageSettings(min_pixels=128 * 128, max_pixels=448 * 448)
    rows, cols = frame_grid(width, height, image, Patches(14))
    assert abs(cols - rows * width / height) <= 1 or abs(rows - cols * height / width) <= 1
    target = min(max(width * height, 128 * 128), 448 * 448)
    assert 0.7 * target <= rows * cols * 14**2 <= max(1.3 * target, 448 * 448)


def test_small_images_grow_and_fixed_ignores_the_aspect() -> None:
    assert frame_grid(8, 8, ImageSettings(min_pixels=64 * 64, max_pixels=128 * 128), Patches(16)) == (4, 4)
    assert frame_grid(80, 48, ImageSettings(min_pixels=64, max_pixels=10_000), Patches(16)) == (3, 5)
    assert frame_grid(10, 1000, ImageSettings(scheme="fixed", size=224), Patches(14, 2)) == (16, 16)


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
    assert item_grids(900, 448, image, Patches(14, 2)) == ((32, 32),) * 3
    assert frame_grid(900, 448, image, Patches(14, 2)) == (32, 32)
    assert item_grids(900, 448, ImageSettings(), Patches(14)) == (frame_grid(900, 448, ImageSettings(), Patches(14)),)
