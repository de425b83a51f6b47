"""Write what a recipe overrides into the processors of a folder, which then prepare media as in training."""

import json
from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any

from mmtrain.errors import ModelFolderError
from mmtrain.families.family import Settings
from mmtrain.families.folder_files import CONFIG_FILE, IMAGE_PROCESSOR_FILE, VIDEO_PROCESSOR_FILE
from mmtrain.families.image_processors import FILTERS, GEMMA4_TOKENS, clip_image_processor
from mmtrain.families.model_folder import ModelFolder
from mmtrain.families.processor_files import StatedProcessor, read_processor
from mmtrain.families.video_processors import VIDEO_TYPE_KEY, frame_keys, shows_every_frame

# Which files are trained on, how they are cut into items, and what no processor has a setting for.
_NOT_OF_PROCESSORS = frozenset({"decode", "partial_patches", "long_clips", "item_seconds"})
_OF_PIXELS = frozenset({"resample", "mean", "std"})
_OF_FRAMES = frozenset({"fps", "min_frames", "max_frames"})
_LIMITS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # as `size` calls them
_PINPOINTS, _PINPOINTS_KEY = "pinpoints", "image_grid_pinpoints"
Changes = Mapping[str, Any]  # settings of a section of `data`


def write_trained_processors(folder: ModelFolder, data: Mapping[str, Settings], out: Path) -> tuple[str, ...]:
    """Change the processors in `out`, copies of those of `folder`, to what a run was trained with.

    data: all sections of the recipe's `data` that are about media, by name. Returns a line for each setting that was
    written, or that no processor of this family can state: found by reading the files again.
    """
    lines = []
    copy = replace(folder, path=out)
    for section in folder.settings.data:
        trained = data[section]
        before = _difference(copy, section, trained)
        if isinstance(before, str):
            lines.append(f"data.{section}: not in the exported processor: {before}")
            continue
        if not before:
            continue
        fixed = _passed_by_family(folder, section)
        changes = {key: trained[key] for key in before if key not in fixed}
        stated = read_processor(out, section)
        if stated is not None and changes:
            _write(stated, section, changes, trained, copy)
            if _PINPOINTS in changes:
                copy = _with_pinpoints(copy, trained)
            if section == "image" and "video" in folder.settings.data:
                _write_to_frames(stated, changes, data["video"], copy)
        after = _difference(copy, section, trained)
        remaining = before if isinstance(after, str) else after
        for key, value in before.items():
            setting = f"data.{section}.{key}"
            if key in remaining:
                lines.append(_unlike(setting, trained[key], value, key in fixed))
            else:
                lines.append(
                    f"{setting}: {_text(trained[key])} is in the processor now, in the place of {_text(value)}"
                )
        if section == "video" and changes.keys() & _OF_FRAMES - remaining.keys():
            lines += _on_sampling(copy)
    return tuple(lines)


def _with_pinpoints(folder: ModelFolder, image: Settings) -> ModelFolder:
    """Write the canvases of pictures into the config too, since the model computes with them."""
    path = folder.path / CONFIG_FILE
    config = {**json.loads(path.read_bytes()), _PINPOINTS_KEY: _plain(image[_PINPOINTS])}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    data = folder.settings.data
    of_model = {**data["image"], _PINPOINTS: image[_PINPOINTS]}
    return replace(folder, settings=replace(folder.settings, data={**data, "image": of_model}))


def differing_processors(folder: ModelFolder, data: Mapping[str, Settings]) -> tuple[str, ...]:
    """Return a line for each setting with which a run was trained and that the processors of its folder do not have."""
    lines = []
    for section in folder.settings.data:
        stated = _difference(folder, section, data[section])
        if isinstance(stated, str):
            lines.append(f"data.{section}: {stated}")
            continue
        for key, value in stated.items():
            is_fixed = key in _passed_by_family(folder, section)
            lines.append(_unlike(f"data.{section}.{key}", data[section][key], value, is_fixed))
    return tuple(lines)


def _passed_by_family(folder: ModelFolder, section: str) -> Settings:
    """Return the settings that the family's processor passes to that of a medium, whatever the files state."""
    return folder.family.video_processor if section == "video" else {}


def _unlike(setting: str, trained: object, stated: object, is_fixed: bool) -> str:
    line = f"{setting}: trained with {_text(trained)}, but the processor does {_text(stated)}"
    return f"{line}, whatever its files state; pass the trained value with each call" if is_fixed else line


def _on_sampling(folder: ModelFolder) -> tuple[str, ...]:
    """Say that a processor of videos takes fewer frames only where a call asks for it."""
    frames = read_processor(folder.path, "video")
    kind = folder.family.video_type
    if frames is None or not shows_every_frame(frames.config.get(VIDEO_TYPE_KEY, kind), frames.config):
        return ()
    return ("data.video: this processor shows every frame of a video unless a call passes do_sample_frames=True",)


