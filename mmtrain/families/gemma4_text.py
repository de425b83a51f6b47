"""The LLM of Gemma 4, as `Gemma4ForCausalLM` of `transformers` computes it.

Blocks without a window have heads of another width, and may take what keys are made of as values.
"""

from typing import Any

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_buffers, decoder_settings, decoder_weights, reads_kv, window_settings
from mmtrain.families.family import Family, FolderSettings, Settings, tiny_decoder

_DEFAULTS = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262144,
}  # fmt: skip
_FULL_HEAD_DIM, _INPUT_WIDTH = 512, 256
_KV_PARTS = ("k_proj", "v_proj", "k_norm", "v_norm")
_BLOCKS_OF_A_CYCLE = 6  # the last of which has no window
_ROTARY: dict[str, Any] = {  # where a config states none
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_KEYS_OF_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")
_ARCHITECTURE = "Gemma4ForCausalLM"
TINY_TEXT = {
    key: value
    for key, value in tiny_decoder(
        model_type="gemma4_text",
        hidden_activation="gelu_pytorch_tanh",
        head_dim=32,
        per_layer_config={
            "1": {"head_dim": 64, "num_key_value_heads": 1},
            "3": {"head_dim": 64, "num_key_value_heads": 1},
        },
        attention_k_eq_v=True,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters=_ROTARY,
        final_logit_softcapping=30.0,
        hidden_size_per_layer_input=16,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=512,
        tie_word_embeddings=True,
    ).items()
    if key != "hidden_act"
}


def gemma4_text_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM."""
    config.require("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    config.require("attention_bias", False, default=False)
    config.require("use_bidirectional_attention", None, "vision", default=None)
    sees_pictures = config.value("use_bidirectional_attention") == "vision"
    config.require("enable_moe_block", False, default=False)
    config.pass_over(*_KEYS_OF_EXPERTS)  # which are not there
    cap = config.value("final_logit_softcapping")
    settings = decoder_settings(
        config,
        _DEFAULTS,
        {"rope_sections": None, "rope_interleaved": False},
        mlp="geglu",
        qkv_bias=False,
        qk_norm=True,
        value_norm=True,
        query_scale=1.0,
        post_norms=True,
        image_attention="bidirectional_in_windows" if sees_pictures else "causal",
        block_scales=True,
        scale_embeddings=True,
        logit_cap=None if cap is None else config.number("final_logit_softcapping"),
        tie_embeddings=config.flag("tie_word_embeddings", True),
    )
    settings = {**settings, **_inputs_of_blocks(config, settings), **_shared_kv(config, settings)}
    last = settings["layers"] - 1
    windows = window_settings(
        config,
        settings["layers"],
        config.integer("sliding_window", 512),
        lambda block: block == last or (block + 1) % _BLOCKS_OF_A_CYCLE == 0,
    )
    full_blocks = windows["full_attention_blocks"]
    if last not in full_blocks or windows["window"] is None:
        supported = "sliding_attention in some, full_attention in others and in the last"
        config.reject("layer_types", f"the kinds of layers are not supported yet; supported: {supported}")
    heads = _heads_of_kinds(config, settings, full_blocks)
    return {**settings, **windows, **heads, **_rotary_settings(config, heads["full_attention"])}


def _inputs_of_blocks(config: ConfigSection, settings: Settings) -> Settings:
    """Read per-layer embeddings, whose table has the vocabulary of the other one."""
    rows = config.integer("vocab_size_per_layer_input", _DEFAULTS["vocab_size"])
    width = config.value("hidden_size_per_layer_input")
    if width == 0:
        return {"per_layer_embeddings": None}
    if rows != settings["vocab"]:
        config.reject("vocab_size_per_layer_input", f"{rows} is not supported yet; supported: vocab_size")
    return {"per_layer_embeddings": {"width": config.integer("hidden_size_per_layer_input", _INPUT_WIDTH)}}


def _shared_kv(config: ConfigSection, settings: Settings) -> Settings:
    """Read how many of the last blocks read keys and values of earlier ones; their MLPs may be twice as wide."""
    is_wide = config.flag("use_double_wide_mlp", False)
    if config.value("num_kv_shared_layers") in (None, 0):
        return {"shared_kv": None}
    ffn = 2 * settings["ffn"] if is_wide else None
    return {"shared_kv": {"blocks": config.integer("num_kv_shared_layers"), "ffn": ffn}}


def unused_by_llm(settings: FolderSettings) -> tuple[str, ...]:
    """Return what folders may hold beside the weights: also of blocks that read keys and values of others."""
    llm = settings.model["llm"]
    readers = [block for block in range(llm["layers"]) if reads_kv(llm, block)]
    unused = (f"layers.{block}.self_attn.{part}.weight" for block in readers for part in _KV_PARTS)
    return (*decoder_buffers(settings), *unused)


def _heads_of_kinds(config: ConfigSection, settings: Settings, full_blocks: tuple[int, ...]) -> Settings:
    """Read the heads of blocks with and without a window as `transformers` wrote them, or as the hub has them."""
    is_same = config.flag("attention_k_eq_v", False)
    stated = config.value("per_layer_config")
    if stated is None:
        kv_heads = config.optional_integer("num_global_key_value_heads", None) if is_same else None
        config.pass_over("num_global_key_value_heads")
        head_dim = config.integer("global_head_dim", _FULL_HEAD_DIM)
        full = {"head_dim": head_dim, "kv_heads": kv_heads or settings["kv_heads"]}
        return {"full_attention": {**full, "keys_as_values": is_same}}
    config.pass_over("global_head_dim", "num_global_key_value_heads")
    section = config.section("per_layer_config")
    # `transformers` writes numbers with as many digits as the last block's: `05` of 30 blocks.
    names = {int(name): name for name in stated if name.isdecimal()} if isinstance(stated, dict) else {}
    kinds: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
    for block in range(settings["layers"]):
        of_block = section.section(names.get(block, str(block)))
        kv_heads, head_dim = settings["kv_heads"], settings["head_dim"]
        heads = (of_block.integer("num_key_value_heads", kv_heads), of_block.integer("head_dim", head_dim))
        kinds[block in full_blocks].add(heads)
        of_block.finish()
    section.finish()
    if any(len(heads) > 1 for heads in kinds.values()):
        config.reject("per_layer_config", "layers of one kind with different heads are not supported yet")
    windowed, full_heads = (min(kinds[is_full], default=(1, 1)) for is_full in (False, True))
    of_full = {"kv_heads": full_heads[0], "head_dim": full_heads[1], "keys_as_values": is_same}
    return {"kv_heads": windowed[0], "head_dim": windowed[1], "full_attention": of_full}


def _rotary_settings(config: ConfigSection, full_attention: Settings) -> Settings:
    """Read both kinds of rotary positions; those of blocks without a window may turn a part of a head alone."""
    stated = config.section("rope_parameters") or ConfigSection(_ROTARY, "rope_parameters.", config.problems)
    full, windowed = stated.section("full_attention"), stated.section("sliding_attention")
    windowed.require("rope_type", "default", default="default")
    kind = full.choice("rope_type", {"default": "default", "proportional": "proportional"}, "default")
    head_dim = full_attention["head_dim"]
    turning, factor = head_dim, 1.0
    if kind == "proportional":
        share, factor = full.number("partial_rotary_factor", 1.0), full.number("factor", 1.0)
        turning = 2 * int(share * head_dim // 2)
        if not 0 < turning <= head_dim:
            full.reject("partial_rotary_factor", f"{share:g} turns {turning} features of a head of {head_dim}")
    scaling = {"low_freq_factor": None, "high_freq_factor": None, "original_positions": None, "amplitude": None}
    settings = {
        "full_attention": {**full_attention, "rope_width": None if turning == head_dim else turning},
        "rope_base": full.number("rope_theta", 10_000.0),
        "window_rope_base": windowed.number("rope_theta", 10_000.0),
        "rope_scaling": None if factor == 1.0 else {"kind": "linear", "factor": factor, **scaling},
    }
    for section in (full, windowed, stated):
        section.finish()
    return settings


GEMMA4_TEXT = Family(
    "gemma4_text",
    (_ARCHITECTURE,),
    lambda config: FolderSettings({"llm": gemma4_text_settings(config)}),
    decoder_weights,
    {"config.json": {"architectures": [_ARCHITECTURE], **TINY_TEXT}},
    ignored=unused_by_llm,
)
