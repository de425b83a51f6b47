"""The kinds of encoder that a model may have.

To add one:

* write its settings class, add it to `AnyEncoderSettings`, and write the entry here;
* add a field of its name, for its short form, to `ModelSettings` and to `ParallelSettings`;
* describe its layers in `models.encoder_shapes.ENCODER_SHAPES`;
* build its modules in `models.encoder_modules.ENCODER_MODULES`;
* read its media in `data.media.item_readers.ITEM_READERS`;
* check its settings in `recipe.encoder_checks.ENCODER_CHECKS`;
* say which sizes to profile in `runtime.profiling.item_sizes.ITEM_SIZES`.

A layer kind that does not exist yet also needs its arithmetic in `costs.layer_arithmetic`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mmtrain.recipe.settings.audio_settings import AudioSettings
from mmtrain.recipe.settings.encoder_settings import EncoderSettings
from mmtrain.recipe.settings.model_settings import ModelSettings
from mmtrain.recipe.settings.presets import AUDIO_PRESETS, VISION_PRESETS, ModelPreset
from mmtrain.recipe.settings.vision_settings import VisionSettings

MediaKind = Literal["image", "video", "audio"]  # what a sample may hold besides text


@dataclass(frozen=True)
class Modality:
    """One kind of encoder, of which a model may have several."""

    name: str  # also the key of its short form under `model` and `parallel`, and the name of the unit there
    settings: type[EncoderSettings]
    presets: Mapping[str, ModelPreset]
    media: tuple[MediaKind, ...]  # kinds of media that it reads
    placeholder: str  # special token of the tokenizer whose place one feature takes

    @property
    def marks(self) -> dict[MediaKind, str]:
        """Return the text that marks the position of a medium in a user's turn, by the kind of the medium."""
        return {kind: f"<{kind}>" for kind in self.media}


VISION = Modality(
    "vision", VisionSettings, dict(VISION_PRESETS.items()), media=("image", "video"), placeholder="<|image|>"
)
AUDIO = Modality("audio", AudioSettings, dict(AUDIO_PRESETS.items()), media=("audio",), placeholder="<|audio|>")
MODALITIES: dict[str, Modality] = {modality.name: modality for modality in (VISION, AUDIO)}


GENERATOR = "generator"  # the unit after the LLM, and the key of its settings under `model` and `parallel`


def encoder_names(model: ModelSettings) -> tuple[str, ...]:
    """Return the names of all encoders for which a recipe of this model may have settings."""
    return (*MODALITIES, *model.encoders)


def other_units(model: ModelSettings) -> tuple[str, ...]:
    """Return the names of all units for which a recipe of this model may have settings, but the LLM's."""
    return (*encoder_names(model), GENERATOR)


def unit_path(unit: str) -> tuple[str, ...]:
    """Return the keys of a unit's settings under `model` and `parallel`: its name, for some after `encoders`."""
    return (unit,) if unit in (*MODALITIES, "llm", GENERATOR) else ("encoders", unit)


def dotted_unit(unit: str) -> str:
    """Return `unit_path` as messages write it: `parallel.{dotted_unit(unit)}.tp`."""
    return ".".join(unit_path(unit))
