"""What folders say of pictures: each other value of each key is honoured as `transformers` does, or refused by name."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.media.vision_items import VisionItemDecoder, read_vision_items
from mmtrain.errors import ModelFolderError
from mmtrain.families import FAMILIES, read_model_folder
from mmtrain.families.folder_files import IMAGE_PROCESSOR_FILE, PROCESSOR_FILE
from mmtrain.recipe.settings.data_settings import ImageSettings, VideoSettings
from mmtrain.recipe.settings.vision_settings import VisionSettings
from tests.pixels import normalized

IMAGED = [
    name for name, family in FAMILIES.items() if "image_processor_type" in family.tiny.get(IMAGE_PROCESSOR_FILE, {})
]
NATIVE = [name for name in IMAGED if name.startswith("qwen")]
# What the processor of a family takes from its own file and passes to that of images.
PASSED = {"mistral3": {"patch_size": 16}}
# Keys that any processor may state, with values of which most are wrong for most of them.
ANY_KEYS: dict[str, list[Any]] = {
    "aspect_ratio_setting": ["pad"],
    "crop_size": [16, {"height": 16, "width": 16}],
    "crop_to_patches": [True, False],
    "default_to_square": [True, False],
    "do_center_crop": [True, False],
    "do_convert_rgb": [False],
    "do_pad": [True, False],
    "do_pan_and_scan": [True],
    "image_mean": [[0.3, 0.4, 0.5], 0.4],
    "max_patches": [2],
    "max_pixels": [2048],
    "merge_size": [1, 4],
    "min_patches": [2],
    "min_pixels": [2048],
    "pad_size": [{"height": 64, "width": 64}],
    "patch_size": [4, 16],
    "rescale_factor": [1 / 127.5],
    "resample": [0, 1, 2, 3, 4, 5],
    "size": [32, {"height": 64, "width": 64}, {"shortest_edge": 24}, {"shortest_edge": 1024, "longest_edge": 2304}],
    "temporal_patch_size": [1, 4],
}


def _write(folder: Path, family: str, file: str = IMAGE_PROCESSOR_FILE, **changes: Any) -> Path:
    """Write the JSON files of a tiny model, one of them with changes."""
    for name, content in FAMILIES[family].tiny.items():
        (folder / name).write_text(json.dumps(content))
    stated = FAMILIES[family].tiny.get(file, {})
    (folder / file).write_text(json.dumps({**stated, **changes}))
    return folder


@pytest.mark.parametrize("family", IMAGED)
def test_a_processor_that_converts_no_pictures_is_refused(family: str, tmp_path: Path) -> None:
    folder = read_model_folder(_write(tmp_path, family, do_convert_rgb=False))
    with pytest.raises(ModelFolderError, match="do_convert_rgb: false is not supported yet; supported: true"):
        folder.data_settings("image")


@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.parametrize(
    ("key", "value", "allowed"), [("patch_size", 16, 8), ("merge_size", 1, 2), ("temporal_patch_size", 1, 2)]
)
def test_patches_of_another_encoder_are_refused(
    family: str, key: str, value: int, allowed: int, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {key: value}
    folder = read_model_folder(_write(tmp_path, family, **changes))
    with pytest.raises(
        ModelFolderError,
        match=rf"preprocessor_config\.json: {key}: {value} is not that of the model; allowed: {allowed}",
    ):
        folder.data_settings("image")


def test_patches_that_a_folder_leaves_out_are_those_of_the_class(tmp_path: Path) -> None:
    folder = read_model_folder(_write(tmp_path, "qwen3_vl", patch_size=None))
    with pytest.raises(ModelFolderError, match="patch_size: 14 is not that of the model; allowed: 8"):
        folder.data_settings("image")


@pytest.mark.parametrize(
    ("family", "key", "value", "allowed"),
    [
        ("llava", "patch_size", 16, "8"),
        ("llava", "num_additional_image_tokens", 0, "1"),
        ("llava_next", "vision_feature_select_strategy", "full", "default"),
        ("llava_onevision", "num_image_tokens", 9, "16"),
        ("llava_onevision", "vision_aspect_ratio", "anyres_max_2", "anyres_max_"),
        ("gemma3", "image_seq_length", 9, ""),
        ("internvl", "image_seq_length", 9, "4"),
        ("mistral3", "patch_size", 16, "8"),
        ("mistral3", "spatial_merge_size", 1, "2"),
        ("mistral3", "image_break_token", "<break>", r"\[IMG_BREAK\]"),
        ("mistral3", "image_end_token", "<end>", r"\[IMG_END\]"),
    ],
)
def test_counts_of_tokens_of_another_model_are_refused(
    family: str, key: str, value: Any, allowed: str, tmp_path: Path
) -> None:
    """With them the processor of `transformers` writes another number of tokens than the model has features."""
    folder = read_model_folder(_write(tmp_path, family, PROCESSOR_FILE, **{key: value}))
    with pytest.raises(
        ModelFolderError, match=rf"processor_config\.json: {key}: {value} is not that of the model; allowed: {allowed}"
    ):
        folder.data_settings("image")
    older = read_model_folder(_write(tmp_path, family, PROCESSOR_FILE, **{key: None}))
    assert older.data_settings("image"), "older versions wrote fewer keys"


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        ("gemma3", {"size": {"height": 64, "width": 64}}, "size: 64 pixels are 8 patches a side; allowed: the 4"),
        ("internvl", {"size": {"height": 16, "width": 16}}, "size: 16 pixels are 2 patches a side; allowed: the 4"),
        ("llava", {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}, "size: 16 pixels are 2"),
        ("llava_onevision", {"image_grid_pinpoints": [[32, 64]]}, "image_grid_pinpoints: not those of the model; all"),
    ],
)
def test_tiles_of_another_encoder_are_refused(family: str, changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    folder = read_model_folder(_write(tmp_path, family, **changes))
    with pytest.raises(ModelFolderError, match=text):
        folder.data_settings("image")


@pytest.mark.slow
@pytest.mark.parametrize("family", IMAGED)
def test_every_other_value_gives_the_same_pixels_or_is_refused(family: str, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    pictures = list(_pictures(tmp_path))
    full = AutoImageProcessor.from_pretrained(_write(tmp_path, family)).to_dict()
    values = {key: [*ANY_KEYS.get(key, []), *_others(full[key])] for key in {*full, *ANY_KEYS} if key in full}
    values |= {key: others for key, others in ANY_KEYS.items() if key not in values}
    num_equal, differences = 0, []
    for key, others in {"": [None], **values}.items():
        for other in others:
            folder = _write(tmp_path, family, **({key: other} if key else {}))
            try:
                read = [_pixels(folder, picture) for picture in pictures]
            except (ModelFolderError, ValueError):  # it is refused: by the folder, or by the settings of a recipe
                assert key, "the folder as it is"
                continue
            processor = AutoImageProcessor.from_pretrained(folder)
            for picture, ours in zip(pictures, read, strict=True):
                options = {**FAMILIES[family].image_processor, **PASSED.get(family, {})}
                outputs = processor(Image.open(picture), return_tensors="np", **options)
                made = outputs["pixel_values"]
                if "image_position_ids" in outputs:  # Gemma 4 pads its patches, and its model moves them around zero
                    made = 2 * made[outputs["image_position_ids"][..., 0] >= 0] - 1
                theirs = np.reshape(made, (-1, *ours.shape[1:])) if np.size(made) == ours.size else np.zeros(0)
                if theirs.shape != ours.shape or _are_unlike(ours, theirs, processor.image_std):
                    differences.append((key, other, picture.name))
                num_equal += 1
    assert not differences
    assert num_equal > 20


def _others(value: Any) -> Iterator[Any]:
    """Yield other values of the same type."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (2 * value, max(1, value // 2), value + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from ({**value, key: other} for other in _others(item))