def _difference(folder: ModelFolder, section: str, trained: Settings) -> dict[str, Any] | str:
    """Return what a folder's processor states otherwise than a recipe, or why it cannot be read."""
    try:
        stated = folder.data_settings(section)
    except ModelFolderError as error:
        return str(error)
    is_number = section == "video" and trained["fps"] is None  # of frames: then there is no smallest one
    ignored = _NOT_OF_PROCESSORS | ({"min_frames"} if is_number else set())
    return {key: value for key, value in stated.items() if key not in ignored and _plain(trained[key]) != _plain(value)}


def _write(processor: StatedProcessor, section: str, changes: Changes, trained: Settings, folder: ModelFolder) -> None:
    """Write the changes where the processor is stated; videos get a file of their own beside that of pictures."""
    content = json.loads(processor.path.read_bytes())
    config = content if processor.key is None else content[processor.key]
    changed = {"image": _images, "video": _videos, "audio": _clips}[section](config, changes, trained, folder)
    path = processor.path
    if processor.key is not None:
        changed = {**content, processor.key: changed}
    elif section == "video" and path.name == IMAGE_PROCESSOR_FILE:
        path = path.with_name(VIDEO_PROCESSOR_FILE)
    path.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def _write_to_frames(pictures: StatedProcessor, changes: Changes, trained: Settings, folder: ModelFolder) -> None:
    """Write how pixels are computed into a processor of videos of its own: frames are prepared as pictures are."""
    pixels = {key: changes[key] for key in _OF_PIXELS & changes.keys()}
    frames = read_processor(folder.path, "video")
    if pixels and frames is not None and (frames.path, frames.key) != (pictures.path, pictures.key):
        _write(frames, "video", pixels, trained, folder)


def _images(config: Changes, changes: Changes, trained: Settings, folder: ModelFolder) -> dict[str, Any]:
    changed = {**config, **_pixels(changes)}
    if changes.keys() & _LIMITS.keys():
        changed |= _limit_keys(config, trained, folder.settings.model["vision"])
    if changes.keys() & {"size", "fit"} and trained["scheme"] == "fixed" and "crop_size" in config:
        fitted = clip_image_processor(trained)
        changed |= {key: fitted.get(key, False) for key in ("image_processor_type", "size", "crop_size", "do_pad")}
    if "max_tiles" in changes:
        changed["max_patches"] = changes["max_tiles"]
    if _PINPOINTS in changes:
        changed[_PINPOINTS_KEY] = _plain(changes[_PINPOINTS])
    return changed


def _videos(config: Changes, changes: Changes, trained: Settings, folder: ModelFolder) -> dict[str, Any]:
    changed = {VIDEO_TYPE_KEY: folder.family.video_type, **config, **_pixels(changes)}
    if changes.keys() & _OF_FRAMES:
        changed |= frame_keys(changed[VIDEO_TYPE_KEY], trained)
    if changes.keys() & _LIMITS.keys():
        changed |= _with_limits(config, trained)
    return {key: value for key, value in changed.items() if value is not None}


def _clips(config: Changes, changes: Changes, trained: Settings, folder: ModelFolder) -> dict[str, Any]:
    """Change the longest clip, unless the encoder needs clips that are padded to just its own length."""
    seconds = changes.get("max_seconds")
    if seconds is None or seconds != int(seconds) or folder.settings.model["audio"]["clip_end"] == "silence":
        return dict(config)
    changed = {**config, "chunk_length": int(seconds)}
    rate = config.get("sampling_rate", 16_000)
    if "n_samples" in config:
        changed["n_samples"] = int(seconds) * rate
    if "nb_max_frames" in config:
        changed["nb_max_frames"] = int(seconds) * rate // config.get("hop_length", 160)
    return changed


def _pixels(changes: Changes) -> dict[str, Any]:
    """Return the keys of how pixels are computed."""
    stated: dict[str, Any] = {}
    if "resample" in changes:
        stated["resample"] = FILTERS[changes["resample"]]
    if "mean" in changes:
        stated["image_mean"] = list(changes["mean"])
    if "std" in changes:
        stated["image_std"] = list(changes["std"])
    return stated


def _limit_keys(config: Changes, trained: Settings, vision: Settings) -> dict[str, Any]:
    """Return the keys of the limits of pictures; none if the processor has no value for them."""
    if trained["pixel_limits"] == "sides":
        return {"size": _square(trained)}
    if trained["pixel_limits"] == "area":
        num_tokens, rest = divmod(trained["max_pixels"], (vision["patch"] * vision["merge"]) ** 2)
        return {"max_soft_tokens": num_tokens} if num_tokens in GEMMA4_TOKENS and not rest else {}
    return _with_limits(config, trained)


def _with_limits(config: Changes, trained: Settings) -> dict[str, Any]:
    """Return the keys of both limits: `size`, and the older ones where the config has them."""
    size = {edge: trained[key] for key, edge in _LIMITS.items()}
    return {"size": size, **{key: trained[key] for key in _LIMITS if config.get(key) is not None}}


def _square(trained: Settings) -> dict[str, int]:
    """Return the `size` of a processor whose pictures must fit into a square."""
    return {"longest_edge": isqrt(trained["max_pixels"])}


def _plain(value: object) -> object:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _text(value: object) -> str:
    return json.dumps(_plain(value))
