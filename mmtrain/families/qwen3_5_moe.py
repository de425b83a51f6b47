"""Qwen3.5 with mixtures of experts, text alone or with a vision tower, as `transformers` computes it.

Every block has a mixture, and a shared expert with a gate; the rest is that of dense Qwen3.5. Folders of the hub hold
the experts of a block in two tensors, and `transformers` writes a tensor for each linear of each expert.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_weights, moe_settings
from mmtrain.families.family import FolderSettings, Settings
from mmtrain.families.qwen3_5 import (
    QWEN3_5,
    QWEN3_5_TEXT,
    TINY,
    TINY_TEXT,
    settings_with_media,
    settings_without_media,
    text_settings,
)
from mmtrain.families.qwen3_vl import QWEN3_VL_MOE
from mmtrain.families.weight_layouts import ParameterSource

_DEFAULTS = {
    "hidden_size": 2048,
    "intermediate_size": 512,  # of no block
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 248320,
}
_EXPERTS = {"experts": 256, "top_k": 8, "ffn": 512}
_SHARED_FFN = 512
_TEXT_ARCHITECTURE, _ARCHITECTURE = "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"
_TINY_TEXT: dict[str, Any] = {
    **{key: value for key, value in TINY_TEXT.items() if key != "intermediate_size"},
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 128,
}
_TINY: dict[str, Any] = {
    **TINY,
    "architectures": [_ARCHITECTURE],
    "model_type": "qwen3_5_moe",
    "text_config": _TINY_TEXT,
    "vision_config": {**TINY["vision_config"], "model_type": "qwen3_5_moe_vision"},
}


def _moe_text_settings(text: ConfigSection) -> Settings:
    """Return the settings of the LLM, whose blocks all have a mixture; the weights of experts are always normalized."""
    text.require("decoder_sparse_step", 1, default=1)
    text.require("norm_topk_prob", True, default=True)
    llm = text_settings(text, _DEFAULTS)
    moe = moe_settings(text, llm["layers"], _EXPERTS, normalizes=True)
    shared_ffn = text.integer("shared_expert_intermediate_size", _SHARED_FFN)
    return {**llm, "ffn": moe["ffn"], "moe": {**moe, "shared_ffn": shared_ffn, "shared_gate": True}}


def _settings_of_text(config: ConfigSection) -> FolderSettings:
    return settings_without_media(_moe_text_settings(config))


def _settings(config: ConfigSection) -> FolderSettings:
    return settings_with_media(config, _moe_text_settings)


def _text_weights_of_the_hub(settings: FolderSettings) -> Iterator[ParameterSource]:
    yield from decoder_weights(settings, experts="fused")


QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    name="qwen3_5_moe_text",
    architectures=(_TEXT_ARCHITECTURE,),
    settings=_settings_of_text,
    other_layout=_text_weights_of_the_hub,
    tiny={"config.json": {"architectures": [_TEXT_ARCHITECTURE], **_TINY_TEXT}},
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    architectures=(_ARCHITECTURE,),
    settings=_settings,
    other_layout=QWEN3_VL_MOE.other_layout,
    tiny={**QWEN3_5.tiny, "config.json": _TINY},
)