def _pictures(folder: Path) -> Iterator[Path]:
    """Write pictures of several shapes, one of them grey: smooth ones, of which no resizing goes beyond 0 to 255."""
    rng = np.random.default_rng(0)
    for number, (width, height) in enumerate([(40, 56), (100, 30), (64, 48)]):
        noise = Image.fromarray(rng.integers(64, 192, (6, 8, 3), dtype=np.uint8))
        path = folder / f"{number}.png"
        noise.resize((width, height), Image.Resampling.BICUBIC).convert("L" if number == 2 else "RGB").save(path)
        yield path


def _pixels(folder: Path, picture: Path) -> npt.NDArray[np.float32]:
    """Return the pixels of a picture in the layout of the processor: patches, or tiles (N, 3, H, W)."""
    read = read_model_folder(folder)
    image = ImageSettings(**read.data_settings("image"))
    video = VideoSettings(**read.data_settings("video")) if "video" in read.settings.data else VideoSettings()
    vision = VisionSettings(**read.settings.model["vision"])
    media = FileMedia(str(picture))
    grids = read_vision_items("image", media, image, video, vision).grids
    decoder = VisionItemDecoder(image, vision.patch, vision.temporal_patch, video)
    parts: list[npt.NDArray[np.float32]] = []
    for part, (rows, cols) in enumerate(grids):
        patches = normalized(decoder.patches("image", media, part, len(grids), (rows, cols)), image)
        patch, merge = vision.patch, vision.merge
        if image.pixel_limits == "area":  # patches in rows, the colors of each pixel together
            parts.append(patches.reshape(rows * cols, 3, -1).swapaxes(1, 2).reshape(rows * cols, -1))
        elif image.scheme == "native" and image.pixel_limits != "sides":
            squares = patches.reshape(rows // merge, merge, cols // merge, merge, -1).swapaxes(1, 2)
            parts.append(squares.reshape(rows * cols, -1))
        else:
            tile = patches.reshape(rows, cols, 3, patch, patch).transpose(2, 0, 3, 1, 4)
            parts.append(tile.reshape(3, rows * patch, cols * patch))
    is_packed = image.scheme == "native" and image.pixel_limits != "sides"
    return np.concatenate(parts) if is_packed else np.stack(parts)


def _are_unlike(ours: npt.NDArray[Any], theirs: npt.NDArray[Any], std: Any) -> bool:
    """Compare in grey levels: torchvision rounds some to the next, and has no Lanczos filter."""
    levels = 0.1 if importlib.util.find_spec("torchvision") is None else 8
    return bool(np.abs(ours - theirs).max() * np.max(std) > levels / 255)
