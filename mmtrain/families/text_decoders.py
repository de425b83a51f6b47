"""Text models in the manner of Llama, each with its paper, as the classes of `transformers` compute them.

Families with media put the same decoders behind their encoders, chosen by the `model_type` of their config.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoder_config import DECODER_WRITER
from mmtrain.families.decoders import (
    PLAIN_MIXTURE,
    decoder_buffers,
    decoder_settings,
    decoder_weights,
    moe_settings,
    qwen_window_settings,
    reject_sliding_windows,
    require_no_balancing_loss,
    window_settings,
)
from mmtrain.families.family import Family, FolderSettings, Settings, tiny_decoder
from mmtrain.families.rotary import rotary_settings, stated_rotary
from mmtrain.families.weight_layouts import ParameterSource

_LLAMA_DEFAULTS = {"intermediate_size": 11008, "vocab_size": 32000}
_MISTRAL_DEFAULTS = {"intermediate_size": 14336, "vocab_size": 32000, "num_key_value_heads": 8}
_MINISTRAL3_DEFAULTS = {
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "rms_norm_eps": 1e-5,
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MIXTRAL_DEFAULTS = {**_MISTRAL_DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
_QWEN2_DEFAULTS = {"intermediate_size": 22016, "vocab_size": 151936, "num_key_value_heads": 32}
_QWEN2_MOE_DEFAULTS = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 151936,
}
_QWEN2_EXPERTS = {"experts": 60, "top_k": 4, "ffn": 1408}
_QWEN3_DEFAULTS = {**_QWEN2_DEFAULTS, "head_dim": 128}
_QWEN3_MOE_DEFAULTS = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}
_QWEN3_EXPERTS = {"experts": 128, "top_k": 8, "ffn": 768}


def text_family(
    name: str,
    architecture: str,
    llm_settings: Callable[[ConfigSection], Settings],
    tiny: Mapping[str, Any],
    weights: Callable[[FolderSettings], Iterator[ParameterSource]] = decoder_weights,
) -> Family:
    """Return a family without media.

    llm_settings: reads the settings of the LLM from `config.json`. tiny: that of a tiny model, but for its
        architecture.
    """
    return Family(
        name,
        (architecture,),
        lambda config: FolderSettings({"llm": llm_settings(config)}),
        weights,
        {"config.json": {"architectures": [architecture], **tiny}},
        ignored=decoder_buffers,
        writer=DECODER_WRITER,
    )


def llama_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM."""
    config.require("attention_bias", False, default=False)
    config.require("mlp_bias", False, default=False)
    return decoder_settings(config, _LLAMA_DEFAULTS, qkv_bias=False)


def mistral_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM. A window is one of all blocks."""
    settings = decoder_settings(config, _MISTRAL_DEFAULTS, qkv_bias=False)
    window = config.optional_integer("sliding_window", 4096)
    return {**settings, **window_settings(config, settings["layers"], window, is_full=lambda _: False)}


def ministral3_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM, whose queries grow with their positions. A window is one of all blocks."""
    stated = stated_rotary(config) or ConfigSection(_MINISTRAL3_ROPE, "rope_parameters.", config.problems)
    stated.pass_over("max_position_embeddings")
    growth = stated.number("llama_4_scaling_beta")
    rotary = rotary_settings(config, 10000.0, stated=stated)
    if rotary["rope_scaling"] is None or rotary["rope_scaling"]["original_positions"] is None:
        stated.reject("rope_type", "it is not supported yet that queries grow beside it; supported: yarn, llama3")
    settings = decoder_settings(config, _MINISTRAL3_DEFAULTS, rotary, qkv_bias=False)
    window = config.optional_integer("sliding_window", None)
    windows = window_settings(config, settings["layers"], window, is_full=lambda _: False)
    return {**settings, **windows, "query_growth": growth}


def qwen2_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM."""
    settings = decoder_settings(config, _QWEN2_DEFAULTS, qkv_bias=True)
    return {**settings, **qwen_window_settings(config, settings["layers"])}


def qwen2_moe_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM, whose shared expert has a gate."""
    settings = decoder_settings(config, _QWEN2_MOE_DEFAULTS, qkv_bias=config.flag("qkv_bias", True))
    reject_sliding_windows(config)
    moe = moe_settings(config, settings["layers"], _QWEN2_EXPERTS, normalizes=False)
    shared_ffn = config.integer("shared_expert_intermediate_size", 5632)
    return {**settings, "moe": {**moe, "shared_ffn": shared_ffn, "shared_gate": True}}


