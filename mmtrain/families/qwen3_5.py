"""Dense Qwen3.5, text alone or with a vision tower, as `transformers` computes it.

Three of four blocks have a gated DeltaNet (arXiv 2412.06464) in the place of attention; the attention of the others is
gated, and a quarter of its features turn. The tower is that of Qwen3-VL without DeepStack. Folders also hold blocks
that predict further tokens; as in `transformers`, they are not trained, and export copies them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import (
    decoder_buffers,
    decoder_settings,
    decoder_weights,
    mixer_settings,
    tied_by_outer,
)
from mmtrain.families.family import (
    MEDIA_TOKENS,
    TINY_QWEN_TOWER,
    TINY_TOKENS,
    Family,
    FolderSettings,
    Settings,
    tiny_decoder,
    tiny_token_id,
)
from mmtrain.families.qwen3_vl import QWEN3_VL, folder_settings
from mmtrain.families.rotary import rotary_settings, stated_rotary

_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
}
_DEFAULT_SECTIONS = (11, 11, 10)
_TURNING_SHARE = 0.25  # `partial_rotary_factor`
_MTP = "mtp."  # before the tensors of blocks that predict further tokens
_KEYS_OF_OTHER_BLOCKS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
_TEXT_ARCHITECTURE, _ARCHITECTURE = "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"
TINY_TEXT = tiny_decoder(
    model_type="qwen3_5_text",
    head_dim=32,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    attn_output_gate=True,
    full_attention_interval=2,
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    mamba_ssm_dtype="float32",
)
TINY: dict[str, Any] = {
    "architectures": [_ARCHITECTURE],
    "model_type": "qwen3_5",
    "image_token_id": tiny_token_id(MEDIA_TOKENS["image"]),
    "video_token_id": len(TINY_TOKENS),
    "vision_start_token_id": len(TINY_TOKENS) + 1,
    "vision_end_token_id": len(TINY_TOKENS) + 2,
    "text_config": TINY_TEXT,
    "vision_config": {"model_type": "qwen3_5_vision", **TINY_QWEN_TOWER, "num_position_embeddings": 36},
    "dtype": "float32",
}


def text_settings(text: ConfigSection, defaults: Mapping[str, float] = _DEFAULTS) -> Settings:
    """Return the settings of the LLM; `defaults` are what the config's class assumes for keys that are missing."""
    text.require("attention_bias", False, default=False)
    text.require("attn_output_gate", True, default=True)
    text.require("output_gate_type", "swish", default="swish")  # of the gated DeltaNets
    text.require("mamba_ssm_dtype", "float32", default="float32")
    text.require("mlp_only_layers", [], None, default=[])
    text.pass_over(*_KEYS_OF_OTHER_BLOCKS)
    rotary = rotary_settings(text, 10000.0, interleaved=True, turns_all=False)
    rotary = {**rotary, "rope_sections": rotary["rope_sections"] or _DEFAULT_SECTIONS}
    llm = decoder_settings(
        text, defaults, rotary, qkv_bias=False, qk_norm=True, attention_gate=True, zero_centered_norms=True
    )
    return {**llm, "rope_width": _turning_width(text, llm["head_dim"]), **mixer_settings(text, llm["layers"])}


def _turning_width(text: ConfigSection, head_dim: int) -> int | None:
    """Return how many features of a head turn; None for all."""
    stated = text.number("partial_rotary_factor", _TURNING_SHARE)
    share = stated_rotary(text).number("partial_rotary_factor", stated)
    turning = int(head_dim * share)
    if turning % 2:
        text.reject("partial_rotary_factor", f"{share:g} turns {turning} features of a head; allowed: an even number")
    return None if turning == head_dim else turning


def settings_without_media(llm: Settings) -> FolderSettings:
    """Return the settings of a folder of this LLM alone, where the three positions of a token are one."""
    return FolderSettings({"llm": {**llm, "rope_sections": None, "rope_interleaved": False}})


def settings_with_media(config: ConfigSection, llm_settings: Callable[[ConfigSection], Settings]) -> FolderSettings:
    """Read a folder with a tower; `llm_settings` reads its LLM."""
    text = config.section("text_config")
    llm = llm_settings(text)
    text.finish()
    return folder_settings(config, tied_by_outer(config, llm), default_deepstack=())


def _settings_of_text(config: ConfigSection) -> FolderSettings:
    return settings_without_media(text_settings(config))


def _settings(config: ConfigSection) -> FolderSettings:
    return settings_with_media(config, text_settings)


QWEN3_5_TEXT = Family(
    "qwen3_5_text",
    (_TEXT_ARCHITECTURE,),
    _settings_of_text,
    decoder_weights,
    {"config.json": {"architectures": [_TEXT_ARCHITECTURE], **TINY_TEXT}},
    ignored=decoder_buffers,
    other_models=(_MTP,),
)
QWEN3_5 = Family(
    "qwen3_5",
    (_ARCHITECTURE,),
    _settings,
    QWEN3_VL.weights,
    {**QWEN3_VL.tiny, "config.json": TINY},
    markups=QWEN3_VL.markups,
    video_type=QWEN3_VL.video_type,
    ignored=decoder_buffers,
    other_models=(_MTP,),
)
