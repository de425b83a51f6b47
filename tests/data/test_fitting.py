"""Pixels and sizes of images against the processors of the model families whose preprocessing the settings name."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.media.vision_items import VisionItemDecoder, read_vision_items
from mmtrain.errors import ModelFolderError
from mmtrain.families.image_processors import read_image_settings
from mmtrain.recipe.settings.data_settings import ImageSettings, VideoSettings
from mmtrain.recipe.settings.vision_settings import VisionSettings
from tests.pixels import normalized

transformers = pytest.importorskip("transformers")

PATCH = 14
SIDE = 112
MAX_DIFFERENCE = 1 / 255
TORCHVISION_DIFFERENCE = 2 / 255 * (1 + 1e-4)  # one of each direction, which are rounded apart
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
VISION = VisionSettings(layers=1, hidden=8, heads=1, ffn=8, patch=PATCH, merge=2, downsample="pixel_shuffle")
SIZES = [(301, 417), (417, 301), (50, 300), (112, 112), (1000, 60), (29, 31)]
SQUARE = {"height": SIDE, "width": SIDE}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": ("CLIPImageProcessorPil", {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}),
    "clip_in_numbers": ("CLIPImageProcessorPil", {"size": SIDE, "crop_size": SIDE}),
    "clip_stretched": ("CLIPImageProcessorPil", {"size": SQUARE, "crop_size": SQUARE}),
    "llava": ("LlavaImageProcessorPil", {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE, "do_pad": True}),
    "siglip": ("SiglipImageProcessorPil", {"size": SQUARE, "resample": Image.Resampling.LANCZOS}),
    "siglip_with_partial_patches": ("SiglipImageProcessorPil", {"size": {"height": SIDE + 8, "width": SIDE + 8}}),
    "internvl": ("GotOcr2ImageProcessorPil", {"size": SQUARE, "crop_to_patches": True, "max_patches": 6}),
    "llava_next": (
        "LlavaNextImageProcessorPil",
        {
            "size": {"shortest_edge": SIDE},
            "crop_size": SQUARE,
            "image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE], [SIDE, 3 * SIDE]],
        },
    ),
    "llava_onevision": (
        "LlavaOnevisionImageProcessorPil",
        {"size": SQUARE, "image_grid_pinpoints": [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, 2 * SIDE]]},
    ),
    "qwen2_vl": ("Qwen2VLImageProcessorPil", {"size": {"shortest_edge": 56 * 56, "longest_edge": 200 * 200}}),
    "qwen2_vl_of_4": ("Qwen2VLImageProcessorPil", {"min_pixels": 40 * 40, "max_pixels": 160 * 160}),
}


def _photo(width: int, height: int, path: Path, low: int = 0, high: int = 256) -> Image.Image:
    """Save a JPEG that is smooth in places and noisy in others, before compression with values in [low, high)."""
    rng = np.random.default_rng(width * height)
    coarse = rng.integers(low, high, (max(height // 9, 1), max(width // 9, 1), 3), dtype=np.uint8)
    picture = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)).copy()
    picture[: height // 3] = rng.integers(low, high, (height // 3, width, 3), dtype=np.uint8)
    Image.fromarray(picture).save(path, "jpeg", quality=90)
    return Image.open(io.BytesIO(path.read_bytes()))


def _our_items(path: Path, image: ImageSettings) -> np.ndarray:
    """Return the items of an image as pictures (item, 3, height, width), preprocessed."""
    media = FileMedia(str(path))
    grids = read_vision_items("image", media, image, VideoSettings(), VISION).grids
    decoder = VisionItemDecoder(image, PATCH)
    items = []
    for part, (rows, cols) in enumerate(grids):
        patches = normalized(decoder.patches("image", media, part, len(grids), (rows, cols)), image)
        split = patches.reshape(rows, cols, 3, PATCH, PATCH).transpose(2, 0, 3, 1, 4)
        items.append(split.reshape(3, rows * PATCH, cols * PATCH))
    return np.stack(items)


def _settings_from_folder(folder: Path, class_name: str, changes: dict[str, Any]) -> ImageSettings:
    """Return what a folder with the config of a processor makes of `data.image`."""
    config = {"image_processor_type": class_name.removesuffix("Pil"), "image_mean": MEAN, "image_std": STD, **changes}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    settings = read_image_settings(folder)
    assert settings is not None
    return ImageSettings(**settings)


def _as_pictures(output: Any) -> np.ndarray:
    """Return what a processor made of one image as pictures (item, 3, height, width)."""
    pixels = np.asarray(output["pixel_values"])
    if "image_grid_thw" not in output:
        return pixels.reshape(-1, *pixels.shape[-3:])
    _, rows, cols = np.asarray(output["image_grid_thw"])[0]
    merged = pixels.reshape(rows // 2, cols // 2, 2, 2, 3, 2, PATCH, PATCH)[:, :, :, :, :, 0]
    return merged.transpose(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * PATCH, cols * PATCH)


def _differences(folder: Path, picture: Image.Image, class_name: str, changes: dict[str, Any]) -> np.ndarray:
    """Return how much the pixels of a picture differ from those of a class of processors, as shares of white."""
    processor = getattr(transformers, class_name)(**changes, image_mean=MEAN, image_std=STD)
    expected = _as_pictures(processor(picture, return_tensors="np"))
    items = _our_items(folder / "a.jpg", _settings_from_folder(folder, class_name, changes))
    assert 0 <= expected.shape[-1] - items.shape[-1] < PATCH
    expected = expected[..., : items.shape[-2], : items.shape[-1]]
    assert items.shape == expected.shape
    differences: np.ndarray = np.abs(items - expected) * np.array(STD)[:, None, None]
    return differences


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_pixels_equal_those_of_the_processor(tmp_path: Path, family: str, width: int, height: int) -> None:
    picture = _photo(width, height, tmp_path / "a.jpg")
    assert _differences(tmp_path, picture, *PROCESSORS[family]).max() < MAX_DIFFERENCE / 10


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_pixels_are_near_those_of_torchvision(tmp_path: Path, family: str, width: int, height: int) -> None:
    """Show greys: torchvision resizes in both directions before it clips, Pillow clips in between.

    It has no Lanczos filter and takes the bicubic one, which such a processor is given here.
    """
    pytest.importorskip("torchvision")
    class_name, changes = PROCESSORS[family]
    picture = _photo(width, height, tmp_path / "a.jpg", low=80, high=176)
    changes = {key: value for key, value in changes.items() if key != "resample"}
    differences = _differences(tmp_path, picture, class_name.removesuffix("Pil"), changes)
    assert differences.max() <= TORCHVISION_DIFFERENCE
    assert differences.mean() <= MAX_DIFFERENCE / 5


@pytest.mark.slow
@pytest.mark.parametrize("family", PROCESSORS)
def test_pixels_of_drawn_sizes_equal_those_of_the_processor(tmp_path: Path, family: str) -> None:
    rng = np.random.default_rng(11)
    for _ in range(40):
        width, height = (int(side) for side in rng.integers(8, 900, 2))
        picture = _photo(width, height, tmp_path / "a.jpg")
        assert _differences(tmp_path, picture, *PROCESSORS[family]).max() < MAX_DIFFERENCE / 10, (width, height)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_processor_type": "MllamaImageProcessor"},
            "'MllamaImageProcessor' is not supported yet; supported: CL",
        ),
        ({"do_center_crop": False}, "do_center_crop: false is not supported yet; supported: true"),
        ({"crop_size": {"height": 8, "width": 9}}, "crop_size.width: 9 is not supported yet; supported: 8"),
        ({"size": {"shortest_edge": 300}}, "size.shortest_edge: 300 is not supported yet beside a crop_size of 224"),
        ({"image_mean": [0.5]}, "image_mean: found [0.5], allowed: three numbers"),
        ({"resample": 0}, "resample: filter 0 is not supported yet"),
        ({"do_sharpen": True}, "do_sharpen: true is not supported yet"),
    ],
)
def test_what_a_processor_does_otherwise_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = {"image_processor_type": "CLIPImageProcessor", **changes}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError) as caught:
        read_image_settings(tmp_path)
    assert message in str(caught.value)


def test_a_processor_of_several_media_holds_that_of_images(tmp_path: Path) -> None:
    assert read_image_settings(tmp_path) is None
    image = {"image_processor_type": "SiglipImageProcessorFast", "size": {"height": 32, "width": 32}}
    (tmp_path / "preprocessor_config.json").write_text('{"feature_size": 80}')  # of audio
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "X", "image_processor": image}))
    settings = read_image_settings(tmp_path)
    assert settings is not None
    assert (settings["size"], settings["fit"]) == (32, "stretch")


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
