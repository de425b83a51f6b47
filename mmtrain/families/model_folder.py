"""Read what a Hugging Face folder says of its model: `config.json`, without weights.

Two things are compared with other files of the folder. Where the config ties the embeddings, the files may hold an
output matrix with values of its own; `transformers` then does not tie them. (Files that were converted from pickled
ones may hold the tied matrix twice.) `transformers` and servers take the sizes of a processor from its files and those
of the model from `config.json`. Where they disagree, the model gets other patches than it has weights for, or the text
another number of tokens than there are features; so such a folder is rejected.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmtrain.errors import ModelFolderError, UnknownModelError
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Family, FolderSettings, Settings
from mmtrain.families.folder_files import CONFIG_FILE, PIPELINE_FILE, PROCESSOR_FILE, WEIGHT_FILES
from mmtrain.families.generators import GENERATOR_CLASS_KEY
from mmtrain.families.guest_folder import nearest_family, read_guest
from mmtrain.families.image_processors import read_image_settings
from mmtrain.families.processor_files import AUDIO_KEYS, read_joint_file, read_processor
from mmtrain.families.registry import ENCODER_FAMILIES, FAMILIES, GENERATOR_FAMILIES, plugin_families
from mmtrain.families.stored_tensors import StoredWeight, are_equal, read_headers
from mmtrain.families.video_processors import read_video_settings
from mmtrain.families.weight_layouts import respell
from mmtrain.foreign_json import parse_json

PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_TEXT_SECTIONS = ("thinker_config", "text_config")
_QUANTIZED_KEYS = ("quantization_config", "compression_config")
# Of a processor of patches: what the encoder calls each key, and what the class assumes where a folder leaves it out.
_PATCH_KEYS = {"patch_size": ("patch", 14), "merge_size": ("merge", 2), "temporal_patch_size": ("temporal_patch", 2)}
_POOLED_KEYS = {"patch_size": ("patch", 16), "pooling_kernel_size": ("merge", 3)}  # likewise, of pictures of one area
_SAMPLE_RATE_HZ = 16_000
# Keys that follow from others, or that say how a batch of clips is padded.
_WITHOUT_EFFECT = (
    "feature_extractor_type", "processor_class", "n_samples", "nb_max_frames", "padding",
    "return_attention_mask", "return_tensors",
)  # fmt: skip


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a model of a known family, and what its config says."""

    path: Path
    family: Family
    settings: FolderSettings
    has_own_head: bool  # an output matrix with other values than the embeddings, to which the config ties it
    config: Mapping[str, Any]  # `config.json` as it is
    config_sha256: str
    is_guest: bool = False  # `transformers` builds its modules; see `guest_folder`

    @property
    def nearest_family(self) -> str:
        """The family that is most like a guest."""
        return nearest_family(self.config)

    def data_settings(self, section: str) -> Settings:
        """Return what a section of `data` is unless a recipe says otherwise: the processor's numbers, if there are any.

        Raises ModelFolderError for a processor that is not supported.
        """
        assumed = self.settings.data[section]
        if section == "image":
            image = read_image_settings(self.path, self.family.image_processor)
            if image is None:
                return assumed
            check_encoder_agreement(self.path, self.settings, image, self.family)
            return image
        if section == "audio":
            return self._audio_settings(assumed)
        if section == "video":
            vision = self.settings.model["vision"]
            stated = read_video_settings(self.path, self.family.video_type, self.data_settings("image"), vision)
            fixed = self.family.video_processor
            if "fps" in fixed and stated.get("fps", fixed["fps"]) != fixed["fps"]:
                raise ModelFolderError(
                    f"{self.path}: its processor of videos takes other frames than the {fixed['fps']:g} a second by "
                    f"which {self.family.name} counts time; remove fps and num_frames from it"
                )
            return {**assumed, **stated, **fixed}
        return assumed

    def _audio_settings(self, assumed: Settings) -> Settings:
        audio = self.settings.model["audio"]
        stated = read_audio_settings(self.path, audio["mel_bins"])
        if stated is None:
            return assumed
        if audio["clip_end"] == "mirrored":  # an extractor that does not pad clips does not cut them either
            stated = {**stated, "long_clips": "reject"}
        return {**assumed, **stated}

    def trained_config(self, num_tokens: int) -> Mapping[str, Any]:
        """Return the config of the trained model: with its vocabulary, and tied embeddings only if they are."""
        config = self.config
        if self.has_own_head:
            config = _changed(config, "tie_word_embeddings", False, is_everywhere=True)
        if num_tokens != self.settings.model["llm"]["vocab"]:
            config = _changed(config, "vocab_size", num_tokens)
            if self.settings.model["llm"].get("per_layer_embeddings") is not None:
                config = _changed(config, "vocab_size_per_layer_input", num_tokens)
        return config


