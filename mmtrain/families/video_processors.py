"""Read how a folder's video processor takes and prepares frames, as settings of `data.video`.

Frames are prepared as pictures are, so that a processor of videos must say the same of them as that of pictures.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtrain.errors import ModelFolderError
from mmtrain.families.clip import MEAN, STD
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings
from mmtrain.families.processor_files import read_processor

VIDEO_TYPE_KEY = "video_processor_type"
_EVERY_FRAME = 1 << 20  # more than any video has here
FRAME_COUNT: Settings = {"fps": None, "min_frames": 1, "max_frames": 8}  # of processors that assume none, as recipes do
_HALF = (0.5, 0.5, 0.5)
_BICUBIC = 3  # Pillow's number
_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


@dataclass(frozen=True)
class _Processor:
    """What a class of video processors assumes of the keys that a folder leaves out."""

    sampling: str
    mean: tuple[float, float, float] = MEAN
    std: tuple[float, float, float] = STD
    side: int | None = 384  # None: frames keep their aspect
    fps: float | None = None
    frames_have_limits: bool = False  # it reads `min_frames` and `max_frames`
    pixels_have_keys: bool = False  # it reads `min_pixels` and `max_pixels`
    samples: bool = False  # unless the folder or a call says otherwise
    most_seconds: int | None = None  # up to which it takes `fps` frames of each; its `num_frames` has no effect
    most_frames: int | None = None  # whatever the folder says, which has no effect on frames


_PROCESSORS: Mapping[str, _Processor] = {
    "Qwen2VLVideoProcessor": _Processor("parts", side=None, frames_have_limits=True, pixels_have_keys=True),
    "Qwen3VLVideoProcessor": _Processor(
        "ends", _HALF, _HALF, side=None, fps=2.0, frames_have_limits=True, samples=True
    ),
    "Glm4vVideoProcessor": _Processor("seconds", side=None, fps=2.0, samples=True, most_seconds=300),
    "Glm46VVideoProcessor": _Processor("by_length", side=None, samples=True, most_frames=640),
    "LlavaOnevisionVideoProcessor": _Processor("parts"),
    "InternVLVideoProcessor": _Processor("middles"),
}
_FEWEST_FRAMES, _MOST_FRAMES = 4, 768  # what those with limits assume


def read_video_settings(folder: Path, processor_type: str, image: Settings, vision: Settings) -> Settings:
    """Return the settings of `data.video` that the folder states, in the order in which `transformers` looks for them.

    processor_type: the class of the family's processor, if its file names none. image: settings of `data.image`.
    vision: the encoder's.

    Without a video processor the limits of images are those of frames too. Raises ModelFolderError for a file that
    cannot be read, or that states what is not supported.
    """
    stated = read_processor(folder, "video")
    if stated is None:
        return {}
    return _video_settings({VIDEO_TYPE_KEY: processor_type, **stated.config}, stated.where, image, vision)


def frame_keys(kind: str, video: Settings) -> dict[str, Any]:
    """Return the keys with which a class of processors takes the frames that `data.video` says, as far as it can.

    None: the key must not be there.
    """
    processor = _PROCESSORS[kind]
    if processor.most_frames is not None:
        return {}
    if processor.most_seconds is not None:
        fps = video["fps"]
        return {} if fps is None else {"fps": fps, "max_duration": max(1, int(video["max_frames"] / fps))}
    if video["fps"] is None and processor.fps is None:
        return {"num_frames": video["max_frames"], "fps": None, "min_frames": None, "max_frames": None}
    sampled = {"do_sample_frames": True} if processor.samples else {}
    limits = {key: video[key] for key in ("min_frames", "max_frames") if processor.frames_have_limits}
    return {"num_frames": None, "fps": video["fps"], **limits, **sampled}


def shows_every_frame(kind: str, config: Mapping[str, Any]) -> bool:
    """Return whether a processor takes all frames unless a call asks for fewer."""
    return not config.get("do_sample_frames", _PROCESSORS[kind].samples)


def _video_settings(config: Mapping[str, Any], where: str, image: Settings, vision: Settings) -> Settings:
    kind = str(config[VIDEO_TYPE_KEY])
    if kind not in _PROCESSORS:
        supported = ", ".join(_PROCESSORS)
        raise ModelFolderError(f"{where}: {VIDEO_TYPE_KEY} {kind!r} is not supported yet; supported: {supported}")
    section, processor = ConfigSection(config), _PROCESSORS[kind]
    _check_pixels(section, processor, image, vision)
    settings = {
        "sampling": processor.sampling,
        **_frames(section, processor, vision),
        **(_pixel_limits(section, processor) if processor.side is None else {}),
    }
    if section.problems:
        raise ModelFolderError(f"{where} ({kind}): " + "; ".join(section.problems))
    return settings


def _frames(section: ConfigSection, processor: _Processor, vision: Settings) -> Settings:
    """Read how many frames are taken. Without a number or a rate, the family's rate or the recipe's number holds."""
    if processor.most_frames is not None:
        section.require("do_sample_frames", True, default=True)
        return {"fps": None, "min_frames": 1, "max_frames": processor.most_frames}
    if processor.most_seconds is not None:
        return _frames_up_to(section, processor.most_seconds, processor.fps)
    if section.value("fps") is not None and section.value("num_frames") is not None:
        section.reject("num_frames", "excludes fps, as in the processor; leave one of the two out")
    if processor.sampling == "middles":
        section.require("initial_shift", True, default=True)
    if processor.samples and not section.flag("do_sample_frames", True):
        return {"fps": None, "min_frames": 1, "max_frames": _EVERY_FRAME}
    if section.value("num_frames") is not None:
        if processor.fps is not None:
            section.reject("num_frames", f"excludes the {processor.fps:g} frames a second that this processor takes")
        joined = vision["temporal_patch"] if processor.frames_have_limits else 1
        number = round(section.integer("num_frames") / joined) * joined
        return {"fps": None, "min_frames": 1, "max_frames": max(number, joined)}
    rate = section.number("fps") if section.value("fps") is not None else processor.fps
    if rate is None:
        return _frame_limits(section) if processor.frames_have_limits else {}
    limits = _frame_limits(section) if processor.frames_have_limits else {"max_frames": _EVERY_FRAME}
    return {"fps": rate, **limits}


def _frames_up_to(section: ConfigSection, most_seconds: int, assumed_fps: float | None) -> Settings:
    """Read the frames of a second, and up to which length of a video they are taken: a longer one has no more."""
    section.require("do_sample_frames", True, default=True)
    fps, seconds = section.number("fps", assumed_fps), section.integer("max_duration", most_seconds)
    if seconds * fps % 1:
        section.reject("max_duration", f"{seconds} is not supported yet; supported: whole frames at fps {fps:g}")
    return {"fps": fps, "min_frames": 1, "max_frames": max(1, int(seconds * fps))}


def _frame_limits(section: ConfigSection) -> Settings:
    """Return fewest and most frames; where they contradict each other, the upper limit holds."""
    most = section.integer("max_frames", _MOST_FRAMES)
    return {"min_frames": min(section.integer("min_frames", _FEWEST_FRAMES), most), "max_frames": most}


def _pixel_limits(section: ConfigSection, processor: _Processor) -> Settings:
    section.require("cap_pixels_per_frame", False, default=False)
    size = section.section("size")
    limits = {
        "min_pixels": size.optional_integer("shortest_edge"),
        "max_pixels": size.optional_integer("longest_edge"),
    }
    if processor.pixels_have_keys:
        limits = {name: section.optional_integer(name, limit) for name, limit in limits.items()}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _check_pixels(section: ConfigSection, processor: _Processor, image: Settings, vision: Settings) -> None:
    """Reject what the processor does with pixels of frames other than with those of pictures."""
    for key in ("do_resize", "do_rescale", "do_normalize"):
        section.require(key, True, default=True)
    section.require("do_center_crop", False, default=False)
    section.require("rescale_factor", 1 / 255, default=1 / 255)
    if processor.side is None:
        section.require("patch_size", vision["patch"], default=vision["patch"])
        section.require("merge_size", vision["merge"], default=vision["merge"])
        section.require("temporal_patch_size", vision["temporal_patch"], default=vision["temporal_patch"])
    else:
        side = image["size" if image["scheme"] == "fixed" else "tile"]
        size = section.section("size")
        for key in ("height", "width"):
            size.require(key, side, default=processor.side)
    filter_number = section.value("resample")
    resample = _FILTERS.get(_BICUBIC if filter_number is None else filter_number)
    stated = {
        "resample": (resample, image["resample"]),
        "image_mean": (_numbers(section.value("image_mean"), processor.mean), tuple(image["mean"])),
        "image_std": (_numbers(section.value("image_std"), processor.std), tuple(image["std"])),
    }
    for key, (of_frames, of_pictures) in stated.items():
        if of_frames != of_pictures:
            section.reject(key, f"{_shown(of_frames)} is not supported yet; supported: that of pictures, "
                                f"{_shown(of_pictures)}")  # fmt: skip


def _numbers(value: Any, assumed: tuple[float, float, float]) -> Any:
    """Return what is stated for three channels; one number holds for all of them."""
    if value is None:
        return assumed
    if isinstance(value, list):
        return tuple(value)
    return (value,) * 3


def _shown(value: Any) -> str:
    return json.dumps(value)
