"""Frames by the second: how many, which, and when, against the video processor of `transformers`."""

import ast
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import av
import numpy as np
import pytest
import torch
from PIL import Image

from mmtrain.data.media.image_grids import Patches, frame_grid, video_grid
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.media.video import BadVideoError, VideoHeader
from mmtrain.data.media.vision_items import (
    VisionItemDecoder,
    count_used_frames,
    find_item_tenths,
    frame_choice,
    frame_settings,
    read_vision_items,
)
from mmtrain.recipe.settings.data_settings import ImageSettings, VideoSettings
from mmtrain.recipe.settings.vision_settings import VisionSettings
from tests.data.archives import movie
from tests.pixels import normalized

PATCH, MERGE, FRAMES = 14, 2, 2
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
MAX_DIFFERENCE = 1 / 255 * (1 + 1e-4)  # of a pixel; the rest is rounding


def _method_of_transformers(name: str, family: str = "qwen2_vl") -> Callable[..., Any]:
    """Return a method of a family's video processor from its source: importing the module may need torchvision."""
    import transformers

    path = Path(transformers.__file__).parent / "models" / family / f"video_processing_{family}.py"
    found = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    (function,) = found
    names: dict[str, Any] = {"math": math, "torch": torch, "np": np}
    future = "from __future__ import annotations\n"  # its annotations name classes of other modules
    exec(compile(future + ast.unparse(function), str(path), "exec"), names)
    method: Callable[..., Any] = names[name]
    return method


def test_counts_from_headers_are_those_of_the_processor_for_any_size_and_length() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    sample_frames = _method_of_transformers("sample_frames")
    rng = np.random.default_rng(5)
    video = VideoSettings(fps=2.0, min_frames=4, max_frames=96, min_pixels=128 * 28 * 28, max_pixels=768 * 28 * 28)
    processor = SimpleNamespace(num_frames=None, fps=2.0, temporal_patch_size=FRAMES, min_frames=4, max_frames=96)
    num_cut = 0
    for _ in range(1000):
        width, height = (int(side) for side in rng.integers(64, 2000, 2))
        num_frames, rate = int(rng.integers(2, 3000)), float(rng.choice([12.5, 23.976, 25, 29.97, 30, 60]))
        metadata = SimpleNamespace(total_num_frames=num_frames, fps=rate)
        expected = sample_frames(processor, metadata).tolist()
        if expected[-1] == num_frames:  # by rounding, of a frame behind the last one
            expected.pop()
        header = VideoHeader(width, height, num_frames, rate)
        used = count_used_frames(header, video, FRAMES)
        assert used == len(expected)
        assert list(frame_choice(video, used, FRAMES)(header)) == expected
        rows, cols = frame_grid(width, height, frame_settings(ImageSettings(), video), Patches(PATCH, MERGE))
        sides = smart_resize(height, width, factor=PATCH * MERGE, min_pixels=128 * 28 * 28, max_pixels=768 * 28 * 28)
        assert (rows * PATCH, cols * PATCH) == sides
        num_cut += used == 96
    assert 0 < num_cut < 1000


def test_frames_by_the_second_are_the_first_of_each_part_and_know_their_time(tmp_path: Path) -> None:
    """Of six frames in three seconds, four are taken at 4/3 a second: the first, second, fourth and fifth."""
    colours = ["red", "lime", "blue", "white", "black", "yellow"]
    (tmp_path / "a.mp4").write_bytes(movie(colours, seconds_each=0.5, width=16, height=16, rate=2, key_every=1))
    media = FileMedia(str(tmp_path / "a.mp4"))
    vision = VisionSettings(
        layers=1, hidden=16, heads=2, ffn=16, patch=8, temporal_patch=2, time_positions_per_second=4
    )
    image = ImageSettings(mean=(0, 0, 0), std=(1, 1, 1), min_pixels=64, max_pixels=256)
    video = VideoSettings(fps=4 / 3 + 0.01, max_pixels=64)
    items = read_vision_items("video", media, image, video, vision)
    assert items.grids == ((1, 1), (1, 1))
    assert items.times == (0, 6), "two frames last 1.5 s"
    decoder = VisionItemDecoder(image, 8, 2, video)
    patches = [normalized(decoder.patches("video", media, part, 2, (1, 1)), image) for part in range(2)]
    seen = [part.reshape(3, 2, 64).mean(axis=2).T for part in patches]
    expected = [[(1, 0, 0), (0, 1, 0)], [(1, 1, 1), (0, 0, 0)]]  # red, lime; white, black
    assert np.abs(np.array(seen) - expected).max() < 0.1
    by_number = read_vision_items("video", media, image, VideoSettings(max_frames=3), vision)
    assert len(by_number.grids) == 2
    plain = read_vision_items(
        "video", media, image, video, vision.model_copy(update={"time_positions_per_second": None})
    )
    assert plain.times is None


