"""The families that can be trained from a folder. To add one, see CONTRIBUTING.md."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mmtrain.errors import PluginError, UserError
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.encoders import CLIP, SIGLIP, WHISPER
from mmtrain.families.family import Family, FolderSettings, JsonFiles, NewModel
from mmtrain.families.folder_files import CONFIG_FILE, IMAGE_PROCESSOR_FILE
from mmtrain.families.gemma3 import GEMMA3
from mmtrain.families.gemma3_text import GEMMA3_TEXT
from mmtrain.families.gemma4 import GEMMA4
from mmtrain.families.gemma4_text import GEMMA4_TEXT
from mmtrain.families.generators import PIXART, UNET, VAE
from mmtrain.families.glm4_moe import GLM4_MOE
from mmtrain.families.glm4v_moe import GLM4V_MOE
from mmtrain.families.image_processors import image_processor_settings
from mmtrain.families.internvl import INTERNVL
from mmtrain.families.llava import LLAVA
from mmtrain.families.llava_next import LLAVA_NEXT
from mmtrain.families.llava_onevision import LLAVA_ONEVISION
from mmtrain.families.mistral3 import MISTRAL3
from mmtrain.families.qwen2_5_omni import QWEN2_5_OMNI
from mmtrain.families.qwen2_5_vl import QWEN2_5_VL
from mmtrain.families.qwen2_audio import QWEN2_AUDIO
from mmtrain.families.qwen2_vl import QWEN2_VL
from mmtrain.families.qwen3_5 import QWEN3_5, QWEN3_5_TEXT
from mmtrain.families.qwen3_5_moe import QWEN3_5_MOE, QWEN3_5_MOE_TEXT
from mmtrain.families.qwen3_omni_moe import QWEN3_OMNI_MOE
from mmtrain.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from mmtrain.families.smolvlm import SMOLVLM
from mmtrain.families.text_decoders import LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from mmtrain.plugins import find_plugin, installed_plugins

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        GEMMA3,
        GEMMA3_TEXT,
        GEMMA4,
        GEMMA4_TEXT,
        GLM4_MOE,
        GLM4V_MOE,
        INTERNVL,
        LLAMA,
        LLAVA,
        LLAVA_NEXT,
        LLAVA_ONEVISION,
        MISTRAL,
        MISTRAL3,
        MIXTRAL,
        QWEN2,
        QWEN2_MOE,
        QWEN2_AUDIO,
        QWEN2_VL,
        QWEN2_5_OMNI,
        QWEN2_5_VL,
        QWEN3,
        QWEN3_MOE,
        QWEN3_5,
        QWEN3_5_TEXT,
        QWEN3_5_MOE,
        QWEN3_5_MOE_TEXT,
        QWEN3_OMNI_MOE,
        QWEN3_VL,
        QWEN3_VL_MOE,
        SMOLVLM,
    )
}
# Their folders hold no LLM: a recipe names them for one of its units.
ENCODER_FAMILIES: dict[str, Family] = {family.name: family for family in (CLIP, SIGLIP, WHISPER)}
# Parts of pipelines of `diffusers`, for the generator of a recipe.
GENERATOR_FAMILIES: dict[str, Family] = {family.name: family for family in (PIXART, UNET, VAE)}
# Pixels of JPEGs that are much larger than needed differ a little, and no processor has this setting.
_NOT_OF_PROCESSORS = ("decode",)


@dataclass(frozen=True)
class NewFolder:
    """A family, and what the JSON files of a model of it hold."""

    family: Family
    settings: FolderSettings  # as read back from the files
    files: JsonFiles


def plugin_families() -> Iterator[Family]:
    """Yield the families of installed packages, from the entry points of the group `mmtrain.families`.

    They are asked where no family of ours fits, so that a package that fails costs nobody else anything.

    Raises PluginError for one that cannot be imported, or that is no `Family`.
    """
    for name in installed_plugins("families"):
        plugin = find_plugin("families", name, "model.hf")
        if not isinstance(plugin.value, Family):
            raise PluginError(f"{plugin}: found {type(plugin.value).__name__}; allowed: mmtrain.families.Family")
        yield plugin.value


def choose_family(model: NewModel) -> NewFolder:
    """Return the family whose folders can hold the model, with the JSON files of its folder.

    A family can if its files, read back as those of any folder, say what the recipe says. Raises UserError, which names
    every setting of which that is not true for the family that comes nearest.
    """
    drafts = []
    for family in FAMILIES.values():
        if family.writer is None or family.writer.units != model.units.keys():
            continue
        folder, differences = _draft(family, model)
        if not differences:
            return folder
        drafts.append((family.name, differences))
    if not drafts:
        raise UserError(
            f"not all units of this run started from one folder, and no family of models has just the units "
            f"{', '.join(model.units)}; runs can be exported with the units {_known_units()}"
        )
    name, differences = min(drafts, key=lambda draft: len(draft[1]))
    raise UserError(
        "not all units of this run started from one folder, and no family of models has all of its settings; the "
        "nearest is "
        f"{name}, from which these differ:\n  " + "\n  ".join(differences)
    )


def _known_units() -> str:
    names: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        if family.writer is not None:
            names.setdefault(" and ".join(sorted(family.writer.units)), []).append(family.name)
    return ", or ".join(f"{units} ({', '.join(families)})" for units, families in names.items())


def _draft(family: Family, model: NewModel) -> tuple[NewFolder, list[str]]:
    """Write the files of a family, and return what they do not say as the recipe does."""
    assert family.writer is not None
    files = family.writer.files(model)
    section = ConfigSection(files[CONFIG_FILE])
    settings = family.settings(section)
    section.finish()
    differences = [f"{CONFIG_FILE} cannot hold {problem}" for problem in section.problems]
    for unit, stated in settings.model.items():
        differences += _differences(f"model.{unit}.", model.units[unit], stated)
    if IMAGE_PROCESSOR_FILE in files:
        stated = dict(image_processor_settings(files[IMAGE_PROCESSOR_FILE], IMAGE_PROCESSOR_FILE))
        of_encoder = settings.data["image"]
        stated |= {key: of_encoder[key] for key in ("scheme", "size", "tile") if key in of_encoder}  # that it needs
        of_pixels = {key: value for key, value in stated.items() if key not in _NOT_OF_PROCESSORS}
        differences += _differences("data.image.", model.image, of_pixels)
    return NewFolder(family, settings, files), differences


def _differences(path: str, ours: Mapping[str, Any], stated: Mapping[str, Any]) -> Iterator[str]:
    for key, value in stated.items():
        if isinstance(value, Mapping) and isinstance(ours[key], Mapping):
            yield from _differences(f"{path}{key}.", ours[key], value)
        elif ours[key] != value:
            yield f"{path}{key}: is {ours[key]!r}; allowed: {value!r}"
