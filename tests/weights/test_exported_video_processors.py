"""Exported processors of videos: `transformers` opens them, and they take the frames that training took."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmtrain.data.index.sample_lengths import count_image_features
from mmtrain.data.media.video import VideoHeader
from mmtrain.data.media.vision_items import count_used_frames
from mmtrain.families import FAMILIES, read_model_folder
from mmtrain.families.folder_files import VIDEO_PROCESSOR_FILE
from mmtrain.families.processor_files import read_processor
from mmtrain.families.trained_processors import write_trained_processors
from mmtrain.recipe import Recipe
from mmtrain.weights.export_weights import media_settings
from mmtrain.weights.tiny_model import write_tiny_model
from tests.weights.comparison import export_again
from tests.weights.pretrained import recipe_from

needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="transformers opens no processor of videos without torchvision; `make test-b` has it",
)
PIXELS = ("data.image.min_pixels=2048", "data.image.max_pixels=3072")
OVERRIDES: dict[str, tuple[str, ...]] = {
    "qwen2_vl": (*PIXELS, "data.video.max_frames=6", "data.video.fps=null"),
    "qwen2_5_vl": (*PIXELS, "data.video.fps=1", "data.video.max_frames=6", "data.video.max_pixels=2048"),
    "qwen3_vl": (*PIXELS, "data.video.fps=1", "data.video.max_frames=6", "data.video.max_pixels=18432"),
    "glm4v_moe": (*PIXELS, "data.video.fps=1", "data.video.max_frames=6", "data.video.max_pixels=18432"),
    "llava_onevision": ("data.image.pinpoints=[[32, 64], [64, 64]]", "data.video.max_frames=5"),
    "internvl": ("data.image.max_tiles=2", "data.video.max_frames=5"),
}
HEADER = VideoHeader(width=96, height=64, num_frames=40, frames_per_second=5.0)


def _recipe(folder: Path, *overrides: str) -> Recipe:
    return recipe_from(folder, "data.seq_len=32768", *overrides)


@pytest.mark.parametrize("family", OVERRIDES)
def test_frames_of_a_recipe_are_written_and_said(family: str, tmp_path: Path) -> None:
    """The file without a word on frames too, beside which a recipe counts them."""
    folder = _json_files(tmp_path / "model", family)
    recipe = _recipe(folder, *OVERRIDES[family])
    out = _json_files(tmp_path / "out", family)
    notes = write_trained_processors(read_model_folder(folder), media_settings(recipe), out)
    assert not [note for note in notes if "trained with" in note], notes
    assert [note for note in notes if note.startswith("data.video.max_frames: ")]
    shows_all = [note for note in notes if "unless a call passes do_sample_frames=True" in note]
    assert len(shows_all) == (family not in ("qwen3_vl", "glm4v_moe"))
    again = _recipe(out).data.video
    if recipe.data.video.fps is None:  # of a number of frames none is the fewest
        again = again.model_copy(update={"min_frames": recipe.data.video.min_frames})
    assert again == recipe.data.video
    stated = read_processor(out, "video")
    assert stated is not None
    assert stated.path.name == VIDEO_PROCESSOR_FILE
    assert "video_processor_type" in stated.config


@pytest.mark.parametrize(
    ("family", "overrides", "lost"),
    [
        ("internvl", ("data.video.fps=1", "data.video.max_frames=6"), {"max_frames"}),  # its class knows no limit
        ("llava_onevision", ("data.video.fps=1", "data.video.max_frames=6"), {"max_frames"}),
        ("qwen3_vl", ("data.video.fps=null",), {"fps"}),  # its class always has a rate
        ("glm4v_moe", ("data.video.fps=2", "data.video.max_frames=7"), {"max_frames"}),  # no whole seconds
        ("qwen2_5_omni", ("data.video.fps=1", "data.video.max_pixels=200704"), {"fps", "max_pixels"}),
    ],
)
def test_what_no_file_states_is_said(family: str, overrides: tuple[str, ...], lost: set[str], tmp_path: Path) -> None:
    folder = _json_files(tmp_path / "model", family)
    recipe = _recipe(folder, *overrides)
    out = _json_files(tmp_path / "out", family)
    notes = write_trained_processors(read_model_folder(folder), media_settings(recipe), out)
    unlike = [note for note in notes if ": trained with " in note and ", but the processor does " in note]
    assert {note.partition(":")[0].removeprefix("data.video.") for note in unlike} == lost
    if family == "qwen2_5_omni":
        assert all(
            note.endswith(", whatever its files state; pass the trained value with each call") for note in unlike
        )
    assert _recipe(out), "it can be trained on"


def _json_files(folder: Path, family: str) -> Path:
    folder.mkdir()
    for name, content in FAMILIES[family].tiny.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@needs_torchvision
@pytest.mark.parametrize("family", OVERRIDES)
def test_transformers_opens_them_and_takes_the_same_frames(family: str, tmp_path: Path) -> None:
    from transformers import AutoProcessor, AutoVideoProcessor

    folder = tmp_path / "model"
    write_tiny_model(FAMILIES[family], folder, seed=3, num_train=4)
    recipe = _recipe(folder, *OVERRIDES[family])
    out = export_again(folder, recipe)
    whole = AutoProcessor.from_pretrained(out)
    for processor in (whole.video_processor, AutoVideoProcessor.from_pretrained(out)):
        assert _num_features(processor, recipe) == _expected(recipe)
    assert whole.image_processor.to_dict() != AutoProcessor.from_pretrained(folder).image_processor.to_dict()


def _num_features(processor: Any, recipe: Recipe) -> int:
    """Return how many features the processor makes of a video when a call asks it to choose frames."""
    frames = np.zeros((HEADER.num_frames, HEADER.height, HEADER.width, 3), dtype=np.uint8)
    indices = list(range(HEADER.num_frames))
    metadata = {"total_num_frames": HEADER.num_frames, "fps": HEADER.frames_per_second, "frames_indices": indices}
    made = processor(frames, video_metadata=[metadata], do_sample_frames=True, return_tensors="pt")
    vision = recipe.model.vision
    assert vision is not None
    if "video_grid_thw" in made:
        return int(made["video_grid_thw"].prod()) // vision.merge**2
    return int(made["pixel_values_videos"].shape[1])


def _expected(recipe: Recipe) -> int:
    vision, video = recipe.model.vision, recipe.data.video
    assert vision is not None
    num_frames = count_used_frames(HEADER, video, vision.temporal_patch)
    if recipe.data.image.scheme != "native":
        return num_frames
    num_patches = -(-num_frames // vision.temporal_patch)
    limits = {"min_pixels": video.min_pixels, "max_pixels": video.max_pixels}
    if video.pixel_limits == "video":
        limits = {key: limit // num_frames for key, limit in limits.items() if limit is not None}
    image = recipe.data.image.model_copy(update={**limits, "pixel_limits": "image"})
    return num_patches * int(count_image_features(HEADER.width, HEADER.height, vision, image))
