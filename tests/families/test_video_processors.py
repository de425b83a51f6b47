"""What folders say of videos: every key of every class of processors is honoured as `transformers` does, or refused."""

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mmtrain.data.formats.sample import Sample, Turn
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.media.video import VideoHeader
from mmtrain.data.media.vision_items import VisionItemDecoder, count_used_frames, frame_choice, read_vision_items
from mmtrain.data.synthetic.tiny_tokenizer import write_tiny_tokenizer
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.data.text.sample_tokenizer import TimedItems
from mmtrain.errors import ModelFolderError
from mmtrain.families.model_folder import ModelFolder, read_model_folder
from mmtrain.families.registry import FAMILIES
from mmtrain.recipe.settings.data_settings import ImageSettings, VideoSettings
from mmtrain.recipe.settings.vision_settings import VisionSettings
from tests.data.archives import movie
from tests.pixels import normalized

Config = dict[str, Any]
CLASSES = {
    "qwen2_vl": "Qwen2VLVideoProcessor",
    "qwen2_5_vl": "Qwen2VLVideoProcessor",
    "qwen3_5": "Qwen3VLVideoProcessor",
    "qwen3_5_moe": "Qwen3VLVideoProcessor",
    "qwen3_vl": "Qwen3VLVideoProcessor",
    "qwen3_vl_moe": "Qwen3VLVideoProcessor",
    "glm4v_moe": "Glm4vVideoProcessor",
    "llava_onevision": "LlavaOnevisionVideoProcessor",
    "internvl": "InternVLVideoProcessor",
}
NATIVE = ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe")
LIMITS = {"size": {"shortest_edge": 2048, "longest_edge": 8192}}  # of frames, or of videos; far below the defaults
EVERY_FRAME = 1 << 20


def _folder(path: Path, family: str, changes: Config, name: str = "video_preprocessor_config.json") -> ModelFolder:
    """Write the JSON files of a tiny model, with changes of its processor of videos; null takes a key away."""
    files: dict[str, Config] = {file: dict(content) for file, content in FAMILIES[family].tiny.items()}
    images = files["preprocessor_config.json"]
    pixels: Config = {
        key: images[key] for key in ("size", "image_mean", "image_std", "patch_size", "merge_size") if key in images
    }
    stated: Config = files.get("video_preprocessor_config.json", {"video_processor_type": CLASSES[family], **pixels})
    changed: Config = {**stated, **changes}
    videos = {key: value for key, value in changed.items() if value is not None}
    files.pop("video_preprocessor_config.json", None)
    if name == "processor_config.json":
        files[name] = {**files.get(name, {}), "video_processor": videos}
        files["video_preprocessor_config.json"] = {"video_processor_type": "Unread"}
    else:
        files[name] = videos
    path.mkdir(exist_ok=True)
    for file, content in files.items():
        (path / file).write_text(json.dumps(content))
    return read_model_folder(path)


def _video(path: Path, family: str, changes: Config) -> VideoSettings:
    return VideoSettings(**_folder(path, family, changes).data_settings("video"))


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("qwen2_vl", {}, (2.0, 4, 768)),  # its processor shows every frame unless a call says otherwise
        ("qwen2_vl", {"fps": 3, "min_frames": 6, "max_frames": 10}, (3.0, 6, 10)),
        ("qwen2_vl", {"fps": 1, "max_frames": 2, "do_sample_frames": True}, (1.0, 2, 2)),
        ("qwen2_vl", {"num_frames": 5, "do_sample_frames": True}, (None, 1, 4)),  # whole patches, half to even
        ("qwen2_5_vl", {"num_frames": 7, "fps": None}, (None, 1, 8)),
        ("qwen3_vl", {"max_frames": None}, (2.0, 4, 768)),
        ("qwen3_vl", {"fps": 0.5, "min_frames": 2, "max_frames": 9}, (0.5, 2, 9)),
        ("qwen3_vl", {"do_sample_frames": True}, (2.0, 4, 16)),
        ("qwen3_vl", {"do_sample_frames": False, "fps": 3}, (None, 1, EVERY_FRAME)),
        ("glm4v_moe", {}, (2.0, 1, 600)),
        ("glm4v_moe", {"fps": 3, "max_duration": 10, "num_frames": 16}, (3.0, 1, 30)),  # a number has no effect
        ("llava_onevision", {}, (None, 1, 8)),
        ("llava_onevision", {"num_frames": 5, "do_sample_frames": True}, (None, 1, 5)),
        ("llava_onevision", {"fps": 2, "max_frames": 3}, (2.0, 1, EVERY_FRAME)),  # it knows no such limit
        ("internvl", {}, (None, 1, 8)),
        ("internvl", {"num_frames": 32, "initial_shift": True}, (None, 1, 32)),
        ("internvl", {"fps": 1}, (1.0, 1, EVERY_FRAME)),
    ],
)
def test_frames_are_taken_as_the_folder_says(
    tmp_path: Path, family: str, changes: Config, expected: tuple[float | None, int, int]
) -> None:
    video = _video(tmp_path, family, changes)
    assert (video.fps, video.min_frames, video.max_frames) == expected
    samplings = {"qwen3_vl": "ends", "internvl": "middles", "glm4v_moe": "seconds"}
    assert video.sampling == samplings.get(family, "parts")


