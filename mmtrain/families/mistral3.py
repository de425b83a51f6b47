"""Mistral Small 3.1 and later, Ministral 3 and others: Pixtral's vision tower (arXiv 2410.07073) before a Mistral.

They are computed as `Mistral3ForConditionalGeneration` of `transformers` does. Pictures keep their shapes. A norm, a
linear that joins squares of patches, and two linears make features of them, of which each row is written apart.
"""

from collections.abc import Iterator
from typing import Any

from mmtrain.families.clip import ACTIVATIONS, MEAN, PLAIN_TRANSFORMER, STD
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_buffers, decoder_weights, tied_by_outer
from mmtrain.families.family import TINY_TOKENS, Family, FolderSettings, MediaMarkup, Settings, tiny_decoder
from mmtrain.families.qwen2_vl import MAX_SIDE
from mmtrain.families.text_decoders import text_settings
from mmtrain.families.weight_layouts import ParameterSource, as_is, flattened, gate_and_up, query_key_value

_TOWER, _PROJECTOR, _DECODER = "model.vision_tower.", "model.multi_modal_projector.", "model.language_model."
_TOWER_NORM_EPS = 1e-5  # which no config states
_IMAGE, _BREAK, _END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
_TOKEN_KEYS = ("image_token_id", "image_token_index")
_TOWER_ACTIVATIONS = {**ACTIVATIONS, "silu": "silu"}
_TINY: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": len(TINY_TOKENS),
    "spatial_merge_size": 2,
    "text_config": tiny_decoder(
        model_type="ministral3",
        head_dim=32,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 8,
        "hidden_act": "silu",
    },
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def _settings(config: ConfigSection) -> FolderSettings:
    config.pass_over(*_TOKEN_KEYS)  # they belong to the tokenizer
    config.require("vision_feature_layer", -1, default=-1)
    text, tower = config.section("text_config"), config.section("vision_config")
    for key, section in (("text_config", text), ("vision_config", tower)):
        if not section:
            config.reject(key, "missing; allowed: the section of a model")
    llm = tied_by_outer(config, text_settings(text, "mistral"), default=True)
    merge = config.integer("spatial_merge_size", 2)
    vision = {
        **_tower_settings(tower),
        "post_norm": True,  # the projector's, before it joins patches
        "downsample": "linear",
        "merge": merge,
        "projector": {
            "kind": "mlp",
            "bias": config.flag("multimodal_projector_bias", False),
            "activation": config.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
            "norm": False,
            "norm_kind": None,
            "norm_eps": llm["norm_eps"],
            "ffn": None,
        },
    }
    text.finish()
    image: Settings = {
        "scheme": "native",
        "pixel_limits": "sides",
        "min_pixels": 1,
        "max_pixels": tower.integer("image_size", 1024) ** 2,
        "resample": "bicubic",
        "decode": "full",
        "mean": MEAN,
        "std": STD,
    }
    tower.finish()
    return FolderSettings({"vision": vision, "llm": llm}, {"image": image})


