"""Make a model narrow, so that a plan for many GPUs can be tried on one machine."""

import math
from collections.abc import Mapping
from typing import Any

from mmtrain.recipe.settings.encoder_settings import EncoderSettings
from mmtrain.recipe.settings.llm_settings import LlmSettings
from mmtrain.recipe.settings.model_settings import ModelSettings

FFN_PER_RANK = 16  # features of an MLP's hidden layer on each rank of a TP group
HEAD_DIM = 8
LLM_WIDTH_PER_RANK = 16
MIN_LLM_WIDTH = 32
VOCAB = 150  # not a multiple of what the vocabulary is padded to


def shrink_model(model: ModelSettings, tp: Mapping[str, int]) -> ModelSettings:
    """Return the model with narrow units, short heads and a small vocabulary.

    What a plan divides stays as it is: the numbers of layers, of heads and of rows that images and clips become. So do
    all settings that say how something is computed. tp: the tensor-parallel size of each unit.
    """
    values = model.model_dump()
    width = max(MIN_LLM_WIDTH, LLM_WIDTH_PER_RANK * max(tp.values()))
    values["llm"] |= _narrow_llm(model.llm, tp["llm"], width)
    for unit, settings in model.all_encoders.items():
        of_unit = values["encoders"][unit] if unit in model.encoders else values[unit]
        of_unit |= _narrow_encoder(settings, tp[unit])
    return ModelSettings.model_validate(values | {"hf": None})


def _narrow_llm(settings: LlmSettings, tp: int, width: int) -> dict[str, Any]:
    narrow: dict[str, Any] = {
        "preset": None,
        "hf": None,
        "hidden": width,
        "head_dim": HEAD_DIM,
        "ffn": FFN_PER_RANK * tp,
        "vocab": min(settings.vocab, VOCAB),
    }
    if settings.rope_sections is not None:
        divisor = math.gcd(*settings.rope_sections)
        sections = tuple(pairs // divisor for pairs in settings.rope_sections)
        narrow |= {"rope_sections": sections, "head_dim": 2 * sum(sections)}
    return narrow


def _narrow_encoder(settings: EncoderSettings, tp: int) -> dict[str, Any]:
    projector = settings.projector.model_dump()
    if settings.projector.ffn is not None:
        projector["ffn"] = FFN_PER_RANK * tp
    return {
        "preset": None,
        "hf": None,
        "hidden": HEAD_DIM * settings.heads,
        "ffn": FFN_PER_RANK * tp,
        "projector": projector,
    }