def test_a_number_of_frames_is_the_first_of_each_part_as_most_processors_take_them() -> None:
    judge = pytest.importorskip("transformers.video_utils").default_sample_indices_fn
    is_exact = "arange(num_frames" in inspect.getsource(judge)  # versions before rounded the step to whole frames
    sample_frames = _method_of_transformers("sample_frames")
    rng = np.random.default_rng(8)
    for _ in range(1000):
        num_frames = int(rng.integers(1, 5000))
        wanted = int(rng.integers(1, 65))
        video = VideoSettings(max_frames=wanted)
        header = VideoHeader(64, 48, num_frames, 25.0)
        used = count_used_frames(header, video, 1)
        ours = list(frame_choice(video, used, 1)(header))
        assert len(ours) == min(wanted, num_frames)  # where the processor raises an error, all frames are shown
        metadata = SimpleNamespace(total_num_frames=num_frames, fps=25.0)
        processor = SimpleNamespace(num_frames=used, fps=None, temporal_patch_size=1, min_frames=4, max_frames=768)
        assert ours == sample_frames(processor, metadata).tolist()[: len(ours)]
        assert not is_exact or ours == judge(metadata, num_frames=used).tolist()


@pytest.mark.parametrize("fps", [None, 0.7, 2.0])
def test_frames_in_the_middle_are_those_of_internvl(fps: float | None) -> None:
    sample_frames = _method_of_transformers("sample_frames", "internvl")
    rng = np.random.default_rng(7)
    video = VideoSettings(fps=fps, max_frames=64, sampling="middles")
    for _ in range(300):
        num_frames, rate = int(rng.integers(1, 900)), float(rng.choice([12.5, 23.976, 25, 29.97, 30, 60]))
        header = VideoHeader(64, 48, num_frames, rate)
        choose = frame_choice(video, 0, 1)
        ours = list(choose(header))
        assert count_used_frames(header, video, 1) == len(ours)
        processor = SimpleNamespace(num_frames=min(64, num_frames) if fps is None else None, initial_shift=True)
        wanted = 64 if fps is None else int(num_frames / rate * fps)
        if not 0 < wanted <= 64:  # it would take none, or more than `max_frames`
            assert len(ours) == (64 if wanted else 1)
            continue
        metadata = SimpleNamespace(total_num_frames=num_frames, fps=rate)
        assert ours == sample_frames(processor, metadata, fps=fps).tolist()


