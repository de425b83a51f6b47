"""Read how a folder's video processor takes frames, as settings of `data.video`."""

import json
from pathlib import Path
from typing import Any

from mmtrain.errors import ModelFolderError
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings
from mmtrain.families.folder_files import IMAGE_PROCESSOR_FILE, PROCESSOR_FILE, VIDEO_PROCESSOR_FILE

_VIDEO_KEY = "video_processor"  # in a file with the processors of all media


def read_video_settings(folder: Path) -> Settings:
    """Return the settings of `data.video` that the folder states, in the order in which `transformers` looks for them.

    Without a video processor the limits of images are those of frames too. Raises ModelFolderError for a file that
    cannot be read, or that states what is not supported.
    """
    for name in (VIDEO_PROCESSOR_FILE, PROCESSOR_FILE, IMAGE_PROCESSOR_FILE):
        config = _read_config(folder / name)
        if name == PROCESSOR_FILE:
            config = config.get(_VIDEO_KEY)
        if isinstance(config, dict) and config:
            return _video_settings(config, folder / name)
    return {}


def _read_config(path: Path) -> Any:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"cannot read {path}: {error}") from None
    return config if isinstance(config, dict) else {}


def _video_settings(config: dict[str, Any], path: Path) -> Settings:
    section = ConfigSection(config)
    size = section.section("size")
    section.require("num_frames", None, default=None)
    section.require("initial_shift", None, True, default=None)  # InternVL: frames in the middle of equal parts
    section.require("cap_pixels_per_frame", None, False, default=None)
    stated = {
        "fps": section.number("fps") if section.value("fps") is not None else None,
        "min_frames": section.optional_integer("min_frames"),
        "max_frames": section.optional_integer("max_frames"),
        "min_pixels": section.optional_integer("min_pixels", size.optional_integer("shortest_edge")),
        "max_pixels": section.optional_integer("max_pixels", size.optional_integer("longest_edge")),
    }
    if section.problems:
        raise ModelFolderError(f"{path}: " + "; ".join(section.problems))
    return {name: value for name, value in stated.items() if value is not None}
