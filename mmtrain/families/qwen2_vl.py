"""Qwen2-VL (arXiv 2409.12191), as `Qwen2VLForConditionalGeneration` of `transformers` computes it."""

from collections.abc import Iterator
from typing import Any

from mmtrain.families.clip import MEAN, PLAIN_TRANSFORMER, STD
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import (
    decoder_buffers,
    decoder_settings,
    decoder_weights,
    reject_sliding_windows,
    tied_by_either,
)
from mmtrain.families.family import MEDIA_TOKENS, Family, FolderSettings, Settings, tiny_decoder, tiny_token_id
from mmtrain.families.weight_layouts import (
    ParameterSource,
    as_is,
    flattened,
    joint_query_key_value,
    query_key_value,
)

TOWER, DECODER = "model.visual.", "model.language_model."
SPELLINGS = (
    ((TOWER, "visual."), (DECODER, "model.")),  # folders of the hub, and what transformers writes
    (),  # as the modules are named
)
MAX_SIDE = 4096  # patches; rotary positions have no end, and the largest area of an image is far below this squared
_DEFAULTS = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_DEFAULT_SECTIONS = (16, 24, 24)
_ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
_TOKEN_KEYS = (
    "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id",
)  # fmt: skip
TINY_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64},
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
# How a folder without processors prepares images and videos. Two frames a second are those of Qwen's own tools.
MEDIA_SETTINGS: dict[str, Settings] = {
    "image": {
        "scheme": "native",
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 1280,
        "resample": "bicubic",
        "decode": "full",
        "mean": MEAN,
        "std": STD,
    },
    "video": {
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
        "min_pixels": 28 * 28 * 128,
        "max_pixels": 28 * 28 * 768,
    },
}
TINY: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "image_token_id": tiny_token_id(MEDIA_TOKENS["image"]),
    "video_token_id": tiny_token_id(MEDIA_TOKENS["video"]),
    "text_config": tiny_decoder(
        model_type="qwen2_vl_text",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
    ),
    "vision_config": {
        "model_type": "qwen2_vl_vision",
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 128,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "dtype": "float32",
}


def text_settings(config: ConfigSection) -> Settings:
    """Return the settings of the LLM, whose keys are in a section of their own or, in older folders, beside others."""
    config.pass_over(*_TOKEN_KEYS)  # they belong to text and tokenizer
    has_section = config.value("text_config") is not None
    text = config.section("text_config") if has_section else config
    reject_sliding_windows(text)
    llm = tied_by_either(config, decoder_settings(text, _DEFAULTS, qkv_bias=True))
    if has_section:
        text.finish()
        config.allow_copies_of(text)
    return {**llm, "rope_sections": llm["rope_sections"] or _DEFAULT_SECTIONS}


def tower_settings(tower: ConfigSection, hidden: int, depth: int = 32, patch: int = 14) -> Settings:
    """Return the settings that the encoders of this line have in common.

    hidden: their width. depth, patch: what the family assumes of blocks and patches if the config does not say.
    """
    tower.require("in_channels", 3, default=3)
    tower.require("in_chans", 3, default=3)  # as folders of the hub name it
    patch = tower.integer("patch_size", patch)
    tower.require("spatial_patch_size", patch, default=patch)
    rotary = tower.section("rope_parameters")
    rotary.require("rope_type", "axial", default="axial")
    rotary.require("rope_theta", 10000.0, 10000, default=10000.0)
    rotary.finish()
    merge = tower.integer("spatial_merge_size", 2)
    return {
        **PLAIN_TRANSFORMER,
        "layers": tower.integer("depth", depth),
        "hidden": hidden,
        "heads": tower.integer("num_heads", 16),
        "patch": patch,
        "temporal_patch": tower.integer("temporal_patch_size", 2),
        "norm_eps": 1e-6,
        "qkv_bias": True,
        "patch_bias": False,
        "positions": "rotary",
        "max_side": MAX_SIDE,
        "class_token": False,
        "pre_norm": False,
        "post_norm": True,
        "downsample": "pixel_shuffle",
        "merge": merge,
        "projector": {
            "kind": "mlp",
            "bias": True,
            "activation": "gelu",
            "norm": False,
            "norm_kind": None,
            "norm_eps": None,
            "ffn": hidden * merge**2,
        },
    }