def test_frames_from_end_to_end_are_those_of_the_processor_for_any_size_and_length() -> None:
    """Numbers of frames, the grid that they share, and when each patch is shown."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    sample_frames = _method_of_transformers("sample_frames", "qwen3_vl")
    rng = np.random.default_rng(6)
    limits: dict[str, int] = {"min_pixels": 96 * 28 * 28, "max_pixels": 3000 * 28 * 28}
    video = VideoSettings(fps=2.0, min_frames=4, max_frames=96, sampling="ends", pixel_limits="video", **limits)
    processor = SimpleNamespace(num_frames=None, fps=2.0, min_frames=4, max_frames=96)
    counts = []
    for _ in range(1000):
        width, height = (int(side) for side in rng.integers(20, 2000, 2))
        num_frames, rate = int(rng.integers(2, 3000)), float(rng.choice([12.5, 23.976, 25, 29.97, 30, 60]))
        if rng.random() < 0.2:
            num_frames = int(rng.integers(2, 8))
        expected = sample_frames(processor, SimpleNamespace(total_num_frames=num_frames, fps=rate)).tolist()
        counts.append(len(expected))
        header = VideoHeader(width, height, num_frames, rate)
        choose = frame_choice(video, 0, FRAMES)
        assert count_used_frames(header, video, FRAMES) == len(expected)
        sides = smart_resize(len(expected), height, width, FRAMES, PATCH * MERGE, **limits)
        patches = Patches(PATCH, MERGE, 1 << 20, FRAMES)
        rows, cols = video_grid(width, height, len(expected), frame_settings(ImageSettings(), video), patches)
        assert (rows * PATCH, cols * PATCH) == sides
        times_s = Qwen3VLProcessor._calculate_timestamps(None, list(expected), rate, FRAMES)
        tenths = find_item_tenths(header, video, FRAMES)
        assert tenths is not None
        assert [f"{tenth / 10:.1f}" for tenth in tenths] == [f"{time_s:.1f}" for time_s in times_s]
        assert list(choose(header)) == expected + expected[-1:] * (len(expected) % FRAMES)
    assert {2, 3, 4, 96} <= set(counts)


@pytest.mark.parametrize("family", ["glm4v", "glm46v"])
def test_frames_and_times_of_glm_are_those_of_its_processors_for_any_length(family: str) -> None:
    """Videos of GLM-4.5V reach its longest one; those of GLM-4.6V have each of its rates, and none."""
    sample_frames = _method_of_transformers("sample_frames", family)
    is_older = family == "glm4v"
    video = VideoSettings(fps=2.0, max_frames=60, sampling="seconds")
    if not is_older:
        video = VideoSettings(max_frames=640, sampling="by_length")
    processor = SimpleNamespace(fps=2, max_duration=30, temporal_patch_size=FRAMES)
    rng = np.random.default_rng(9)
    lengths_s = []
    for _ in range(300):
        rate = float(rng.choice([1.0, 12.5, 24000 / 1001, 25, 30000 / 1001, 60]))
        num_frames = int(rng.integers(1, rng.choice([20, 500, 4000])))
        seconds = num_frames / rate
        if not is_older and int(seconds * 6) == 0:
            continue  # it takes none
        lengths_s.append(seconds)
        metadata = SimpleNamespace(total_num_frames=num_frames, fps=rate, duration=seconds)
        expected = sample_frames(processor, metadata).tolist()
        header = VideoHeader(64, 48, num_frames, rate)
        assert list(frame_choice(video, 0, FRAMES)(header)) == expected
        assert count_used_frames(header, video, FRAMES) == len(expected)
        tenths = find_item_tenths(header, video, FRAMES)
        assert tenths is not None
        shown_s = [frame / rate for frame in expected[::FRAMES]]
        if is_older:
            assert [tenth / 10 for tenth in tenths] == [int(time_s) for time_s in shown_s]
        else:
            assert [f"{tenth / 10:.1f}" for tenth in tenths] == [f"{time_s:.1f}" for time_s in shown_s]
    assert min(lengths_s) < 1 < 300 < 2400 < max(lengths_s)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize(("width", "height"), [(160, 120), (90, 320), (48, 40)])
def test_pixels_of_frames_equal_those_of_the_processor(tmp_path: Path, width: int, height: int, family: str) -> None:
    """Resize as torchvision does on a processor, by `interpolate` on whole numbers; make frames smaller, and larger.

    Frames are neither black nor white: overshoot beyond these is clipped otherwise than by Pillow, by up to 5 / 255.
    Qwen3-VL sees five frames, of which the last one fills two patches, within limits of all together.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_together

    is_together = family == "qwen3_vl"
    num_frames = 5 if is_together else 4
    rng = np.random.default_rng(width)
    noise = [rng.integers(64, 192, (height // 4, width // 4, 3), dtype=np.uint8) for _ in range(num_frames)]
    pictures = [Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC) for picture in noise]
    path = tmp_path / "a.mp4"
    path.write_bytes(movie(pictures, seconds_each=0.5, width=width, height=height, rate=2, key_every=1))
    with av.open(str(path)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    limits: dict[str, Any] = {"min_pixels": 84 * 84, "max_pixels": 112 * 112}
    if is_together:
        limits = {name: num_frames * limit for name, limit in limits.items()}
        sides = smart_resize_together(num_frames, height, width, FRAMES, PATCH * MERGE, **limits)
    else:
        sides = smart_resize(height, width, factor=PATCH * MERGE, **limits)
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(pixels, sides, mode="bicubic", antialias=True).float()
    mean, std = (255 * torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    patchify = _method_of_transformers("patchify", family)
    expected, *grid = patchify(None, ((resized - mean) / std)[None], PATCH, MERGE, FRAMES)

    image = ImageSettings(resample="bicubic", decode="full", mean=MEAN, std=STD)
    if is_together:
        limits |= {"sampling": "ends", "pixel_limits": "video"}
    video = VideoSettings(fps=2.0, **limits)
    vision = VisionSettings(
        layers=1, hidden=16, heads=2, ffn=16, patch=PATCH, temporal_patch=FRAMES, merge=MERGE,
        downsample="pixel_shuffle", positions="rotary",
    )  # fmt: skip
    media = FileMedia(str(path))
    grids = read_vision_items("video", media, image, video, vision).grids
    assert [(len(grids), *of_part) for of_part in grids] == [tuple(grid)] * len(grids)
    decoder = VisionItemDecoder(image, PATCH, FRAMES, video)
    patches = [decoder.patches("video", media, part, len(grids), of_part) for part, of_part in enumerate(grids)]
    parts = [normalized(part, image) for part in patches]
    _, rows, cols = grid
    ours = np.stack(parts).reshape(-1, rows // MERGE, MERGE, cols // MERGE, MERGE, expected.shape[-1])
    in_squares = ours.swapaxes(2, 3).reshape(-1, expected.shape[-1])
    differences = (in_squares - expected[0].numpy()).reshape(-1, 3, FRAMES * PATCH**2) * np.array(STD)[:, None]
    assert np.abs(differences).max() <= MAX_DIFFERENCE


@pytest.mark.parametrize("sampling", ["parts", "middles", "ends"])
@pytest.mark.parametrize("fps", [None, 1.0, 4.0])
def test_a_long_video_that_is_cut_is_like_one_that_ends_there(
    tmp_path: Path, sampling: Literal["parts", "middles", "ends"], fps: float | None
) -> None:
    colours = ["red", "lime", "blue", "white", "black", "yellow"]
    media = []
    for name, count in (("long", 6), ("short", 3)):
        content = movie(colours[:count], seconds_each=0.5, width=16, height=16, rate=4, key_every=1)
        (tmp_path / f"{name}.mp4").write_bytes(content)
        media.append(FileMedia(str(tmp_path / f"{name}.mp4")))
    vision = VisionSettings(
        layers=1, hidden=16, heads=2, ffn=16, patch=8, temporal_patch=2, time_positions_per_second=4
    )
    image = ImageSettings(min_pixels=64, max_pixels=256)
    whole = VideoSettings(fps=fps, sampling=sampling, max_frames=4)
    cut = whole.model_copy(update={"max_seconds": 1.5, "long_clips": "cut"})
    expected = read_vision_items("video", media[1], image, whole, vision)
    assert read_vision_items("video", media[0], image, cut, vision) == expected
    assert read_vision_items("video", media[1], image, cut, vision) == expected
    for part in range(len(expected.grids)):
        patches = [
            VisionItemDecoder(image, 8, 2, video).patches("video", medium, part, len(expected.grids), expected.grids[0])
            for video, medium in ((cut, media[0]), (whole, media[1]))
        ]
        assert np.array_equal(patches[0], patches[1])
    with pytest.raises(BadVideoError, match=r"long\.mp4: 3\.0 s is above data\.video\.max_seconds = 1\.5"):
        read_vision_items("video", media[0], image, cut.model_copy(update={"long_clips": "reject"}), vision)


def test_a_video_shorter_than_a_patch_shows_its_frame_again() -> None:
    header = VideoHeader(64, 64, 1, 25.0)
    assert count_used_frames(header, VideoSettings(fps=2.0, min_frames=4), FRAMES) == 2


def test_limits_of_frames_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="min_frames 9 is above max_frames 8"):
        VideoSettings(min_frames=9)
    with pytest.raises(ValueError, match="min_pixels 90 is above max_pixels 80"):
        VideoSettings(min_pixels=90, max_pixels=80)
    with pytest.raises(ValueError, match="min_frames is 4; allowed with sampling `seconds`: 1, leave it out"):
        VideoSettings(sampling="seconds", min_frames=4)
    with pytest.raises(ValueError, match="fps is 2, but sampling `by_length` has rates of its own; set it to null"):
        VideoSettings(sampling="by_length", fps=2)
