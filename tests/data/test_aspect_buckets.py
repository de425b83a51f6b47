"""Buckets of aspect ratios: which there are, which an image goes to, and how it is fitted into one."""

import math

import numpy as np
import pytest
from PIL import Image

from mmtrain.data.media.image_grids import covering_size, fit_picture
from mmtrain.data.media.target_images import aspect_buckets, drawing_sizes, nearest_bucket
from mmtrain.recipe.settings.data_settings import ImageSettings
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from tests.data.test_target_images import GENERATOR


def all_buckets(side: int, step: int, max_aspect: float) -> set[tuple[int, int]]:
    """List every size whose longer side cannot grow by a step, by trying all."""
    multiples = range(step, side**2 // step + 1, step)
    sizes = {(w, h) for w in multiples for h in multiples if w * h <= side**2 and max(w, h) <= max_aspect * min(w, h)}
    grown = lambda w, h: (w + step) * h if w >= h else w * (h + step)  # noqa: E731
    return {(w, h) for w, h in sizes if grown(w, h) > side**2 and min(w, h) <= side}


@pytest.mark.parametrize(("side", "step", "max_aspect"), [(12, 4, 2.0), (64, 8, 4.0), (96, 8, 2.5), (40, 40, 2.0)])
def test_buckets_are_the_largest_sizes_within_the_area_of_the_square(side: int, step: int, max_aspect: float) -> None:
    buckets = aspect_buckets(side, step, max_aspect)
    assert set(buckets) == all_buckets(side, step, max_aspect)
    assert (side, side) in buckets
    aspects = [width / height for width, height in buckets]
    assert aspects == sorted(aspects, reverse=True)


def test_the_buckets_of_sdxl_are_among_those_of_its_settings() -> None:
    """Compare with widths and heights of the table in the appendix of arXiv 2307.01952."""
    buckets = aspect_buckets(1024, 64, 2.0)
    assert {(1024, 1024), (1152, 896), (1216, 832), (1344, 768), (896, 1152), (832, 1216), (768, 1344)} <= set(buckets)


def test_an_image_goes_to_the_bucket_of_the_nearest_ratio() -> None:
    buckets = aspect_buckets(12, 4, 2.0)
    assert buckets == ((16, 8), (12, 12), (8, 16))
    assert [nearest_bucket(size, buckets) for size in ((30, 20), (13, 10), (10, 13), (20, 30), (900, 3))] == [
        (16, 8),
        (12, 12),
        (12, 12),
        (8, 16),
        (16, 8),
    ]
    rng = np.random.default_rng(0)
    for width, height in rng.integers(1, 4000, (50, 2)).tolist():
        chosen = nearest_bucket((width, height), buckets)
        stretched = {bucket: abs(math.log(width * bucket[1] / height / bucket[0])) for bucket in buckets}
        assert stretched[chosen] == pytest.approx(min(stretched.values()))


def test_a_generator_without_buckets_draws_squares() -> None:
    assert drawing_sizes(GeneratorSettings(**GENERATOR)) == ((8, 8),)
    assert len(drawing_sizes(GeneratorSettings(**GENERATOR | {"image_size": 12, "bucket_step": 4}))) == 3


def test_pictures_are_cropped_to_buckets_at_their_centre() -> None:
    columns = np.arange(40, dtype=np.uint8)
    picture = Image.fromarray(np.broadcast_to(columns[None, :, None], (8, 40, 3)).copy())
    settings = ImageSettings(scheme="fixed", fit="crop")
    cropped = np.asarray(fit_picture(picture, (16, 8), settings))
    np.testing.assert_array_equal(cropped[0, :, 0], columns[12:28])
    turned = np.asarray(fit_picture(picture.transpose(Image.Transpose.ROTATE_90), (8, 16), settings))
    np.testing.assert_array_equal(turned[:, 0, 0], columns[12:28][::-1])
    rng = np.random.default_rng(1)
    for width, height, wide, high in rng.integers(1, 300, (100, 4)).tolist():
        covering = covering_size((width, height), (wide, high))
        assert covering[0] >= wide
        assert covering[1] >= high
        assert covering[0] == wide or covering[1] == high
        exact = max(wide / width, high / height)
        assert abs(covering[0] - width * exact) < 1
        assert abs(covering[1] - height * exact) < 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bucket_step": 8}, "bucket_step is 8, which does not divide image_size 12: take a divisor of it"),
        ({"bucket_step": 6}, "bucket_step is 6, but the patch divides the sides of every bucket by 4: take a multiple"),
        ({"bucket_step": 4, "image_size": None}, "bucket_step is set without image_size"),
        ({"bucket_step": 4, "max_aspect": 1.0}, r"max_aspect is 1.0; allowed: above 1"),
        ({"max_aspect": 3.0}, "max_aspect is 3.0 without bucket_step, so that all images are square: remove it"),
        (
            {"kind": "unet", "widths": (32, 32), "heads": (2, 2), "patch": 1, "norm_groups": 8, "bucket_step": 3},
            "bucket_step is 3, but the U-Net divides the sides of every bucket by 2",
        ),
    ],
)
def test_buckets_that_cannot_be_are_named(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GeneratorSettings(**GENERATOR | {"image_size": 12} | changes)
