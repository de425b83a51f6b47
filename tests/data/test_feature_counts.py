"""LLM tokens of images in the geometry of published models."""

import pytest

from mmtrain.data.index.sample_lengths import count_image_features
from mmtrain.recipe.settings.data_settings import ImageSettings
from mmtrain.recipe.settings.vision_settings import VisionSettings

SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128}
LLAVA = VisionSettings(**SHAPE, patch=14, max_side=24)
INTERNVL = VisionSettings(**SHAPE, patch=14, max_side=32, downsample="pixel_shuffle", merge=2)
QWEN2_5_VL = VisionSettings(**SHAPE, patch=14, max_side=1024, downsample="pixel_shuffle", merge=2)
NATIVE = ImageSettings(scheme="native", min_pixels=56 * 56, max_pixels=28 * 28 * 2048)


@pytest.mark.parametrize(
    ("vision", "image", "size", "tokens"),
    [
        (LLAVA, ImageSettings(scheme="fixed", size=336), (1280, 960), 576),
        (INTERNVL, ImageSettings(scheme="tiles", tile=448, max_tiles=12), (448, 448), 256),
        (INTERNVL, ImageSettings(scheme="tiles", tile=448, max_tiles=12), (896, 448), 3 * 256),
        (QWEN2_5_VL, NATIVE, (224, 224), 64),
        (QWEN2_5_VL, NATIVE, (1280, 960), 34 * 46),
    ],
)
def test_an_image_costs_what_its_model_card_says(
    vision: VisionSettings, image: ImageSettings, size: tuple[int, int], tokens: int
) -> None:
    assert count_image_features(*size, vision, image) == tokens
