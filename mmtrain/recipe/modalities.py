"""The kinds of encoder that a model may have.

To add one:

* write its settings class, the entry here, and a field of its name in `ModelSettings` and in `ParallelSettings`;
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

from mmtrain.recipe.model_settings import AudioSettings, EncoderSettings, VisionSettings
from mmtrain.recipe.presets import AUDIO_PRESETS, VISION_PRESETS, ModelPreset

MediaKind = Literal["image", "video", "audio"]  # what a sample may hold besides text


@dataclass(frozen=True)
class Modality:
    """One kind of encoder. Its name is the key of its settings under `model` and `parallel`, and its unit's name."""

    name: str
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


def other_units() -> tuple[str, ...]:
    """Return the names of all units that a model may have besides the LLM, in data-flow order."""
    return (*MODALITIES, "generator")
