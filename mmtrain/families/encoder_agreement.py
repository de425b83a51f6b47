"""Reject processors that prepare pictures for another encoder than that of their folder.

`transformers` and servers take the sizes of a processor from its files and those of the model from `config.json`. Where
they disagree, the model gets other patches than it has weights for, or the text another number of tokens than there are
features.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmtrain.errors import ModelFolderError
from mmtrain.families.family import FolderSettings, Settings
from mmtrain.families.folder_files import CONFIG_FILE, PROCESSOR_FILE
from mmtrain.families.processor_files import read_joint_file, read_processor

# Of a processor of patches: what the encoder calls each key, and what the class assumes where a folder leaves it out.
_PATCH_KEYS = {"patch_size": ("patch", 14), "merge_size": ("merge", 2), "temporal_patch_size": ("temporal_patch", 2)}


def check_encoder_agreement(folder: Path, settings: FolderSettings, image: Settings) -> None:
    """Compare a folder's processors with its model.

    image: settings of `data.image` that the processor states. Raises ModelFolderError, which names each key.
    """
    vision = settings.model["vision"]
    stated = read_processor(folder, "image")
    problems = []
    if stated is not None:
        of_pictures = _patches(stated.config, vision) if image["scheme"] == "native" else _tiles(image, settings)
        problems += [f"{stated.where}: {text}" for text in of_pictures]
    for key, expected in _of_text(image, vision).items():
        # What a folder leaves out is not compared: older versions wrote fewer keys.
        found = read_joint_file(folder).get(key, expected)
        if found != expected:
            problems.append(f"{folder / PROCESSOR_FILE}: {key}: {found} is not that of the model; allowed: {expected}")
    if problems:
        raise ModelFolderError(f"{'; '.join(problems)}. Correct the processor, or {folder / CONFIG_FILE}")


def _patches(config: Mapping[str, Any], vision: Settings) -> Iterator[str]:
    """Say which patches of a processor without tiles are not those of the encoder."""
    for key, (name, assumed) in _PATCH_KEYS.items():
        found = config.get(key, assumed)
        if found != vision[name]:
            yield f"{key}: {found} is not that of the model; allowed: {vision[name]}"


def _tiles(image: Settings, settings: FolderSettings) -> Iterator[str]:
    """Say which tiles, or pictures of one size, are not those of the encoder."""
    vision, of_model = settings.model["vision"], settings.data["image"]
    pixels = image["size" if image["scheme"] == "fixed" else "tile"]
    side, expected_side = pixels // vision["patch"], vision["max_side"]
    if side != expected_side:
        yield f"size: {pixels} pixels are {side} patches a side; allowed: the {expected_side} of the model"
    if image["scheme"] == "pinpoints" and image["pinpoints"] != of_model["pinpoints"]:
        canvases = json.dumps(of_model["pinpoints"])
        yield f"image_grid_pinpoints: not those of the model; allowed: {canvases}"


def _of_text(image: Settings, vision: Settings) -> Mapping[str, Any]:
    """Return the keys from which a processor counts the tokens of pictures whose size is always the same."""
    if image["scheme"] == "native":
        return {}
    num_patches = vision["max_side"] ** 2
    keeps_all = vision["class_feature"] or not vision["class_token"]
    expected = {
        "patch_size": vision["patch"],
        "image_seq_length": num_patches // vision["merge"] ** 2,
        "num_image_tokens": num_patches,
        "num_additional_image_tokens": int(vision["class_token"]),
        "vision_feature_select_strategy": "full" if keeps_all else "default",
    }
    most_tiles = vision["max_joined_tiles"]
    return expected if most_tiles is None else {**expected, "vision_aspect_ratio": f"anyres_max_{most_tiles}"}