def _settings(config: ConfigSection) -> FolderSettings:
    llm = text_settings(config)
    tower = config.section("vision_config")
    hidden = tower.integer("embed_dim", 1280)
    tower.require("hidden_size", llm["hidden"], default=3584)
    vision = {
        **tower_settings(tower, hidden),
        "ffn": hidden * tower.integer("mlp_ratio", 4),
        "activation": tower.choice("hidden_act", _ACTIVATIONS, "quick_gelu"),
        "gated_mlp": False,
        "norm": "layer",
        "time_positions_per_second": None,
        "patch_seconds": "sampled",
        "window": 0,
        "full_attention_blocks": (),
    }
    tower.finish()
    return FolderSettings({"vision": vision, "llm": llm}, MEDIA_SETTINGS)


def _weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    vision = settings.model["vision"]
    hidden, ffn = vision["hidden"], vision["ffn"]
    yield from tower_weights(settings, norm_kinds=("weight", "bias"))
    for block in range(vision["layers"]):
        ours, theirs = f"vision.layers.{block + 1}.mlp.", f"{TOWER}blocks.{block}.mlp."
        for kind, inputs, inner_inputs in (("weight", (hidden,), (ffn,)), ("bias", (), ())):
            yield as_is(f"{ours}linear_fc1.{kind}", f"{theirs}fc1.{kind}", (ffn, *inputs))
            yield as_is(f"{ours}linear_fc2.{kind}", f"{theirs}fc2.{kind}", (hidden, *inner_inputs))
    yield from decoder_weights(settings, DECODER)


def tower_weights(
    settings: FolderSettings, norm_kinds: tuple[str, ...], joint_projections: bool = True
) -> Iterator[ParameterSource]:
    """Yield the weights of the encoder and its merger but those of the MLPs of blocks.

    norm_kinds: which of weight and bias its norms have. joint_projections: the folder joins those of queries, keys and
        values.
    """
    vision, llm = settings.model["vision"], settings.model["llm"]
    hidden = vision["hidden"]
    yield from block_weights(settings, norm_kinds, joint_projections)
    ours, theirs = f"vision.layers.{vision['layers'] + 1}.", f"{TOWER}merger."
    merged = hidden * vision["merge"] ** 2
    for kind in norm_kinds:
        yield as_is(f"{ours}post_norm.{kind}", f"{theirs}ln_q.{kind}", (hidden,))
    for kind, inputs in (("weight", (merged,)), ("bias", ())):
        yield as_is(f"{ours}linear_1.{kind}", f"{theirs}mlp.0.{kind}", (merged, *inputs))
        yield as_is(f"{ours}linear_2.{kind}", f"{theirs}mlp.2.{kind}", (llm["hidden"], *inputs))


def block_weights(
    settings: FolderSettings, norm_kinds: tuple[str, ...], joint_projections: bool = True
) -> Iterator[ParameterSource]:
    """Yield the weights of the patch embedding and of norms and attention in all blocks of the encoder.

    The arguments are those of `tower_weights`.
    """
    vision = settings.model["vision"]
    hidden, heads, patch = vision["hidden"], vision["heads"], vision["patch"]
    patch_shape = (hidden, 3, vision["temporal_patch"], patch, patch)
    yield flattened("vision.layers.0.proj.weight", f"{TOWER}patch_embed.proj.weight", patch_shape)
    for block in range(vision["layers"]):
        ours, theirs = f"vision.layers.{block + 1}.", f"{TOWER}blocks.{block}."
        for kind in norm_kinds:
            yield as_is(f"{ours}input_layernorm.{kind}", f"{theirs}norm1.{kind}", (hidden,))
            yield as_is(f"{ours}pre_mlp_layernorm.{kind}", f"{theirs}norm2.{kind}", (hidden,))
        for kind, inputs in (("weight", (hidden,)), ("bias", ())):
            joint = f"{ours}self_attention.linear_qkv.{kind}"
            if joint_projections:
                yield joint_query_key_value(joint, f"{theirs}attn.qkv.{kind}", heads, hidden // heads, inputs)
            else:
                query, key, value = (f"{theirs}attn.{name}.{kind}" for name in "qkv")
                yield query_key_value(joint, (query, key, value), heads, heads, hidden // heads, inputs)
            output = f"{ours}self_attention.linear_proj.{kind}"
            yield as_is(output, f"{theirs}attn.proj.{kind}", (hidden, *inputs))


QWEN2_VL = Family(
    "qwen2_vl",
    ("Qwen2VLForConditionalGeneration",),
    _settings,
    _weights,
    {"config.json": TINY, "preprocessor_config.json": TINY_IMAGES},
    spellings=SPELLINGS,
    video_type="Qwen2VLVideoProcessor",
    ignored=decoder_buffers,
)
