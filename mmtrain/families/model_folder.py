"""Read what a Hugging Face folder says of its model: `config.json`, without weights."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mmtrain.errors import ModelFolderError
from mmtrain.families.audio_extractors import read_audio_settings
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.encoder_agreement import check_encoder_agreement
from mmtrain.families.family import Family, FolderSettings, Settings
from mmtrain.families.folder_files import CONFIG_FILE, PIPELINE_FILE
from mmtrain.families.generators import GENERATOR_CLASS_KEY
from mmtrain.families.image_processors import read_image_settings
from mmtrain.families.own_head import untied_if_stored_apart
from mmtrain.families.registry import ENCODER_FAMILIES, FAMILIES, GENERATOR_FAMILIES
from mmtrain.families.video_processors import read_video_settings

PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_TEXT_SECTIONS = ("thinker_config", "text_config")
_QUANTIZED_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a model of a known family, and what its config says."""

    path: Path
    family: Family
    settings: FolderSettings
    has_own_head: bool  # an output matrix with other values than the embeddings, to which the config ties it
    config: Mapping[str, Any]  # `config.json` as it is
    config_sha256: str

    def data_settings(self, section: str) -> Settings:
        """Return what a section of `data` is unless a recipe says otherwise: the processor's numbers, if there are any.

        Raises ModelFolderError for a processor that is not supported.
        """
        assumed = self.settings.data[section]
        if section == "image":
            image = read_image_settings(self.path, self.family.image_processor)
            if image is None:
                return assumed
            check_encoder_agreement(self.path, self.settings, image)
            return image
        if section == "audio":
            return read_audio_settings(self.path, self.settings.model["audio"]["mel_bins"]) or assumed
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

    def trained_config(self, num_tokens: int) -> Mapping[str, Any]:
        """Return the config of the trained model: with its vocabulary, and tied embeddings only if they are."""
        config = self.config
        if self.has_own_head:
            config = _changed(config, "tie_word_embeddings", False, is_everywhere=True)
        if num_tokens != self.settings.model["llm"]["vocab"]:
            config = _changed(config, "vocab_size", num_tokens)
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


def read_model_folder(path: Path) -> ModelFolder:
    """Read the config of a folder.

    Raises ModelFolderError, which names everything that is wrong or not supported.
    """
    return _parse(path, _config_bytes(path))


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


def _parse(path: Path, content: bytes) -> ModelFolder:
    config_path = path / CONFIG_FILE
    try:
        config = json.loads(content)
    except ValueError as error:
        raise ModelFolderError(f"{config_path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelFolderError(f"{config_path} holds no mapping")
    problems = [*_forbidden(path, config)]
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

    Raises ModelFolderError, which says what is supported and what is nearest.
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
    closest = get_close_matches(found, known, n=1)
    hint = f"; the nearest of these is {closest[0]}" if closest else ""
    raise ModelFolderError(
        f"{config_path}: {key} {found!r} is not supported; supported: {', '.join(sorted(known))}{hint}"
    )
