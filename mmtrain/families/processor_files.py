"""Find the config of one processor among the files of a folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmtrain.errors import ModelFolderError
from mmtrain.families.folder_files import IMAGE_PROCESSOR_FILE, PROCESSOR_FILE

# The second one holds the processors of all media of a model, each under a key of its own.
_FILES = (IMAGE_PROCESSOR_FILE, PROCESSOR_FILE)
# Keys of `WhisperFeatureExtractor` and of no processor of images.
_AUDIO_KEYS = frozenset(
    {"chunk_length", "dither", "feature_size", "hop_length", "n_fft", "n_samples",
     "nb_max_frames", "padding_side", "padding_value", "return_attention_mask", "sampling_rate"}
)  # fmt: skip
_TYPE_KEYS = ("feature_extractor_type", "image_processor_type")


def read_processor(folder: Path, key: str, type_key: str) -> tuple[Path, Mapping[str, Any]] | None:
    """Return a processor's config and its file; None if no file has one.

    key: where the processor is in files of several. type_key: what tells its config from those of other media.

    Raises ModelFolderError for a file that cannot be read.
    """
    for name in _FILES:
        path = folder / name
        try:
            config = json.loads(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ModelFolderError(f"cannot read {path}: {error}") from None
        inner = config.get(key, config) if isinstance(config, dict) else None
        if isinstance(inner, dict) and type_key in inner:
            return path, inner
    return None


def without_other_processors(config: Mapping[str, Any], type_key: str) -> Mapping[str, Any]:
    """Return the keys of one processor, where a folder states those of pictures and clips together (Qwen2.5-Omni).

    type_key: that of the processor, as in `read_processor`.
    """
    if not all(key in config for key in _TYPE_KEYS):
        return config
    of_audio = type_key == "feature_extractor_type"
    return {key: value for key, value in config.items() if key == type_key or (key in _AUDIO_KEYS) == of_audio}
