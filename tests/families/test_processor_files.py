"""Processors are read where `transformers` looks for them, in the layouts of its versions 4 and 5."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from mmtrain.errors import ModelFolderError
from mmtrain.families import FAMILIES, read_model_folder
from mmtrain.weights.inspect_folder import inspect_folder

# What 5.17 writes of a processor that older folders kept in one file: each part repeats the keys of the others.
OF_CLIPS = {
    "chunk_length": 4, "feature_size": 40, "hop_length": 160, "n_fft": 400, "padding_value": 0.0,
    "return_attention_mask": True, "sampling_rate": 16000,
}  # fmt: skip
OF_PICTURES = {
    "merge_size": 2, "patch_size": 8, "size": {"longest_edge": 8192, "shortest_edge": 2048}, "temporal_patch_size": 2,
}  # fmt: skip
JOINT_OMNI = {
    "processor_class": "Qwen2_5OmniProcessor",
    "feature_extractor": {
        **OF_CLIPS, **OF_PICTURES, "dither": 0.0, "feature_extractor_type": "WhisperFeatureExtractor",
        "image_processor_type": "Qwen2VLImageProcessor", "n_samples": 64000, "nb_max_frames": 400,
        "padding_side": "right",
    },
    "image_processor": {**OF_CLIPS, **OF_PICTURES, "image_processor_type": "Qwen2VLImageProcessor"},
    "video_processor": {
        **OF_CLIPS, **OF_PICTURES, "do_sample_frames": False, "max_frames": 768, "min_frames": 4,
        "video_processor_type": "Qwen2VLVideoProcessor",
    },
}  # fmt: skip


def _folder(path: Path, family: str, **files: Mapping[str, Any]) -> Path:
    """Write the tiny model of a family, with other files in the place of its own; keys are names before the dot."""
    for name, content in FAMILIES[family].tiny.items():
        (path / name).write_text(json.dumps(content))
    for stem, replacement in files.items():
        (path / f"{stem}.json").write_text(json.dumps(replacement))
    return path


def _data(folder: Path, section: str) -> Mapping[str, Any]:
    return read_model_folder(folder).data_settings(section)


def test_all_processors_of_omni_are_read_from_one_file(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "qwen2_5_omni", processor_config=JOINT_OMNI)
    (folder / "preprocessor_config.json").unlink()
    image = _data(folder, "image")
    assert (image["min_pixels"], image["max_pixels"]) == (2048, 8192)
    assert _data(folder, "audio")["max_seconds"] == 4
    assert _data(folder, "video")["max_frames"] == 768
    assert inspect_folder(folder).media_tokens["second of sound"] == 25


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_the_file_of_all_processors_goes_before_those_of_their_own(family: str, tmp_path: Path) -> None:
    """A folder that is saved again keeps the files of older versions."""
    from transformers import AutoImageProcessor

    own = dict(FAMILIES[family].tiny["preprocessor_config.json"])
    joint = {"image_processor": {**own, "image_mean": [0.1, 0.2, 0.3]}}
    folder = _folder(tmp_path, family, processor_config=joint)
    assert _data(folder, "image")["mean"] == tuple(AutoImageProcessor.from_pretrained(folder).image_mean)
    assert _data(folder, "image")["mean"] == (0.1, 0.2, 0.3)
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": None}))
    assert _data(folder, "image")["mean"] == tuple(AutoImageProcessor.from_pretrained(folder).image_mean)
    assert _data(folder, "image")["mean"] != (0.1, 0.2, 0.3)


def test_clips_and_videos_are_looked_for_in_the_same_order(tmp_path: Path) -> None:
    from transformers import AutoFeatureExtractor

    for key in ("feature_extractor", "audio_processor"):
        clips = {**FAMILIES["qwen2_audio"].tiny["preprocessor_config.json"], "chunk_length": 3}
        folder = _folder(tmp_path, "qwen2_audio", processor_config={key: clips})
        theirs = AutoFeatureExtractor.from_pretrained(folder).chunk_length
        assert _data(folder, "audio")["max_seconds"] == theirs == 3
    videos = {"video_processor": {"video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 8, "max_frames": 6}}
    folder = _folder(tmp_path, "qwen3_vl", processor_config=videos)
    assert (folder / "video_preprocessor_config.json").exists()
    assert _data(folder, "video")["max_frames"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("file", ["preprocessor_config", "video_preprocessor_config", "processor_config"])
def test_null_states_nothing(file: str, tmp_path: Path) -> None:
    """Change each key of each file to null: pictures, clips and videos are read or refused, and inspect shows them."""
    num_read = 0
    for family in FAMILIES.values():
        stated = family.tiny.get(f"{file}.json", {})
        for key in (*stated, "min_pixels", "max_pixels", "fps", "max_frames", "min_frames", "image_grid_pinpoints"):
            folder = _folder(tmp_path, family.name, **{file: {**stated, key: None}})
            for section in read_model_folder(folder).settings.data:
                try:
                    settings = _data(folder, section)
                    inspect_folder(folder)
                except ModelFolderError:
                    continue
                # As in recipes, `fps: null` is a number of frames in place of a rate.
                assert {name for name, value in settings.items() if value is None} <= {"fps"}
                num_read += 1
        for old in tmp_path.glob("*.json"):
            old.unlink()
    assert num_read > 30


@pytest.mark.parametrize("changes", [{"max_pixels": None}, {"min_pixels": None}, {"size": None}])
def test_limits_that_are_null_are_those_of_the_class(changes: dict[str, Any], tmp_path: Path) -> None:
    import transformers
    from transformers import AutoImageProcessor

    own = {**FAMILIES["qwen2_5_vl"].tiny["preprocessor_config.json"], **changes}
    folder = _folder(tmp_path, "qwen2_5_vl", preprocessor_config=own)
    if changes == {"size": None} and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("up to 5.17 each processor with limits of the older names writes them into the sizes of its class")
    size = AutoImageProcessor.from_pretrained(folder).size
    image = _data(folder, "image")
    assert (image["min_pixels"], image["max_pixels"]) == (size["shortest_edge"], size["longest_edge"])


def test_a_processor_of_pictures_from_before_there_were_any(tmp_path: Path) -> None:
    """Folders of CLIP call it a feature extractor."""
    own = {
        "feature_extractor_type": "CLIPFeatureExtractor", "size": 32, "crop_size": 32, "resample": 2,
        "do_center_crop": True, "do_normalize": True, "do_resize": True,
    }  # fmt: skip
    folder = _folder(tmp_path, "llava", preprocessor_config=own)
    assert (_data(folder, "image")["fit"], _data(folder, "image")["resample"]) == ("crop", "bilinear")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([], r"preprocessor_config\.json: found list, allowed: a mapping"),
        (
            {"size": {"longest_edge": 4}, "image_processor_type": "Qwen2VLImageProcessor"},
            "size.shortest_edge: found null",
        ),
        ({"size": {}}, "image_processor_type 'none' is not supported yet"),
    ],
)
def test_what_states_no_processor_is_refused(content: Any, text: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, "qwen2_vl", preprocessor_config=content)
    with pytest.raises(ModelFolderError, match=text):
        inspect_folder(folder)