def test_glm_4_6v_takes_frames_by_the_length_of_a_video_and_writes_decimals(tmp_path: Path) -> None:
    changes = {"video_processor_type": "Glm46VVideoProcessor", "num_frames": 16}
    video = _video(tmp_path, "glm4v_moe", changes)
    assert (video.sampling, video.fps, video.max_frames, video.pixel_limits) == ("by_length", None, 640, "video")
    write_tiny_tokenizer(tmp_path, ["What is this?"], FAMILIES["glm4v_moe"])
    features = {"vision": [TimedItems((1, 1), (0, 13))]}
    turns = (Turn("user", "<video>:"), Turn("assistant", "This."))
    sample = Sample("s", "f.json", 0, turns, (), videos=(FileMedia("a.mp4"),))
    for kind, times in (("Glm46VVideoProcessor", "0.0 seconds1.3 seconds:"), ("Glm4vVideoProcessor", "01:")):
        _folder(tmp_path, "glm4v_moe", {"video_processor_type": kind})
        tokenizer = load_tokenizer(tmp_path)
        assert times in tokenizer.decode(tokenizer.encode(sample, features).ids)


def test_without_sampling_qwen3_vl_shows_every_frame(tmp_path: Path) -> None:
    video = _video(tmp_path, "qwen3_vl", {"do_sample_frames": False})
    header = VideoHeader(64, 64, 333, 30.0)
    assert count_used_frames(header, video, 2) == 333
    assert list(frame_choice(video, 334, 2)(header)) == [*range(333), 332]


@pytest.mark.parametrize("family", CLASSES)
def test_limits_of_pixels_are_those_that_the_class_reads(tmp_path: Path, family: str) -> None:
    video = _video(tmp_path, family, LIMITS if family in NATIVE else {})
    assert (video.min_pixels, video.max_pixels) == ((2048, 8192) if family in NATIVE else (None, None))
    if family in NATIVE:
        older = _video(tmp_path, family, {**LIMITS, "min_pixels": 1024, "max_pixels": None})
        assert older.min_pixels == (1024 if family.startswith("qwen2") else 2048)


@pytest.mark.parametrize("family", CLASSES)
def test_the_file_of_all_processors_comes_first_and_null_is_absence(tmp_path: Path, family: str) -> None:
    changes = {"fps": 1.5}
    folder = _folder(tmp_path, family, changes, "processor_config.json")
    assert folder.data_settings("video")["fps"] == 1.5
    config = json.loads((tmp_path / "processor_config.json").read_text())
    config["video_processor"] |= dict.fromkeys(("num_frames", "min_frames", "do_sample_frames", "do_center_crop"))
    (tmp_path / "processor_config.json").write_text(json.dumps(config))
    assert folder.data_settings("video")["fps"] == 1.5


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_resize": False}, "do_resize: false is not supported yet; supported: true"),
        ({"do_rescale": False}, "do_rescale: false is not"),
        ({"do_normalize": False}, "do_normalize: false is not"),
        ({"rescale_factor": 1}, "rescale_factor: 1 is not"),
        ({"do_center_crop": True}, "do_center_crop: true is not"),
        ({"resample": 0}, "resample: null is not supported yet; supported: that of pictures"),
        ({"resample": 2}, 'resample: "bilinear" is not supported yet; supported: that of pictures, "bicubic"'),
        ({"image_mean": [0.1, 0.2, 0.3]}, "image_mean: [0.1, 0.2, 0.3] is not supported yet; supported: that of"),
        ({"image_std": 0.3}, "image_std: [0.3, 0.3, 0.3] is not supported yet; supported: that of"),
        ({"video_processor_type": "OtherVideoProcessor"}, "video_processor_type 'OtherVideoProcessor' is not"),
        ({"fps": 2, "num_frames": 4}, "num_frames: excludes fps"),
        ({"fps": -1}, "fps: found -1, allowed: a number above 0"),
    ],
)
def test_what_a_processor_does_otherwise_is_refused(tmp_path: Path, family: str, changes: Config, message: str) -> None:
    if family == "glm4v_moe" and "num_frames" in changes:
        return  # its class does not read this number
    with pytest.raises(ModelFolderError) as refused:
        _video(tmp_path, family, changes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2_vl", {"cap_pixels_per_frame": True}, "cap_pixels_per_frame: true is not"),
        ("qwen3_vl", {"cap_pixels_per_frame": True}, "cap_pixels_per_frame: true is not"),
        ("qwen3_vl", {"num_frames": 4}, "num_frames: excludes the 2 frames a second that this processor takes"),
        ("qwen3_vl", {"patch_size": 9}, "patch_size: 9 is not supported yet; supported: 8"),
        ("qwen3_vl", {"temporal_patch_size": 1}, "temporal_patch_size: 1 is not"),
        ("qwen2_5_vl", {"merge_size": 1}, "merge_size: 1 is not"),
        (
            "llava_onevision",
            {"size": {"height": 64, "width": 32}},
            "size.height: 64 is not supported yet; supported: 32",
        ),
        ("internvl", {"size": {"height": 32, "width": 64}}, "size.width: 64 is not"),
        ("internvl", {"initial_shift": 0.5}, "initial_shift: 0.5 is not"),
        ("glm4v_moe", {"do_sample_frames": False}, "do_sample_frames: false is not"),
        ("glm4v_moe", {"fps": 0.7, "max_duration": 5}, "max_duration: 5 is not supported yet; supported: whole frames"),
    ],
)
def test_what_is_special_to_a_class_is_refused(tmp_path: Path, family: str, changes: Config, message: str) -> None:
    with pytest.raises(ModelFolderError) as refused:
        _video(tmp_path, family, changes)
    assert message in str(refused.value)


