"""Describe a Hugging Face folder: its family, its units, its weights, and the files that text needs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from mmtrain.data.index.sample_lengths import count_image_features
from mmtrain.data.media.audio import HOP_SAMPLES, SAMPLE_RATE_HZ
from mmtrain.data.text.folder_templates import find_templates
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.errors import DataError, ModelFolderError, UnknownModelError
from mmtrain.families import read_model_folder
from mmtrain.families.family import Settings
from mmtrain.families.folder_files import CONFIG_FILE, TOKENIZER_FILE, WEIGHT_FILES
from mmtrain.families.model_folder import ModelFolder
from mmtrain.families.processor_files import read_processor
from mmtrain.limited_reads import Bounds, done_reading, now_reading, read_within
from mmtrain.recipe.loading.apply_model_folder import read_as_guest
from mmtrain.recipe.settings.audio_settings import AudioSettings
from mmtrain.recipe.settings.base import Section
from mmtrain.recipe.settings.data_settings import ImageSettings
from mmtrain.recipe.settings.vision_settings import VisionSettings
from mmtrain.weights.folder_tensors import DTYPES, FolderTensors
from mmtrain.weights.guest_weights import with_guest_weights
from mmtrain.weights.match_tensors import match_tensors

SHOWN_IMAGES = ((336, 336), (1280, 960), (3840, 2160))  # width x height in pixels
MAX_FOLDER_BYTES = 2 << 30  # of memory; some MiB for headers of weights, and tokenizers have a bound of their own
# Unit -> what prepares its media, and the medium by which `read_processor` finds that.
_SectionT = TypeVar("_SectionT", bound=Section)
_PROCESSORS = {
    "vision": ("image processor", "image"),
    "audio": ("feature extractor", "audio"),
}


@dataclass(frozen=True)
class UnitSummary:
    """A unit that training can start from."""

    name: str
    layers: int  # transformer blocks; of a U-Net those of a level
    hidden: int
    heads: int
    parameters: int  # with embeddings and projector, without padding


@dataclass(frozen=True)
class FolderSummary:
    """What a folder holds. The fields of weights are None for a folder with a config only."""

    folder: str
    family: str
    units: tuple[UnitSummary, ...]
    files: int | None
    tensors: int | None
    num_bytes: int | None
    dtypes: tuple[str, ...] | None
    tensors_passed_over: tuple[str, ...]  # that hold nothing of their own
    has_own_head: bool  # an output matrix, although the config ties it to the embeddings
    found_in: Mapping[str, str | None]  # what training takes from the folder beside weights -> its file; None: nowhere
    text_problems: tuple[str, ...]  # what is wrong with tokenizer and chat template, and what to know of them
    media_tokens: Mapping[str, float]  # what a medium becomes for the LLM, without the marks around it
    not_built: Mapping[str, str]  # by modality: the key that keeps a tower from being built
    is_guest: bool = False  # no family covers it; `transformers` builds its modules


def inspect_folder(path: Path) -> FolderSummary:
    """Read config and headers of a folder. Raises ModelFolderError for one that training cannot start from."""
    values = read_within(Bounds(MAX_FOLDER_BYTES), lambda _: asdict(_inspect(path)))
    units = tuple(UnitSummary(**unit) for unit in values["units"])
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    summary = FolderSummary(**(values | lists | {"units": units}))
    return _inspect_guest(summary, path) if summary.is_guest else summary


def _inspect_guest(summary: FolderSummary, path: Path) -> FolderSummary:
    """Count and compare the parameters that `transformers` says a guest has: here, where its modules are loaded."""
    folder = with_guest_weights(read_model_folder(path, as_guest=True))
    summary = replace(summary, units=_units(folder))
    if summary.files is None:
        return summary
    return replace(summary, tensors_passed_over=match_tensors(folder, FolderTensors.of(path)).passed_over)


def _units(folder: ModelFolder) -> tuple[UnitSummary, ...]:
    parameters: Counter[str] = Counter()
    for source in folder.family.weights(folder.settings):
        unit = source.name.partition(".")[0]
        parameters[unit] += sum(prod(hi - lo for lo, hi in block.view_box) for block in source.blocks)
    return tuple(
        UnitSummary(name, settings["layers"], *_width_and_heads(settings), parameters[name])
        for name, settings in folder.settings.model.items()
    )


def _inspect(path: Path) -> FolderSummary:
    now_reading(f"{path / CONFIG_FILE}")
    try:
        folder = read_model_folder(path)
    except UnknownModelError as error:
        folder = read_as_guest(path, error)
    summary = FolderSummary(
        folder=str(path),
        family=folder.family.name,
        units=_units(folder),
        files=None,
        tensors=None,
        num_bytes=None,
        dtypes=None,
        tensors_passed_over=(),
        has_own_head=folder.has_own_head,
        found_in=_found_in(folder, path),
        text_problems=_text_problems(path),
        media_tokens=_media_tokens(folder),
        not_built=folder.settings.not_built,
        is_guest=folder.is_guest,
    )
    done_reading()  # of tensors there may be a hundred thousand
    if not any((path / name).exists() for names in WEIGHT_FILES for name in names):
        return summary
    stored = FolderTensors.of(path)
    passed_over = () if folder.is_guest else match_tensors(folder, stored).passed_over
    files = {weight.file for weight in stored.tensors.values()}
    return replace(
        summary,
        files=len(files),
        tensors=len(stored.tensors),
        tensors_passed_over=passed_over,
        num_bytes=sum((path / file).stat().st_size for file in files),
        dtypes=tuple(sorted({DTYPES.get(weight.dtype, weight.dtype) for weight in stored.tensors.values()})),
    )


def _width_and_heads(settings: Settings) -> tuple[int, int]:
    """Return the width of a unit and its heads; of a generator those of its widest level."""
    if "widths" not in settings:
        return settings["hidden"], settings["heads"]
    return max(settings["widths"]), max(settings["heads"])


def _media_tokens(folder: ModelFolder) -> dict[str, float]:
    """Return the LLM tokens of images of some sizes, and of a second of sound, for the encoders of a folder."""
    tokens: dict[str, float] = {}
    units = folder.settings.model
    if "vision" in units and "image" in folder.settings.data:
        vision = _validated(VisionSettings, units["vision"], folder, "its vision encoder is not a possible one")
        image = _image_settings(folder)
        for width, height in SHOWN_IMAGES:
            tokens[f"image of {width} x {height}"] = count_image_features(width, height, vision, image)
    if "audio" in units:
        audio = _validated(AudioSettings, units["audio"], folder, "its audio encoder is not a possible one")
        tokens["second of sound"] = audio.count_cells(SAMPLE_RATE_HZ // HOP_SAMPLES) / audio.cells_per_feature
    return tokens


def _found_in(folder: ModelFolder, path: Path) -> dict[str, str | None]:
    """Return the file in which training finds each thing that it takes from a folder beside the weights.

    The same thing lies in other files from one version of `transformers` to the next.
    """
    found: dict[str, str | None] = {"tokenizer": TOKENIZER_FILE if (path / TOKENIZER_FILE).is_file() else None}
    try:
        found["chat template"] = find_templates(path, folder.family.has_processor).default.name.removeprefix(f"{path}/")
    except DataError:
        found["chat template"] = None
    for unit, (what, medium) in _PROCESSORS.items():
        if unit in folder.settings.model:
            processor = read_processor(path, medium)
            found[what] = None if processor is None else processor.path.name
    return found


def _image_settings(folder: ModelFolder) -> ImageSettings:
    values = folder.data_settings("image")
    return _validated(ImageSettings, values, folder, "no pictures can be prepared as its processor says")


def _validated(kind: type[_SectionT], values: Mapping[str, Any], folder: ModelFolder, problem: str) -> _SectionT:
    """Return settings that a folder stands for. Raises ModelFolderError, which begins with the problem."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors())
        raise ModelFolderError(f"{folder.path}: {problem}: {found}") from None


def _text_problems(path: Path) -> tuple[str, ...]:
    if not (path / TOKENIZER_FILE).is_file():
        return ()
    try:
        return load_tokenizer(path).warnings
    except DataError as error:
        return (str(error),)
