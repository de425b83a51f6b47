"""Qwen3-VL (arXiv 2511.21631), as `transformers` computes it: dense, and with mixtures of experts.

Folders of the latter hold the experts of a block in two tensors: on the hub (experts, hidden, gates and values) and
(experts, ffn, hidden); from version 5 of `transformers`, with the last dimensions swapped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_buffers, decoder_settings, decoder_weights, moe_settings, tied_by_outer
from mmtrain.families.family import (
    MEDIA_TOKENS,
    SECONDS,
    TINY_QWEN_TOWER,
    TINY_TOKENS,
    Family,
    FolderSettings,
    MediaMarkup,
    Settings,
    tiny_decoder,
    tiny_token_id,
)
from mmtrain.families.qwen2_vl import DECODER, MEDIA_SETTINGS, TINY_IMAGES, TOWER, block_weights, tower_settings
from mmtrain.families.rotary import rotary_settings
from mmtrain.families.weight_layouts import ParameterSource, as_is

_DEFAULTS = {"intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936}
_MOE_DEFAULTS = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 151936,
}
_MOE_EXPERTS = {"experts": 60, "top_k": 4, "ffn": 1408}
_DEFAULT_THETA = 500000.0
_DEFAULT_SECTIONS = (24, 20, 20)
_DEFAULT_DEEPSTACK = (8, 16, 24)
_TOKEN_KEYS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}
_HALF = (0.5, 0.5, 0.5)
# How a folder without processors prepares images: between 8 x 8 and 128 x 128 merged patches.
_IMAGES: Settings = {
    **MEDIA_SETTINGS["image"],
    "min_pixels": 256**2,
    "max_pixels": 4096**2,
    "mean": _HALF,
    "std": _HALF,
}
# Frames are evenly spaced, and share the limits: of 128 and 768 merged patches, in pixels times frames.
_VIDEOS: Settings = {
    "fps": 2.0,
    "min_frames": 4,
    "max_frames": 768,
    "min_pixels": 128 * 32 * 32,
    "max_pixels": 768 * 32 * 32,
    "sampling": "ends",
    "pixel_limits": "video",
}
_START, _END, _VIDEO = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
_TINY: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": tiny_token_id(MEDIA_TOKENS["image"]),
    "video_token_id": len(TINY_TOKENS),
    "vision_start_token_id": len(TINY_TOKENS) + 1,
    "vision_end_token_id": len(TINY_TOKENS) + 2,
    "text_config": tiny_decoder(
        model_type="qwen3_vl_text",
        head_dim=32,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    ),
    "vision_config": {
        "model_type": "qwen3_vl_vision",
        **TINY_QWEN_TOWER,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    },
    "dtype": "float32",
}


def _settings(config: ConfigSection) -> FolderSettings:
    return folder_settings(config, _text_settings(config))


def _moe_settings(config: ConfigSection) -> FolderSettings:
    return folder_settings(config, _moe_text_settings(config))


def folder_settings(
    config: ConfigSection, llm: Settings, default_deepstack: Sequence[int] = _DEFAULT_DEEPSTACK
) -> FolderSettings:
    """Return the settings of a folder with this LLM.

    default_deepstack: the blocks of the tower whose outputs reach the LLM, if the config does not say.
    """
    config.pass_over(*_TOKEN_KEYS)  # they belong to text and tokenizer
    tower = config.section("vision_config")
    common = tower_settings(tower, tower.integer("hidden_size", 1152), depth=27, patch=16)
    tower.require("out_hidden_size", llm["hidden"], default=3584)
    tower.require("apply_vit_abs_pos_embed", True, default=True)
    tower.pass_over("image_size", "tokens_per_second")  # folders of Qwen3-Omni have them, and nothing reads them
    vision = {
        **common,
        "ffn": tower.integer("intermediate_size", 4304),
        "activation": tower.choice("hidden_act", _ACTIVATIONS, "gelu_pytorch_tanh"),
        "gated_mlp": False,
        "norm": "layer",
        "patch_bias": True,
        "position_grid": _position_grid(tower),
        "time_positions_per_second": None,
        "patch_seconds": "sampled",
        "window": 0,
        "full_attention_blocks": (),
        "deepstack": _deepstack(tower, common["layers"], llm["layers"], default_deepstack),
    }
    tower.finish()
    return FolderSettings({"vision": vision, "llm": llm}, {"image": _IMAGES, "video": _VIDEOS})


def _text_settings(config: ConfigSection) -> Settings:
    text = config.section("text_config")
    llm = _decoder(text, _DEFAULTS)
    text.finish()
    return tied_by_outer(config, llm)


def _moe_text_settings(config: ConfigSection) -> Settings:
    text = config.section("text_config")
    llm = _decoder(text, _MOE_DEFAULTS)
    moe = moe_settings(text, llm["layers"], _MOE_EXPERTS, normalizes=True)
    if not moe["normalize"]:
        text.reject("norm_topk_prob", "found false, but the weights of experts are always normalized; allowed: true")
    text.finish()
    return {**tied_by_outer(config, llm), "moe": moe}


def _decoder(text: ConfigSection, defaults: Mapping[str, int]) -> Settings:
    text.require("attention_bias", False, default=False)
    rotary = rotary_settings(text, _DEFAULT_THETA, interleaved=True)
    rotary = {**rotary, "rope_sections": rotary["rope_sections"] or _DEFAULT_SECTIONS}
    return decoder_settings(text, defaults, rotary, qkv_bias=False, qk_norm=True)


def _position_grid(tower: ConfigSection) -> int:
    """Return the side of the table of positions."""
    num_positions = tower.integer("num_position_embeddings", 2304)
    side = isqrt(num_positions)
    if side**2 != num_positions:
        tower.reject("num_position_embeddings", f"{num_positions} is not supported yet; supported: squares")
    return side


def _deepstack(tower: ConfigSection, num_blocks: int, num_llm_blocks: int, default: Sequence[int]) -> tuple[int, ...]:
    """Return the blocks whose outputs reach the LLM."""
    key = "deepstack_visual_indexes"
    value = tower.value(key)
    blocks = list(default) if value is None else value
    if not isinstance(blocks, list) or not all(type(block) is int and 0 <= block < num_blocks for block in blocks):
        tower.reject(key, f"found {blocks}, allowed: a list of blocks, 0 to {num_blocks - 1}")
        return ()
    if blocks != sorted(set(blocks)):
        tower.reject(key, f"{blocks} is not supported yet; supported: numbers that ascend")
    if len(blocks) > num_llm_blocks:
        tower.reject(key, f"{len(blocks)} blocks feed as many of the LLM, which has {num_llm_blocks}")
        return ()
    return tuple(blocks)


def _weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    yield from tower_weights(settings)
    yield from decoder_weights(settings, DECODER)


def _moe_weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    yield from tower_weights(settings)
    yield from decoder_weights(settings, DECODER, experts="fused, inputs first")


def _moe_weights_of_version_5(settings: FolderSettings) -> Iterator[ParameterSource]:
    yield from tower_weights(settings)
    yield from decoder_weights(settings, DECODER, experts="fused")


def tower_weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    """Yield the weights of the encoder and its mergers."""
    vision, llm = settings.model["vision"], settings.model["llm"]
    hidden, ffn = vision["hidden"], vision["ffn"]
    yield as_is("vision.layers.0.proj.bias", f"{TOWER}patch_embed.proj.bias", (hidden,))
    table = (vision["position_grid"] ** 2, hidden)
    yield as_is("vision.layers.0.grid_positions", f"{TOWER}pos_embed.weight", table)
    yield from block_weights(settings, norm_kinds=("weight", "bias"))
    for block in range(vision["layers"]):
        ours, theirs = f"vision.layers.{block + 1}.mlp.", f"{TOWER}blocks.{block}.mlp."
        for kind, inputs, inner_inputs in (("weight", (hidden,), (ffn,)), ("bias", (), ())):
            yield as_is(f"{ours}linear_fc1.{kind}", f"{theirs}linear_fc1.{kind}", (ffn, *inputs))
            yield as_is(f"{ours}linear_fc2.{kind}", f"{theirs}linear_fc2.{kind}", (hidden, *inner_inputs))
    projector, merged = f"vision.layers.{vision['layers'] + 1}.", hidden * vision["merge"] ** 2
    yield from _merger_weights((projector, "post_norm"), f"{TOWER}merger.", (hidden, merged, llm["hidden"]))
    for i in range(len(vision["deepstack"])):
        ours, theirs = f"{projector}deepstack.{i}.", f"{TOWER}deepstack_merger_list.{i}."
        yield from _merger_weights((ours, "norm"), theirs, (merged, merged, llm["hidden"]))


def _merger_weights(names: tuple[str, str], theirs: str, widths: tuple[int, int, int]) -> Iterator[ParameterSource]:
    """Yield the weights of one merger.

    names: the prefix of our parameters, and what its norm is called.
    widths: of the norm, of the merged tokens, and of the LLM.
    """
    (ours, norm), (norm_width, merged, out) = names, widths
    for kind, inputs in (("weight", (merged,)), ("bias", ())):
        yield as_is(f"{ours}{norm}.{kind}", f"{theirs}norm.{kind}", (norm_width,))
        yield as_is(f"{ours}linear_1.{kind}", f"{theirs}linear_fc1.{kind}", (merged, *inputs))
        yield as_is(f"{ours}linear_2.{kind}", f"{theirs}linear_fc2.{kind}", (out, *inputs))


QWEN3_VL = Family(
    "qwen3_vl",
    ("Qwen3VLForConditionalGeneration",),
    _settings,
    _weights,
    {
        "config.json": _TINY,
        "preprocessor_config.json": {
            **TINY_IMAGES,
            "processor_class": "Qwen3VLProcessor",
            "image_mean": list(_HALF),
            "image_std": list(_HALF),
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 16 * 64 * 64},
            "patch_size": 8,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "max_frames": 16,
            "image_mean": list(_HALF),
            "image_std": list(_HALF),
        },
        "tokenizer_config.json": {
            "extra_special_tokens": {
                "video_token": _VIDEO,
                "vision_start_token": _START,
                "vision_end_token": _END,
            }
        },
    },
    markups={
        "video": MediaMarkup(
            _VIDEO, _VIDEO, f"<{SECONDS} seconds>{_START}", _END, later_prefix=f"<{SECONDS} seconds>{_START}"
        )
    },
    video_type="Qwen3VLVideoProcessor",
    ignored=decoder_buffers,
)

_TINY_MOE = {
    **_TINY,
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **_TINY["text_config"],
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "mlp_only_layers": [2],
    },
    "vision_config": {**_TINY["vision_config"], "model_type": "qwen3_vl_moe_vision"},
}
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    name="qwen3_vl_moe",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    settings=_moe_settings,
    weights=_moe_weights,
    other_layout=_moe_weights_of_version_5,
    tiny={**QWEN3_VL.tiny, "config.json": _TINY_MOE},
)