def _tower_settings(tower: ConfigSection) -> Settings:
    """Return the settings of the encoder, without what is done to its tokens."""
    tower.require("model_type", "pixtral", default="pixtral")
    tower.require("num_channels", 3, default=3)
    tower.require("attention_dropout", 0, 0.0, default=0.0)
    tower.require("rope_theta", 10000.0, 10000, None, default=None)
    rotary = tower.section("rope_parameters")
    rotary.require("rope_type", "axial", "default", default="axial")
    rotary.require("rope_theta", 10000.0, 10000, default=10000.0)
    rotary.finish()
    hidden, heads = tower.integer("hidden_size", 1024), tower.integer("num_attention_heads", 16)
    tower.require("head_dim", hidden // heads, default=hidden // heads)
    return {
        **PLAIN_TRANSFORMER,
        "layers": tower.integer("num_hidden_layers", 24),
        "hidden": hidden,
        "heads": heads,
        "ffn": tower.integer("intermediate_size", 4096),
        "patch": tower.integer("patch_size", 16),
        "activation": tower.choice("hidden_act", _TOWER_ACTIVATIONS, "gelu"),
        "gated_mlp": True,
        "norm": "rms",
        "norm_eps": _TOWER_NORM_EPS,
        "qkv_bias": False,
        "linear_bias": False,
        "patch_bias": False,
        "positions": "rotary",
        "rotary_frequencies": "alternating",
        "max_side": MAX_SIDE,
        "class_token": False,
        "pre_norm": True,
    }


def _weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    vision = settings.model["vision"]
    hidden, patch = vision["hidden"], vision["patch"]
    yield flattened("vision.layers.0.proj.weight", f"{_TOWER}patch_conv.weight", (hidden, 3, patch, patch))
    yield as_is("vision.layers.0.pre_norm.weight", f"{_TOWER}ln_pre.weight", (hidden,))
    for block in range(vision["layers"]):
        yield from _block_weights(vision, f"vision.layers.{block + 1}.", f"{_TOWER}transformer.layers.{block}.")
    yield from _projector_weights(vision, settings.model["llm"]["hidden"])
    yield from decoder_weights(settings, _DECODER)


def _block_weights(vision: Settings, ours: str, theirs: str) -> Iterator[ParameterSource]:
    hidden, heads, ffn = vision["hidden"], vision["heads"], vision["ffn"]
    yield as_is(f"{ours}input_layernorm.weight", f"{theirs}attention_norm.weight", (hidden,))
    yield as_is(f"{ours}pre_mlp_layernorm.weight", f"{theirs}ffn_norm.weight", (hidden,))
    query, key, value = (f"{theirs}attention.{name}_proj.weight" for name in "qkv")
    joint = f"{ours}self_attention.linear_qkv.weight"
    yield query_key_value(joint, (query, key, value), heads, heads, hidden // heads, (hidden,))
    output = f"{ours}self_attention.linear_proj.weight"
    yield as_is(output, f"{theirs}attention.o_proj.weight", (hidden, hidden))
    gate, up, down = (f"{theirs}feed_forward.{name}_proj.weight" for name in ("gate", "up", "down"))
    yield gate_and_up(f"{ours}mlp.linear_fc1.weight", gate, up, (ffn, hidden))
    yield as_is(f"{ours}mlp.linear_fc2.weight", down, (hidden, ffn))


def _projector_weights(vision: Settings, out: int) -> Iterator[ParameterSource]:
    ours, hidden = f"vision.layers.{vision['layers'] + 1}.", vision["hidden"]
    yield as_is(f"{ours}post_norm.weight", f"{_PROJECTOR}norm.weight", (hidden,))
    joined = (hidden, hidden * vision["merge"] ** 2)
    yield as_is(f"{ours}merge.weight", f"{_PROJECTOR}patch_merger.merging_layer.weight", joined)
    for linear, width in (("linear_1", hidden), ("linear_2", out)):
        kinds = (("weight", (out, width)), ("bias", (out,)))[: 1 + vision["projector"]["bias"]]
        for kind, shape in kinds:
            yield as_is(f"{ours}{linear}.{kind}", f"{_PROJECTOR}{linear}.{kind}", shape)


MISTRAL3 = Family(
    "mistral3",
    ("Mistral3ForConditionalGeneration",),
    _settings,
    _weights,
    {
        "config.json": _TINY,
        "preprocessor_config.json": {
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
            "size": {"longest_edge": 64},
            "patch_size": 8,
        },
        "processor_config.json": {
            "processor_class": "PixtralProcessor",
            "patch_size": 8,
            "spatial_merge_size": 2,
            "image_token": _IMAGE,
            "image_break_token": _BREAK,
            "image_end_token": _END,
        },
        "tokenizer_config.json": {
            "extra_special_tokens": {
                "image_token": _IMAGE,
                "image_break_token": _BREAK,
                "image_end_token": _END,
            }
        },
    },
    markups={"image": MediaMarkup(_IMAGE, _IMAGE, suffix=_END, row_break=_BREAK), "video": None},
    spellings=(
        (  # folders of the hub, and those that `transformers` writes
            (_TOWER, "vision_tower."),
            (_DECODER, "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
            (_PROJECTOR, "multi_modal_projector."),
        ),
        (),
    ),
    ignored=decoder_buffers,
)