def _changed(config: Mapping[str, Any], key: str, value: object, is_everywhere: bool = False) -> Mapping[str, Any]:
    """Return a config, or a section of one, that states another value of a key in the section of the LLM.

    Families with media have a section for it, beside which older folders repeat its keys. is_everywhere: also state it
    in the sections around that, which may assume another value.
    """
    section = next((name for name in _TEXT_SECTIONS if isinstance(config.get(name), Mapping)), None)
    inner = {} if section is None else {section: _changed(config[section], key, value, is_everywhere)}
    is_stated = is_everywhere or section is None or key in config
    return {**config, **inner, **({key: value} if is_stated else {})}


def read_model_folder(path: Path, as_guest: bool = False) -> ModelFolder:
    """Read the config of a folder; `as_guest`: of a model whose modules `transformers` builds, whatever its family.

    Raises ModelFolderError, which names everything that is wrong or not supported; UnknownModelError for a model of no
    family.
    """
    return _parse(path, _config_bytes(path), as_guest)


def _config_bytes(path: Path) -> bytes:
    if not path.is_dir():
        raise ModelFolderError(
            f"there is no folder {path}; allowed: a folder in the layout of Hugging Face, or a model of the hub "
            "(ORG/NAME, or ORG/NAME@REVISION)"
        )
    if (path / PIPELINE_FILE).is_file():
        raise ModelFolderError(
            f"{path} is a pipeline of diffusers; name the folder of its generator, {path}/unet or {path}/transformer"
        )
    try:
        return (path / CONFIG_FILE).read_bytes()
    except OSError as error:
        raise ModelFolderError(
            f"cannot read {path / CONFIG_FILE}: {error.strerror}; allowed: a folder in the layout of Hugging Face"
        ) from None


