"""The settings of the model: its units, each of which has a module of its own."""

import re
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field

from mmtrain.recipe.settings.audio_settings import AudioSettings
from mmtrain.recipe.settings.base import Section, holds_named_sections, section_types, setting
from mmtrain.recipe.settings.encoder_settings import EncoderSettings
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.recipe.settings.llm_settings import LlmSettings
from mmtrain.recipe.settings.vision_settings import VisionSettings

STATED_LENGTHS_COLUMNS = ("count", "text")  # columns of `data.index.stated_lengths` that belong to no unit

AnyEncoderSettings: TypeAlias = Annotated[VisionSettings | AudioSettings, Field(discriminator="modality")]


def _check_encoder_name(name: str) -> str:
    """Return the name of an encoder under `model.encoders`. Raises `ValueError` if another thing has this name."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise ValueError(f"found the name {name!r}; allowed: a letter, then letters, digits and underscores")
    if name in ModelSettings.model_fields:
        raise ValueError(f"{name} is a key of `model` itself; give this encoder another name")
    if name in STATED_LENGTHS_COLUMNS:
        raise ValueError(f"{name} is a column of files of stated lengths; give this encoder another name")
    return name


EncoderName: TypeAlias = Annotated[str, AfterValidator(_check_encoder_name)]


class ModelSettings(Section):
    """The units of the model."""

    hf: Path | None = setting(
        None,
        affects={"resume"},
        description="A pretrained model: a folder in the layout of Hugging Face, or a model of its hub, ORG/NAME or "
        "ORG/NAME@REVISION. It supplies the settings of the units that it holds, and training starts from its "
        "weights. Relative paths start at the recipe's folder. See docs/models.md.",
    )
    guest: bool = setting(
        False,
        affects={"plan", "resume"},
        added_later=True,
        description="Let `transformers` build the modules of `model.hf`, and run them under one placement, "
        "`replicated`. For a text model that no family covers this is set by itself; set it to run one of a family so. "
        "Needs `pip install 'mmtrain[transformers]'`. See docs/guests.md.",
    )
    vision: VisionSettings | None = Field(None, description="The image encoder. Leave it out for a text-only model.")
    audio: AudioSettings | None = Field(None, description="The audio encoder. Leave it out for a model without speech.")
    encoders: dict[EncoderName, AnyEncoderSettings] = Field(
        {},
        description="Further encoders by name, each with its `modality` and the settings of `model.vision` or "
        "`model.audio`. All encoders of a modality encode every item of it. The LLM reads their features of an item "
        "one encoder after another, in the order in which they are written, `vision` and `audio` first.",
    )
    llm: LlmSettings = setting(affects={"plan", "lengths", "resume"}, description="The language model.")
    generator: GeneratorSettings | None = setting(
        None,
        affects={"plan", "lengths", "steps", "resume"},
        description="An image generator after the LLM, conditioned by the LLM's outputs at learned queries.",
    )

    @property
    def all_encoders(self) -> dict[str, EncoderSettings]:
        """Return the encoders of this model by the name of their unit, in the order in which the LLM reads them."""
        short_forms = {name: getattr(self, name) for name in self._short_forms()}
        encoders: dict[str, EncoderSettings] = {
            name: settings for name, settings in short_forms.items() if settings is not None
        }
        return encoders | self.encoders

    def unit(self, name: str) -> EncoderSettings | LlmSettings | GeneratorSettings:
        """Return the settings of a unit that the model has."""
        settings: EncoderSettings | LlmSettings | GeneratorSettings | None
        settings = self.encoders[name] if name in self.encoders else getattr(self, name)
        assert settings is not None, name
        return settings

    @classmethod
    def _short_forms(cls) -> list[str]:
        """Return the fields that hold one encoder each."""
        return [
            name
            for name, field in cls.model_fields.items()
            if not holds_named_sections(field.annotation)
            and any(issubclass(kind, EncoderSettings) for kind in section_types(field.annotation))
        ]
