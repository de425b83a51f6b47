"""Find the config of one processor among the files of a folder, where `transformers` looks for it.

Since version 5 one file holds the processors of all media, each under a key of its own. It goes before the files of
their own that older versions wrote, which stay in a folder that is saved again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtrain.errors import ModelFolderError
from mmtrain.families.folder_files import IMAGE_PROCESSOR_FILE, PROCESSOR_FILE, VIDEO_PROCESSOR_FILE
from mmtrain.foreign_json import parse_json

# By medium: its keys in the file of all media, and the files of its own, in the order in which they are looked for.
_PLACES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "image": (("image_processor",), (IMAGE_PROCESSOR_FILE,)),
    "video": (("video_processor",), (VIDEO_PROCESSOR_FILE, IMAGE_PROCESSOR_FILE)),
    "audio": (("feature_extractor", "audio_processor"), (IMAGE_PROCESSOR_FILE,)),
}
# Keys of `WhisperFeatureExtractor` and of no processor of images.
AUDIO_KEYS = frozenset(
    {"chunk_length", "dither", "feature_size", "hop_length", "n_fft", "n_samples",
     "nb_max_frames", "padding_side", "padding_value", "return_attention_mask", "sampling_rate"}
)  # fmt: skip


@dataclass(frozen=True)
class StatedProcessor:
    """The config of a processor, and where it was found."""

    path: Path
    key: str | None  # of the file of all media
    config: Mapping[str, Any]  # without values that are null, which state nothing

    @property
    def where(self) -> str:
        """Return file and key, for messages."""
        return str(self.path) if self.key is None else f"{self.path}: {self.key}"


def read_processor(folder: Path, medium: str) -> StatedProcessor | None:
    """Return the config of the processor of a medium (`image`, `video`, `audio`); None if no file has one.

    Raises ModelFolderError for a file that cannot be read.
    """
    keys, names = _PLACES[medium]
    joint = read_joint_file(folder)
    for key in keys:
        if joint.get(key) is not None:
            return StatedProcessor(folder / PROCESSOR_FILE, key, _mapping(joint[key], folder / PROCESSOR_FILE, key))
    for name in names:
        config = _read(folder / name)
        if config is not None:
            return StatedProcessor(folder / name, None, _mapping(config, folder / name))
    return None


def read_joint_file(folder: Path) -> Mapping[str, Any]:
    """Return the file of all media, which also holds what is about text; empty if there is none.

    Raises ModelFolderError for a file that cannot be read.
    """
    return _read(folder / PROCESSOR_FILE) or {}


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"cannot read {path}: {error}") from None
    return _mapping(content, path)


def _mapping(value: object, path: Path, key: str | None = None) -> Mapping[str, Any]:
    """Return the values of a mapping that are not null."""
    if not isinstance(value, dict):
        where = path if key is None else f"{path}: {key}"
        raise ModelFolderError(f"{where}: found {type(value).__name__}, allowed: a mapping")
    return {name: item for name, item in value.items() if item is not None}
