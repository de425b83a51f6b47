"""The LLM of Gemma 3 (arXiv 2503.19786), as `Gemma3ForCausalLM` of `transformers` computes it."""

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_settings, window_settings
from mmtrain.families.family import Settings, tiny_decoder
from mmtrain.families.rotary import is_supported, rope_scaling
from mmtrain.families.text_decoders import text_family

_DEFAULTS = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
}  # fmt: skip
_ROPE_BASE, _WINDOW_ROPE_BASE = 1_000_000.0, 10_000.0
TINY_TEXT = {
    key: value
    for key, value in tiny_decoder(
        model_type="gemma3_text",
        hidden_activation="gelu_pytorch_tanh",
        head_dim=48,
        query_pre_attn_scalar=48,
        sliding_window=16,
        sliding_window_pattern=2,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        tie_word_embeddings=True,
    ).items()
    if key != "hidden_act"
}


def gemma3_text_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM: `sliding_window_pattern` blocks with a window are followed by one without."""
    config.require("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    config.require("attention_bias", False, default=False)
    config.require("use_bidirectional_attention", False, None, default=False)
    config.require("final_logit_softcapping", None, default=None)
    config.require("attn_logit_softcapping", None, default=None)
    settings = decoder_settings(
        config,
        _DEFAULTS,
        rotary=_rotary_settings(config),
        mlp="geglu",
        qkv_bias=False,
        qk_norm=True,
        post_norms=True,
        zero_centered_norms=True,
        scale_embeddings=True,
        tie_embeddings=config.flag("tie_word_embeddings", True),
    )
    query_scale = config.number("query_pre_attn_scalar", 256)
    if query_scale != settings["head_dim"]:
        settings = {**settings, "query_scale": query_scale}
    window = config.integer("sliding_window", 4096)
    pattern = config.integer("sliding_window_pattern", 6)
    in_blocks = window_settings(config, settings["layers"], window, lambda block: (block + 1) % pattern == 0)
    if in_blocks["window"] is None:
        return {**settings, **in_blocks, "window_rope_base": None}
    return {**settings, **in_blocks}


def _rotary_settings(config: ConfigSection) -> Settings:
    """Read both kinds of rotary positions as `transformers` 5 (`rope_parameters` by kind of layer) or 4 wrote them."""
    base = config.number("rope_theta", _ROPE_BASE)
    window_base = config.number("rope_local_base_freq", _WINDOW_ROPE_BASE)
    parameters, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    full, windowed = parameters.section("full_attention"), parameters.section("sliding_attention")
    windowed.require("rope_type", "default", None, default=None)
    scaled = full.updated_by(scaling)
    scaled.require("type", None, default=None)  # the older name of `rope_type` has no effect here
    settings = {
        "rope_base": scaled.number("rope_theta", base),
        "window_rope_base": windowed.number("rope_theta", window_base),
        "rope_scaling": rope_scaling(config, scaled),
        "rope_sections": None,
        "rope_interleaved": False,
    }
    if is_supported(scaled):
        for section in (scaled, windowed, parameters):
            section.finish()
    return settings


GEMMA3_TEXT = text_family("gemma3_text", "Gemma3ForCausalLM", gemma3_text_settings, TINY_TEXT)