FRAMES_OF_CLASSES: list[tuple[str, Config]] = [
    ("qwen2_vl", {**LIMITS, "fps": 2, "min_frames": 2}),
    ("qwen2_vl", {**LIMITS, "num_frames": 5}),
    ("qwen2_5_vl", {"min_pixels": 4096, "max_pixels": 4096, "fps": 3, "max_frames": 6}),
    ("qwen3_vl", {**LIMITS, "fps": 3}),
    ("qwen3_vl", {"size": {"shortest_edge": 16384, "longest_edge": 16384}, "fps": 1, "min_frames": 3}),
    ("qwen3_vl", {**LIMITS, "do_sample_frames": False}),
    ("glm4v_moe", {**LIMITS, "fps": 3}),
    ("glm4v_moe", {**LIMITS, "max_duration": 1, "fps": 5}),
    ("glm4v_moe", {**LIMITS, "video_processor_type": "Glm46VVideoProcessor"}),
    ("llava_onevision", {"num_frames": 5}),
    ("llava_onevision", {"fps": 2}),
    ("internvl", {"num_frames": 5}),
    ("internvl", {"fps": 2}),
]


@pytest.mark.parametrize(("family", "changes"), FRAMES_OF_CLASSES)
def test_pixels_of_videos_equal_those_of_the_class(tmp_path: Path, family: str, changes: Config) -> None:
    """Give the class the decoded frames; it needs torchvision, which resizes bytes with other rounding than Pillow."""
    pytest.importorskip("torchvision")
    import torch
    import transformers

    folder = _folder(tmp_path, family, changes)
    rng = np.random.default_rng(3)
    noise = [Image.fromarray(rng.integers(64, 192, (12, 16, 3), dtype=np.uint8)) for _ in range(43)]
    shown = [picture.resize((96, 72), Image.Resampling.BICUBIC) for picture in noise]
    path = tmp_path / "a.mp4"
    path.write_bytes(movie(shown, seconds_each=0.1, width=96, height=72, rate=10))
    with av.open(str(path)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    config = json.loads((tmp_path / "video_preprocessor_config.json").read_text())
    samples = config.get("do_sample_frames", True)  # as a call asks of classes that do not by themselves
    processor = getattr(transformers, config["video_processor_type"])(**config)
    numbers = list(range(len(frames)))
    metadata = {"total_num_frames": len(numbers), "fps": 10.0, "duration": len(numbers) / 10, "frames_indices": numbers}
    output = processor(frames, video_metadata=[metadata], do_sample_frames=samples, return_tensors="pt")

    image = ImageSettings(**folder.data_settings("image"))
    video = VideoSettings(**folder.data_settings("video"))
    vision = VisionSettings(**folder.settings.model["vision"])
    media = FileMedia(str(path))
    grids = read_vision_items("video", media, image, video, vision).grids
    decoder = VisionItemDecoder(image, vision.patch, vision.temporal_patch, video)
    patches = [decoder.patches("video", media, part, len(grids), grid) for part, grid in enumerate(grids)]
    ours = np.stack([normalized(part, image) for part in patches])
    rows, cols = grids[0]
    patch, merge, joined = vision.patch, vision.merge, vision.temporal_patch
    theirs = torch.as_tensor(output["pixel_values_videos"])
    if family in NATIVE:
        assert output["video_grid_thw"].tolist() == [[len(grids), rows, cols]]
        squares = ours.reshape(len(grids), rows // merge, merge, cols // merge, merge, -1).swapaxes(2, 3)
        ours = squares.reshape(-1, squares.shape[-1])
    else:
        pictures = ours.reshape(len(grids), rows, cols, 3, joined, patch, patch)[:, :, :, :, 0]
        ours = pictures.transpose(0, 3, 1, 4, 2, 5).reshape(1, len(grids), 3, rows * patch, cols * patch)
    assert ours.shape == tuple(theirs.shape)
    assert np.abs(ours - theirs.numpy()).max() * max(image.std) <= 2 / 255