def qwen3_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM."""
    config.require("attention_bias", False, default=False)
    settings = decoder_settings(config, _QWEN3_DEFAULTS, qkv_bias=False, qk_norm=True)
    return {**settings, **qwen_window_settings(config, settings["layers"])}


def qwen3_moe_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM. A window is one of all blocks."""
    config.require("attention_bias", False, default=False)
    settings = decoder_settings(config, _QWEN3_MOE_DEFAULTS, qkv_bias=False, qk_norm=True)
    is_used, window = config.flag("use_sliding_window", False), config.optional_integer("sliding_window", 4096)
    config.value("max_window_layers")  # which this class does not read
    windows = window_settings(config, settings["layers"], window if is_used else None, is_full=lambda _: False)
    moe = moe_settings(config, settings["layers"], _QWEN3_EXPERTS, normalizes=False)
    return {**settings, **windows, "moe": moe}


def mixtral_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM. A window is one of all blocks."""
    settings = decoder_settings(config, _MIXTRAL_DEFAULTS, qkv_bias=False)
    window = config.optional_integer("sliding_window", None)
    windows = window_settings(config, settings["layers"], window, is_full=lambda _: False)
    require_no_balancing_loss(config)
    config.require("router_jitter_noise", 0.0, 0, default=0.0)
    moe = {
        **PLAIN_MIXTURE,
        "experts": config.integer("num_local_experts", 8),
        "top_k": config.integer("num_experts_per_tok", 2),
        "ffn": settings["ffn"],
        "normalize": True,
        "dense_blocks": (),
    }
    return {**settings, **windows, "moe": moe}


def _mixtral_weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    yield from decoder_weights(settings, experts="apart, as Mixtral")


_DECODERS: Mapping[str, Callable[[ConfigSection], Settings]] = {
    "llama": llama_settings,
    "mistral": mistral_settings,
    "ministral3": ministral3_settings,
    "qwen2": qwen2_settings,
    "qwen3": qwen3_settings,
    "qwen3_moe": qwen3_moe_settings,
}


def text_settings(text: ConfigSection, default: str) -> Settings:
    """Return the settings of the LLM in a `text_config`; `default` is its `model_type` if it states none."""
    kind = text.value("model_type") or default
    if not isinstance(kind, str) or kind not in _DECODERS:
        text.reject("model_type", f"{kind!r} is not supported yet; supported: {', '.join(_DECODERS)}")
        kind = default
    return _DECODERS[kind](text)


# Llama 2 and 3 (arXiv 2307.09288, 2407.21783).
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
_TINY_LLAMA = tiny_decoder(model_type="llama", rope_theta=500000.0, rope_scaling=_LLAMA3_ROPE)
LLAMA = text_family("llama", "LlamaForCausalLM", llama_settings, _TINY_LLAMA)

# Mistral (arXiv 2310.06825).
_TINY_MISTRAL = tiny_decoder(model_type="mistral", sliding_window=16)
MISTRAL = text_family("mistral", "MistralForCausalLM", mistral_settings, _TINY_MISTRAL)

# Mixtral (arXiv 2401.04088).
_TINY_MIXTRAL = tiny_decoder(
    model_type="mixtral", intermediate_size=96, rope_theta=1e6, num_local_experts=8, num_experts_per_tok=2
)
MIXTRAL = text_family("mixtral", "MixtralForCausalLM", mixtral_settings, _TINY_MIXTRAL, _mixtral_weights)

# Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115).
_TINY_QWEN2 = tiny_decoder(model_type="qwen2", rope_theta=1e6, tie_word_embeddings=True)
QWEN2 = text_family("qwen2", "Qwen2ForCausalLM", qwen2_settings, _TINY_QWEN2)

# Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B (arXiv 2407.10671).
_TINY_QWEN2_MOE = tiny_decoder(
    model_type="qwen2_moe",
    rope_theta=1e6,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=128,
)
QWEN2_MOE = text_family("qwen2_moe", "Qwen2MoeForCausalLM", qwen2_moe_settings, _TINY_QWEN2_MOE)

# Dense Qwen3 (arXiv 2505.09388).
_TINY_QWEN3 = tiny_decoder(model_type="qwen3", head_dim=48, rope_theta=1e6, tie_word_embeddings=True)
QWEN3 = text_family("qwen3", "Qwen3ForCausalLM", qwen3_settings, _TINY_QWEN3)

# Qwen3 with mixtures of experts (arXiv 2505.09388). Its third block is dense.
_TINY_QWEN3_MOE = tiny_decoder(
    model_type="qwen3_moe",
    head_dim=48,
    rope_theta=1e6,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=96,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[2],
)
QWEN3_MOE = text_family("qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe_settings, _TINY_QWEN3_MOE)