def _parse(path: Path, content: bytes, as_guest: bool) -> ModelFolder:
    config_path = path / CONFIG_FILE
    try:
        config = parse_json(content)
    except ValueError as error:
        raise ModelFolderError(f"{config_path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelFolderError(f"{config_path} holds no mapping")
    problems = [*_forbidden(path, config)]
    if as_guest:
        if problems:
            raise ModelFolderError(f"{config_path} (guest): " + "; ".join(problems))
        family, settings = read_guest(config, path)
        return ModelFolder(path, family, settings, False, config, hashlib.sha256(content).hexdigest(), is_guest=True)
    family = find_family(config, config_path)
    section = ConfigSection(config)
    settings = family.settings(section)
    section.finish()
    problems += section.problems
    if problems:
        raise ModelFolderError(f"{config_path} ({family.name}): " + "; ".join(problems))
    of_weights = untied_if_stored_apart(path, family, settings)
    has_own_head = of_weights is not settings
    return ModelFolder(path, family, of_weights, has_own_head, config, hashlib.sha256(content).hexdigest())


def _forbidden(path: Path, config: Mapping[str, Any]) -> list[str]:
    """Return what keeps any folder from being used, whatever its family."""
    problems = []
    if config.get("auto_map"):
        problems.append("auto_map: the folder needs Python code of its own, which is never run; use a folder without")
    for key in _QUANTIZED_KEYS:
        if config.get(key):
            problems.append(f"{key}: quantized weights cannot be trained; use the folder of the bf16 or fp16 model")
    names = [entry.name for entry in path.iterdir()]
    pickled = sorted(name for name in names if name.endswith(PICKLED_SUFFIXES))
    if pickled and not any(name.endswith(".safetensors") for name in names):
        problems.append(
            f"{pickled[0]}: pickled weights can run code and are not read; convert them to safetensors "
            "(`save_pretrained` of transformers does)"
        )
    return problems


def find_family(config: Mapping[str, Any], config_path: Path) -> Family:
    """Return the family of a config by its `architectures`, or by its `model_type` if it names none.

    Configs of `diffusers` name a class instead.

    Raises UnknownModelError, which says what is supported and what is nearest.
    """
    families = FAMILIES | ENCODER_FAMILIES
    by_architecture = {name: family for family in families.values() for name in family.architectures}
    architectures = config.get("architectures")
    if GENERATOR_CLASS_KEY in config:
        key, found = GENERATOR_CLASS_KEY, str(config[GENERATOR_CLASS_KEY])
        known = {name: family for family in GENERATOR_FAMILIES.values() for name in family.architectures}
    elif isinstance(architectures, list) and architectures:
        key, found, known = "architectures", str(architectures[0]), by_architecture
    else:
        key, found, known = "model_type", str(config.get("model_type")), families
    if found in known:
        return known[found]
    for family in plugin_families():
        if found in (family.name, *family.architectures):
            return family
    closest = get_close_matches(found, known, n=1)
    hint = f"; the nearest of these is {closest[0]}" if closest else ""
    raise UnknownModelError(
        f"{config_path}: {key} {found!r} is not supported; supported: {', '.join(sorted(known))}{hint}"
    )


def untied_if_stored_apart(folder: Path, family: Family, settings: FolderSettings) -> FolderSettings:
    """Return settings without tied embeddings if both matrices are in the files and differ; else `settings`.

    Reads headers, and both matrices up to the first difference. A folder without weights, or with damaged ones, is left
    to whoever opens its weights.
    """
    is_tied = "llm" in settings.model and settings.model["llm"]["tie_embeddings"]
    if not is_tied or not any((folder / name).is_file() for names in WEIGHT_FILES for name in names):
        return settings
    llm = {**settings.model["llm"], "tie_embeddings": False}
    untied = replace(settings, model={**settings.model, "llm": llm})
    matrices = [source for source in family.weights(untied) if source.has_token_rows]
    try:
        stored = read_headers(folder)
        for spelling in family.spellings:
            names = [source.blocks[0].tensor for source in respell(matrices, spelling)]
            if all(name in stored for name in names) and not _are_copies(folder, stored, names):
                return untied
    except (ModelFolderError, OSError):
        return settings
    return settings


def _are_copies(folder: Path, stored: Mapping[str, StoredWeight], names: list[str]) -> bool:
    first, second = (stored[name] for name in names)
    states = ((folder / weight.file).stat() for weight in (first, second))
    return _compare_both(folder, first, second, tuple((state.st_size, state.st_mtime_ns) for state in states))


@lru_cache(maxsize=16)  # a process reads its folder several times, and copies that are equal are read to the end
def _compare_both(
    folder: Path, first: StoredWeight, second: StoredWeight, version: tuple[tuple[int, int], ...]
) -> bool:
    """Compare two tensors; `version` makes files that were written anew new arguments."""
    return are_equal(folder, first, second)


def check_encoder_agreement(folder: Path, settings: FolderSettings, image: Settings, family: Family) -> None:
    """Compare a folder's processors with its model, and with what the family writes into text.

    image: settings of `data.image` that the processor states. Raises ModelFolderError, which names each key.
    """
    vision = settings.model["vision"]
    stated = read_processor(folder, "image")
    problems = []
    if stated is not None:
        problems += [f"{stated.where}: {text}" for text in _wrong_pictures(stated.config, image, settings)]
    for key, expected in {**_text_keys(image, vision), **_row_tokens(family)}.items():
        # What a folder leaves out is not compared: older versions wrote fewer keys.
        found = read_joint_file(folder).get(key, expected)
        if found != expected:
            problems.append(f"{folder / PROCESSOR_FILE}: {key}: {found} is not that of the model; allowed: {expected}")
    if problems:
        raise ModelFolderError(f"{'; '.join(problems)}. Correct the processor, or {folder / CONFIG_FILE}")


def _wrong_pictures(config: Mapping[str, Any], image: Settings, settings: FolderSettings) -> Iterator[str]:
    """Say which patches or tiles of a processor's config are not those of the encoder."""
    if image["scheme"] != "native":
        yield from _wrong_tiles(image, settings)
    elif image["pixel_limits"] != "sides":  # Pixtral's reads them in the file of all media
        yield from _wrong_patches(config, image, settings.model["vision"])


def _wrong_patches(config: Mapping[str, Any], image: Settings, vision: Settings) -> Iterator[str]:
    """Say which patches of a processor without tiles are not those of the encoder."""
    for key, (name, assumed) in (_POOLED_KEYS if image["pixel_limits"] == "area" else _PATCH_KEYS).items():
        found = config.get(key, assumed)
        if found != vision[name]:
            yield f"{key}: {found} is not that of the model; allowed: {vision[name]}"


def _wrong_tiles(image: Settings, settings: FolderSettings) -> Iterator[str]:
    """Say which tiles, or pictures of one size, are not those of the encoder."""
    vision, of_model = settings.model["vision"], settings.data["image"]
    pixels = image["size" if image["scheme"] == "fixed" else "tile"]
    side, expected_side = pixels // vision["patch"], vision["max_side"]
    if side != expected_side:
        yield f"size: {pixels} pixels are {side} patches a side; allowed: the {expected_side} of the model"
    if image["scheme"] == "pinpoints" and image["pinpoints"] != of_model["pinpoints"]:
        canvases = json.dumps(of_model["pinpoints"])
        yield f"image_grid_pinpoints: not those of the model; allowed: {canvases}"


def _text_keys(image: Settings, vision: Settings) -> Mapping[str, Any]:
    """Return the keys from which a processor counts the tokens of pictures."""
    if image["scheme"] == "native":
        is_of_pixtral = image["pixel_limits"] == "sides"
        return {"patch_size": vision["patch"], "spatial_merge_size": vision["merge"]} if is_of_pixtral else {}
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


def _row_tokens(family: Family) -> Mapping[str, str]:
    """Return the tokens that a processor writes for the rows of a picture, of a family whose rows are apart."""
    markup = family.markups.get("image")
    if markup is None or markup.row_break is None:
        return {}
    return {
        "image_token": markup.feature_token,
        "image_break_token": markup.row_break,
        "image_end_token": markup.suffix,
    }


def read_audio_settings(folder: Path, mel_bins: int) -> Settings | None:
    """Return the settings of `data.audio` under which frames are those of the folder's feature extractor.

    mel_bins: of the encoder.

    None for a folder that states none. Raises ModelFolderError, which names what is not supported.
    """
    stated = read_processor(folder, "audio")
    if stated is None:
        return None
    kind = stated.config.get("feature_extractor_type", "WhisperFeatureExtractor")  # the only one of these families
    if kind != "WhisperFeatureExtractor":
        raise ModelFolderError(
            f"{stated.where}: feature_extractor_type {kind!r} is not supported yet; supported: "
            "WhisperFeatureExtractor. data.audio.scheme in the recipe chooses another way to prepare clips"
        )
    of_clips = (*AUDIO_KEYS, *_WITHOUT_EFFECT, "do_normalize", "mel_filters")
    is_joint = "image_processor_type" in stated.config
    section = ConfigSection({key: stated.config[key] for key in stated.config if not is_joint or key in of_clips})
    section.pass_over(*_WITHOUT_EFFECT)
    section.require("feature_size", mel_bins, default=80)
    section.require("sampling_rate", _SAMPLE_RATE_HZ, default=_SAMPLE_RATE_HZ)
    section.require("hop_length", 160, default=160)
    section.require("n_fft", 400, default=400)
    section.require("padding_value", 0, 0.0, default=0.0)
    section.require("dither", 0, 0.0, default=0.0)
    section.require("do_normalize", False, None, default=False)
    section.require("padding_side", "right", default="right")
    settings = {"scheme": "dynamic", "max_seconds": section.number("chunk_length", 30), "long_clips": "cut"}
    section.value("mel_filters")  # some folders store the filters, which follow from the sizes above
    section.finish()
    if section.problems:
        raise ModelFolderError(f"{stated.where} ({kind}): " + "; ".join(section.problems))
    return settings
