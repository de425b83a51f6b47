"""Pixels and sizes of images against the processors of the model families whose preprocessing the settings name."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.media.vision_items import VisionItemDecoder, read_item_grids
from mmtrain.recipe.model_settings import VisionSettings
from mmtrain.recipe.schema import ImageSettings, VideoSettings

transformers = pytest.importorskip("transformers")

PATCH = 14
SIDE = 112
MAX_DIFFERENCE = 1 / 255
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
VISION = VisionSettings(layers=1, hidden=8, heads=1, ffn=8, patch=PATCH, merge=2, downsample="pixel_shuffle")
SIZES = [(301, 417), (417, 301), (50, 300), (112, 112), (1000, 60), (29, 31)]
PROCESSORS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "clip": (
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}},
        {"scheme": "fixed", "size": SIDE, "fit": "crop"},
    ),
    "llava": (
        "LlavaImageProcessorPil",
        {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}, "do_pad": True},
        {"scheme": "fixed", "size": SIDE, "fit": "pad"},
    ),
    "siglip": (
        "SiglipImageProcessorPil",
        {"size": {"height": SIDE, "width": SIDE}, "resample": Image.Resampling.LANCZOS},
        {"scheme": "fixed", "size": SIDE, "resample": "lanczos"},
    ),
    "internvl": (
        "GotOcr2ImageProcessorPil",
        {"size": {"height": SIDE, "width": SIDE}, "crop_to_patches": True, "max_patches": 6},
        {"scheme": "tiles", "tile": SIDE, "max_tiles": 6},
    ),
}


def _photo(width: int, height: int, path: Path) -> Image.Image:
    """Save a JPEG that is smooth in places and noisy in others."""
    rng = np.random.default_rng(width * height)
    coarse = rng.integers(0, 256, (max(height // 9, 1), max(width // 9, 1), 3), dtype=np.uint8)
    picture = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)).copy()
    picture[: height // 3] = rng.integers(0, 256, (height // 3, width, 3), dtype=np.uint8)
    Image.fromarray(picture).save(path, "jpeg", quality=90)
    return Image.open(io.BytesIO(path.read_bytes()))


def _our_items(path: Path, image: ImageSettings) -> np.ndarray:
    """Return the items of an image as pictures (item, 3, height, width), preprocessed."""
    media = FileMedia(str(path))
    grids = read_item_grids("image", media, image, VideoSettings(), VISION)
    decoder = VisionItemDecoder(image, PATCH)
    items = []
    for part, (rows, cols) in enumerate(grids):
        patches = decoder.patches("image", media, part, len(grids), (rows, cols))
        split = patches.reshape(rows, cols, 3, PATCH, PATCH).transpose(2, 0, 3, 1, 4)
        items.append(split.reshape(3, rows * PATCH, cols * PATCH))
    return np.stack(items)


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_pixels_equal_those_of_the_processor(tmp_path: Path, family: str, width: int, height: int) -> None:
    class_name, theirs, ours = PROCESSORS[family]
    picture = _photo(width, height, tmp_path / "a.jpg")
    processor = getattr(transformers, class_name)(**theirs, image_mean=MEAN, image_std=STD)
    expected = np.asarray(processor(picture, return_tensors="np")["pixel_values"])
    items = _our_items(tmp_path / "a.jpg", ImageSettings(**ours, decode="full", mean=MEAN, std=STD))
    assert items.shape == expected.shape
    assert np.abs(items - expected).max() * min(STD) < MAX_DIFFERENCE / 10


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_pixels_equal_those_of_qwen2_vl(tmp_path: Path, width: int, height: int) -> None:
    limits = {"shortest_edge": 56 * 56, "longest_edge": 200 * 200}
    picture = _photo(width, height, tmp_path / "a.jpg")
    processor = transformers.Qwen2VLImageProcessorPil(size=limits, image_mean=MEAN, image_std=STD)
    output = processor(picture, return_tensors="np")
    _, rows, cols = np.asarray(output["image_grid_thw"])[0]
    merged = np.asarray(output["pixel_values"]).reshape(rows // 2, cols // 2, 2, 2, 3, 2, PATCH, PATCH)
    expected = merged[:, :, :, :, :, 0].transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * PATCH, cols * PATCH)
    image = ImageSettings(
        min_pixels=limits["shortest_edge"],
        max_pixels=limits["longest_edge"],
        decode="full",
        mean=MEAN,
        std=STD,
    )
    (item,) = _our_items(tmp_path / "a.jpg", image)
    assert item.shape == expected.shape
    assert np.abs(item - expected).max() * min(STD) < MAX_DIFFERENCE / 10


@pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
def test_scaled_decoding_shows_the_same_picture(tmp_path: Path, fit: str) -> None:
    ramp = np.add.outer(np.linspace(0, 128, 1500), np.linspace(0, 127, 2100)).astype(np.uint8)
    Image.fromarray(np.stack([ramp, 255 - ramp, ramp], axis=-1)).save(tmp_path / "a.jpg", quality=95)
    settings = {"scheme": "fixed", "size": SIDE, "fit": fit, "mean": (0.5, 0.5, 0.5), "std": (1, 1, 1)}
    full, scaled = (_our_items(tmp_path / "a.jpg", ImageSettings(**settings, decode=d)) for d in ("full", "scaled"))
    assert np.abs(full - scaled).max() < 4 * MAX_DIFFERENCE


def test_a_fit_without_a_fixed_size_is_refused() -> None:
    with pytest.raises(ValueError, match="fit is `crop`, but only images of scheme `fixed`"):
        ImageSettings(fit="crop")
