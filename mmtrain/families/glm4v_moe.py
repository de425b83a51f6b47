"""GLM-4.5V and GLM-4.6V (arXiv 2507.01006), as `Glm4vMoeForConditionalGeneration` of `transformers` computes them.

The LLM is that of `glm4_moe`, with positions in time, row and column. Each frame of a video is written apart, and
behind it when it is shown; features of images and of videos take the place of one token. Processors of GLM-4.6V take
other frames of a video, and write its times with a decimal.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from mmtrain.families.clip import MEAN, STD
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_buffers, decoder_weights, tied_by_either
from mmtrain.families.family import (
    SECONDS,
    TINY_TOKENS,
    Family,
    FolderSettings,
    MediaMarkup,
    Settings,
)
from mmtrain.families.glm4_moe import DEFAULTS, TINY_DECODER, further_blocks, glm4_moe_settings
from mmtrain.families.qwen2_vl import DECODER, TOWER
from mmtrain.families.qwen2_vl import tower_settings as qwen_tower_settings
from mmtrain.families.weight_layouts import (
    ParameterSource,
    as_is,
    convolution_of_squares,
    flattened,
    gate_and_up,
    joint_query_key_value,
)

_TEXT_DEFAULTS = {**DEFAULTS, "vocab_size": 151424}
_DEFAULT_SECTIONS = (8, 12, 12)
_MERGER_NORM_EPS = 1e-5  # that of torch, which no config states
# How a folder without processors prepares images and videos, whose limits count the frames of patches.
_IMAGES: Settings = {
    "scheme": "native",
    "pixel_limits": "frames",
    "min_pixels": 112 * 112,
    "max_pixels": 28 * 28 * 15000,
    "resample": "bicubic",
    "decode": "full",
    "mean": MEAN,
    "std": STD,
}
_VIDEOS: Settings = {
    "sampling": "seconds",
    "pixel_limits": "video",
    "fps": 2.0,
    "min_frames": 1,
    "max_frames": 600,
    "min_pixels": 112 * 112,
    "max_pixels": 28 * 28 * 2 * 30000,
}
_TOKEN_KEYS = (
    "image_token_id", "image_start_token_id", "image_end_token_id",
    "video_token_id", "video_start_token_id", "video_end_token_id",
)  # fmt: skip
_ARCHITECTURE = "Glm4vMoeForConditionalGeneration"
_IMAGE, _VIDEO = "<|image|>", "<|video|>"
_START, _END = "<|begin_of_image|>", "<|end_of_image|>"
_VIDEO_START, _VIDEO_END = "<|begin_of_video|>", "<|end_of_video|>"
_TINY_SPECIAL = (_IMAGE, _VIDEO, _START, _END, _VIDEO_START, _VIDEO_END)
_TINY_IDS = {token: len(TINY_TOKENS) + i for i, token in enumerate(_TINY_SPECIAL)}
_TINY_TEXT: dict[str, Any] = {
    **{
        key: value
        for key, value in TINY_DECODER.items()
        if key not in ("rope_theta", "partial_rotary_factor", "use_qk_norm")
    },
    "model_type": "glm4v_moe_text",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3],
    },
}
_TINY: dict[str, Any] = {
    "architectures": [_ARCHITECTURE],
    "model_type": "glm4v_moe",
    "image_token_id": _TINY_IDS[_IMAGE],
    "image_start_token_id": _TINY_IDS[_START],
    "image_end_token_id": _TINY_IDS[_END],
    "video_token_id": _TINY_IDS[_VIDEO],
    "video_start_token_id": _TINY_IDS[_VIDEO_START],
    "video_end_token_id": _TINY_IDS[_VIDEO_END],
    "text_config": _TINY_TEXT,
    "vision_config": {
        "model_type": "glm4v_moe_vision",
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 160,
        "out_hidden_size": 128,
        "num_heads": 4,
        "image_size": 48,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "dtype": "float32",
}


def _settings(config: ConfigSection) -> FolderSettings:
    config.pass_over(*_TOKEN_KEYS)  # they belong to text and tokenizer
    llm = _text_settings(config)
    tower = config.section("vision_config")
    vision = _tower_settings(tower, llm["hidden"])
    tower.finish()
    return FolderSettings({"vision": vision, "llm": llm}, {"image": _IMAGES, "video": _VIDEOS})


def _text_settings(config: ConfigSection) -> Settings:
    text = config.section("text_config")
    text.pass_over(*_TOKEN_KEYS)  # of which folders of the hub have copies here
    llm = glm4_moe_settings(text, _TEXT_DEFAULTS, qkv_bias=True)
    if llm["qk_norm"]:
        text.reject("use_qk_norm", "true is not supported yet; supported: false")
    text.finish()
    return tied_by_either(config, {**llm, "rope_sections": llm["rope_sections"] or _DEFAULT_SECTIONS})


def _tower_settings(tower: ConfigSection, llm_hidden: int) -> Settings:
    hidden = tower.integer("hidden_size", 1536)
    common = qwen_tower_settings(tower, hidden, depth=24)
    tower.require("out_hidden_size", llm_hidden, default=4096)
    tower.require("hidden_act", "silu", default="silu")
    tower.require("attention_dropout", 0, 0.0, default=0.0)
    return {
        **common,
        "heads": tower.integer("num_heads", 12),
        "ffn": llm_hidden,  # blocks have that of the LLM; the one that the config states is the merger's
        "activation": "silu",
        "gated_mlp": True,
        "norm": "rms",
        "norm_eps": tower.number("rms_norm_eps", 1e-5),
        "qkv_bias": tower.flag("attention_bias", False),
        "linear_bias": False,
        "patch_bias": True,
        "patch_norm": True,
        "position_grid": max(1, tower.integer("image_size", 336) // common["patch"]),
        "position_interpolation": "bicubic",
        "time_positions_per_second": None,
        "patch_seconds": "sampled",
        "window": 0,
        "full_attention_blocks": (),
        "projector": {
            "kind": "merger",
            "bias": False,
            "activation": "silu",
            "norm": False,
            "norm_kind": None,
            "norm_eps": _MERGER_NORM_EPS,
            "ffn": tower.integer("intermediate_size", 13696),
        },
    }


def _weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    vision, llm = settings.model["vision"], settings.model["llm"]
    yield from _embedding_weights(vision)
    for block in range(vision["layers"]):
        yield from _block_weights(vision, f"vision.layers.{block + 1}.", f"{TOWER}blocks.{block}.")
    yield from _merger_weights(vision, llm["hidden"])
    yield from decoder_weights(settings, DECODER)


def _embedding_weights(vision: Settings) -> Iterator[ParameterSource]:
    ours, hidden, patch = "vision.layers.0.", vision["hidden"], vision["patch"]
    patch_shape = (hidden, 3, vision["temporal_patch"], patch, patch)
    yield flattened(f"{ours}proj.weight", f"{TOWER}patch_embed.proj.weight", patch_shape)
    yield as_is(f"{ours}proj.bias", f"{TOWER}patch_embed.proj.bias", (hidden,))
    yield as_is(f"{ours}patch_norm.weight", f"{TOWER}post_conv_layernorm.weight", (hidden,))
    table = (vision["position_grid"] ** 2, hidden)
    yield as_is(f"{ours}grid_positions", f"{TOWER}embeddings.position_embedding.weight", table)


def _block_weights(vision: Settings, ours: str, theirs: str) -> Iterator[ParameterSource]:
    hidden, heads, ffn = vision["hidden"], vision["heads"], vision["ffn"]
    yield as_is(f"{ours}input_layernorm.weight", f"{theirs}norm1.weight", (hidden,))
    yield as_is(f"{ours}pre_mlp_layernorm.weight", f"{theirs}norm2.weight", (hidden,))
    for kind, inputs in (("weight", (hidden,)), ("bias", ()))[: 1 + vision["qkv_bias"]]:
        joint = f"{ours}self_attention.linear_qkv.{kind}"
        yield joint_query_key_value(joint, f"{theirs}attn.qkv.{kind}", heads, hidden // heads, inputs)
    yield as_is(f"{ours}self_attention.linear_proj.weight", f"{theirs}attn.proj.weight", (hidden, hidden))
    gate, up = f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight"
    yield gate_and_up(f"{ours}mlp.linear_fc1.weight", gate, up, (ffn, hidden))
    yield as_is(f"{ours}mlp.linear_fc2.weight", f"{theirs}mlp.down_proj.weight", (hidden, ffn))


def _merger_weights(vision: Settings, out: int) -> Iterator[ParameterSource]:
    ours, theirs = f"vision.layers.{vision['layers'] + 1}.", f"{TOWER}merger."
    hidden, ffn = vision["hidden"], vision["projector"]["ffn"]
    yield as_is(f"{ours}post_norm.weight", f"{TOWER}post_layernorm.weight", (hidden,))
    kernel = (out, hidden, vision["merge"])
    yield convolution_of_squares(f"{ours}downsample.weight", f"{TOWER}downsample.weight", kernel)
    yield as_is(f"{ours}downsample.bias", f"{TOWER}downsample.bias", (out,))
    yield as_is(f"{ours}proj.weight", f"{theirs}proj.weight", (out, out))
    for kind in ("weight", "bias"):
        yield as_is(f"{ours}inner_norm.{kind}", f"{theirs}post_projection_norm.{kind}", (out,))
    gate, up = f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"
    yield gate_and_up(f"{ours}linear_1.weight", gate, up, (ffn, out))
    yield as_is(f"{ours}linear_2.weight", f"{theirs}down_proj.weight", (out, ffn))


GLM4V_MOE = Family(
    "glm4v_moe",
    (_ARCHITECTURE,),
    _settings,
    _weights,
    {
        "config.json": _TINY,
        "preprocessor_config.json": {
            "image_processor_type": "Glm4vImageProcessor",
            "processor_class": "Glm4vProcessor",
            "size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 2 * 64 * 64},
            "patch_size": 8,
            "merge_size": 2,
            "temporal_patch_size": 2,
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Glm4vVideoProcessor",
            "size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 16 * 64 * 64},
            "patch_size": 8,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "fps": 2,
        },
        "tokenizer_config.json": {
            "extra_special_tokens": {
                "image_token": _IMAGE,
                "video_token": _VIDEO,
                "image_bos_token": _START,
                "image_eos_token": _END,
                "video_bos_token": _VIDEO_START,
                "video_eos_token": _VIDEO_END,
            }
        },
    },
    markups={
        "image": MediaMarkup(_IMAGE, _IMAGE),
        "video": MediaMarkup(_VIDEO, _IMAGE, _START, f"{_END}{SECONDS}", later_prefix=_START, whole_seconds=True),
    },
    processor_markups={
        "Glm46VVideoProcessor": {
            "image": MediaMarkup(_IMAGE, _IMAGE),
            "video": MediaMarkup(_VIDEO, _IMAGE, _START, f"{_END}{SECONDS} seconds", later_prefix=_START),
        }
    },
    video_type="Glm4vVideoProcessor",
    ignored=decoder_buffers,
    other_blocks=partial(further_blocks, decoder=DECODER),
)
