"""What a recipe overrides is in the exported processor, which makes of pictures what training made of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmtrain.data.index.sample_lengths import count_image_features
from mmtrain.data.media.image_grids import num_tiles
from mmtrain.families import FAMILIES, read_model_folder
from mmtrain.families.processor_files import read_processor
from mmtrain.families.trained_processors import differing_processors, write_trained_processors
from mmtrain.recipe import Recipe
from mmtrain.weights.export_weights import media_settings
from tests.weights.comparison import export_again
from tests.weights.pretrained import qwen2_5_vl, recipe_from, save

SIZES = [(31, 40), (64, 64), (100, 30), (20, 90), (200, 170)]  # width, height
NATIVE = ["qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_vl"]
IMAGED = [*NATIVE, "gemma3", "glm4v_moe", "internvl", "llava", "llava_next", "llava_onevision", "mistral3"]
LIMITS = ("data.image.min_pixels=1024", "data.image.max_pixels=2304", "data.image.resample=bilinear")
OVERRIDES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(NATIVE, LIMITS),
    "gemma3": ("data.image.resample=bicubic",),
    "glm4v_moe": LIMITS,
    "internvl": ("data.image.max_tiles=2", "data.image.resample=bilinear"),
    "llava": ("data.image.fit=pad",),
    "llava_next": ("data.image.pinpoints=[[32, 64], [64, 32]]",),
    "llava_onevision": ("data.image.pinpoints=[[32, 64], [64, 64]]",),
    "mistral3": ("data.image.max_pixels=2304", "data.image.resample=bilinear"),
}
OF_PIXELS = ("data.image.mean=[0.2, 0.3, 0.4]", "data.image.std=[0.5, 0.6, 0.7]")
OLDER_LIMITS = {"min_pixels": 1024, "max_pixels": 4096, "size": None}
LAYOUTS = ["own", "joint", "older"]


def _tiny(folder: Path, family: str, layout: str = "own") -> Path:
    """Write the JSON files of a tiny model, its image processor in one of the layouts that there are."""
    folder.mkdir()
    files = {name: dict(content) for name, content in FAMILIES[family].tiny.items()}
    if layout == "joint":
        joint = {"image_processor": files.pop("preprocessor_config.json")}
        files["processor_config.json"] = {**files.get("processor_config.json", {}), **joint}
        if "video_preprocessor_config.json" in files:
            files["processor_config.json"]["video_processor"] = files.pop("video_preprocessor_config.json")
    if layout == "older":
        files["preprocessor_config.json"] |= OLDER_LIMITS
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def _exported(folder: Path, recipe: Recipe) -> tuple[Path, tuple[str, ...]]:
    """Write the processors of an export."""
    out = folder.with_name("out")
    out.mkdir()
    for path in folder.glob("*.json"):
        (out / path.name).write_bytes(path.read_bytes())
    return out, write_trained_processors(read_model_folder(folder), media_settings(recipe), out)


def _recipe(folder: Path, *overrides: str) -> Recipe:
    return recipe_from(folder, "data.seq_len=32768", *overrides)


def _num_cells(processor: Any, picture: Image.Image, recipe: Recipe) -> int:
    """Return how many features or tiles the processor makes of a picture."""
    options: dict[str, Any] = {"crop_to_patches": True} if recipe.data.image.scheme == "tiles" else {}
    if recipe.data.image.pixel_limits == "sides":  # as the processor of Pixtral passes it
        options = {"patch_size": 16}
    made = processor(picture, return_tensors="np", **options)
    if "image_sizes" in made and options:
        return int(np.prod(np.asarray(made["image_sizes"][0]) // 16))
    if "image_grid_thw" in made:
        assert recipe.model.vision is not None
        return int(np.prod(made["image_grid_thw"])) // recipe.model.vision.merge**2
    return int(np.prod(made["pixel_values"].shape[:-3]))


def _expected_cells(width: int, height: int, recipe: Recipe) -> int:
    vision, image = recipe.model.vision, recipe.data.image
    assert vision is not None
    if image.scheme == "native":
        return int(count_image_features(width, height, vision, image))
    return 1 if image.scheme == "fixed" else num_tiles(width, height, image)


CASES = [(family, layout) for family in IMAGED for layout in LAYOUTS if layout != "older" or family in NATIVE]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_pictures_become_what_they_became_in_training(family: str, layout: str, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    folder = _tiny(tmp_path / "model", family, layout)
    overrides = (*OVERRIDES[family], *OF_PIXELS)
    recipe = _recipe(folder, *overrides)
    out, notes = _exported(folder, recipe)
    assert all(" is in the processor now, in the place of " in note for note in notes), notes
    assert {note.partition(":")[0] for note in notes} >= {override.partition("=")[0] for override in overrides} - {
        "data.image.min_pixels"
    }
    processor = AutoImageProcessor.from_pretrained(out)
    image = recipe.data.image
    assert (tuple(processor.image_mean), tuple(processor.image_std)) == (image.mean, image.std)
    for width, height in SIZES:
        picture = Image.new("RGB", (width, height))
        assert _num_cells(processor, picture, recipe) == _expected_cells(width, height, recipe)
    again = _recipe(out)
    assert (again.data.image, again.data.video, again.data.audio) == (image, recipe.data.video, recipe.data.audio)
    assert not differing_processors(read_model_folder(out), media_settings(recipe))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_that_overrides_nothing_changes_no_file(family: str, tmp_path: Path) -> None:
    folder = _tiny(tmp_path / "model", family) if family in IMAGED else _tiny(tmp_path / "model", family, "none")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    out, notes = _exported(folder, _recipe(folder))
    assert not notes
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_frames_keep_their_limits_beside_pictures_that_change(tmp_path: Path) -> None:
    """One file states both in older folders; then videos get a file of their own."""
    folder = _tiny(tmp_path / "model", "qwen2_5_vl")
    recipe = _recipe(folder, *LIMITS, "data.video.fps=1", "data.video.max_frames=12")
    assert recipe.data.video.max_pixels == 4096, "the folder's, of pictures"
    out, _ = _exported(folder, recipe)
    videos = json.loads((out / "video_preprocessor_config.json").read_text())
    assert (videos["fps"], videos["max_frames"], videos["size"]["longest_edge"]) == (1, 12, 4096)
    assert _recipe(out).data.video == recipe.data.video


@pytest.mark.parametrize("layout", ["own", "joint", "mixed"])
@pytest.mark.parametrize("family", ["qwen3_vl", "llava_onevision"])
def test_frames_are_prepared_as_pictures_are_wherever_both_are_stated(family: str, layout: str, tmp_path: Path) -> None:
    """A folder of the mixed layout was saved again by version 5, and kept the file of its pictures: frames read it."""
    folder = _tiny(tmp_path / "model", family, "joint" if layout == "joint" else "own")
    older = folder / "preprocessor_config.json"
    if layout == "mixed":
        own = json.loads(older.read_text())
        (folder / "video_preprocessor_config.json").unlink()
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": own}))
    recipe = _recipe(folder, *OF_PIXELS, "data.image.resample=bilinear")
    before = older.read_bytes() if layout == "mixed" else b""
    out, _ = _exported(folder, recipe)
    videos, pictures = read_processor(out, "video"), read_processor(out, "image")
    assert videos is not None
    assert pictures is not None
    for key, value in (("image_mean", [0.2, 0.3, 0.4]), ("image_std", [0.5, 0.6, 0.7]), ("resample", 2)):
        assert videos.config[key] == pictures.config[key] == value
    assert _recipe(out).data.video == recipe.data.video
    if layout == "mixed":
        assert videos.path.name == "video_preprocessor_config.json"
        assert (out / older.name).read_bytes() == before


@pytest.mark.parametrize(("family", "is_written"), [("qwen2_5_omni", True), ("qwen2_audio", False)])
def test_the_longest_clip_is_written_unless_the_encoder_needs_its_own(
    family: str, is_written: bool, tmp_path: Path
) -> None:
    folder = _tiny(tmp_path / "model", family)
    recipe = _recipe(folder, "data.audio.max_seconds=2")
    out, [note] = _exported(folder, recipe)
    assert note.startswith(
        "data.audio.max_seconds: 2.0 is in" if is_written else "data.audio.max_seconds: trained with 2.0,"
    )
    assert json.loads((out / "preprocessor_config.json").read_text())["chunk_length"] == (2 if is_written else 4)


@pytest.mark.parametrize(
    ("family", "override"),
    [
        ("gemma3", "data.image={scheme: native, min_pixels: 1024, max_pixels: 1024}"),
        ("qwen2_5_omni", "data.video.max_pixels=200704"),  # whose processor passes limits of its own
    ],
)
def test_what_no_processor_of_the_family_can_state_is_told(family: str, override: str, tmp_path: Path) -> None:
    folder = _tiny(tmp_path / "model", family)
    recipe = _recipe(folder, override)
    _, notes = _exported(folder, recipe)
    assert any("trained with" in note and "but the processor does" in note for note in notes)
    assert differing_processors(read_model_folder(folder), media_settings(recipe))


def test_export_writes_them_and_says_so(tmp_path: Path) -> None:
    folder = save(qwen2_5_vl(), tmp_path / "model")
    own: Mapping[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 16, "max_pixels": 4096, "patch_size": 2,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(own))
    recipe = recipe_from(folder, "data.image.max_pixels=576", "data.seq_len=32768")
    out = export_again(folder, recipe)
    stated = json.loads((out / "preprocessor_config.json").read_text())
    assert (stated["min_pixels"], stated["max_pixels"], stated["size"]["longest_edge"]) == (16, 576, 576)
    assert json.loads((folder / "preprocessor_config.json").read_text()) == own
