"""Sizes in which images are drawn: a square, or buckets of several aspect ratios (SDXL, arXiv 2307.01952).

Images of a bucket have one size, so they can be computed together, and little of an image is cut away.
"""

import math
from functools import lru_cache

from mmtrain.data.media.fitting import Size
from mmtrain.recipe.settings.generator_settings import GeneratorSettings


def drawing_sizes(settings: GeneratorSettings) -> tuple[Size, ...]:
    """Return the sizes (width, height), in pixels, in which a generator draws samples."""
    assert settings.image_size is not None, "`check_generator` rejects samples without a size to draw"
    if settings.bucket_step is None:
        return ((settings.image_size, settings.image_size),)
    return aspect_buckets(settings.image_size, settings.bucket_step, settings.max_aspect)


@lru_cache(maxsize=8)
def aspect_buckets(side: int, step: int, max_aspect: float) -> tuple[Size, ...]:
    """Return the widths and heights of all buckets, the widest first.

    For each multiple of `step` as the shorter side, the longer one is the largest multiple that keeps the area within
    that of a square of `side` pixels, which is a bucket too. No side is more than `max_aspect` times the other.
    """
    wide = set()
    for shorter in range(step, side + 1, step):
        longer = side**2 // shorter // step * step
        if longer <= max_aspect * shorter:
            wide.add((longer, shorter))
    return tuple(sorted(wide | {(height, width) for width, height in wide}, key=lambda size: size[1] / size[0]))


def nearest_bucket(image: Size, buckets: tuple[Size, ...]) -> Size:
    """Return the bucket whose aspect ratio is nearest to that of an image, as a ratio; of equally near ones the first.

    image: width and height in any unit.
    """
    aspect = math.log(image[0] / image[1])
    return min(buckets, key=lambda bucket: abs(math.log(bucket[0] / bucket[1]) - aspect))
