"""InternVL3 and 3.5 (arXiv 2504.10479, 2508.18265), as `InternVLForConditionalGeneration` computes them.

InternViT sees one tile of a picture at a time; squares of patches are joined (pixel shuffle) and mapped to the LLM.
"""

from collections.abc import Iterator

from mmtrain.families.clip import ACTIVATIONS, PLAIN_TRANSFORMER, num_used_blocks
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_buffers, decoder_weights, tied_by_outer
from mmtrain.families.family import (
    MEDIA_TOKENS,
    TINY_TOKENS,
    Family,
    FolderSettings,
    MediaMarkup,
    Settings,
    tiny_decoder,
)
from mmtrain.families.text_decoders import text_settings
from mmtrain.families.video_processors import FRAME_COUNT
from mmtrain.families.weight_layouts import ParameterSource, as_is, flattened, query_key_value, without_leading_ones

_TOWER = "model.vision_tower."
_START, _END, _FEATURE = "<img>", "</img>", "<IMG_CONTEXT>"
_QK_NORM_EPS = 1e-6  # whatever that of the other norms is
_PROJECTOR_NORM_EPS = 1e-5
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_TINY = {
    "architectures": ["InternVLForConditionalGeneration"],
    "model_type": "internvl",
    "image_token_id": len(TINY_TOKENS) + 2,
    "image_seq_length": 4,
    "downsample_ratio": 0.5,
    "text_config": tiny_decoder(model_type="qwen2"),
    "vision_config": {
        "model_type": "internvl_vision",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "attention_bias": True,
        "image_size": [32, 32],
        "patch_size": [8, 8],
    },
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_TINY_IMAGES = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "processor_class": "InternVLProcessor",
    "size": {"height": 32, "width": 32},
    "crop_to_patches": False,
    "min_patches": 1,
    "max_patches": 4,
    "image_mean": _IMAGENET_MEAN,
    "image_std": _IMAGENET_STD,
}
_TINY_PROCESSOR = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
_TINY_TOKENIZER = {
    "extra_special_tokens": {
        "start_image_token": _START,
        "end_image_token": _END,
        "context_image_token": _FEATURE,
        "video_token": MEDIA_TOKENS["video"],
    }
}


def _settings(config: ConfigSection) -> FolderSettings:
    config.value("image_token_id")  # it belongs to the tokenizer
    config.require("vision_feature_select_strategy", "default", default="default")
    feature_layer = config.value("vision_feature_layer")
    feature_layer = -1 if feature_layer is None else feature_layer
    if type(feature_layer) is not int:
        config.reject("vision_feature_layer", f"{feature_layer} is not supported yet; supported: one whole number")
        feature_layer = -1
    text, tower = config.section("text_config"), config.section("vision_config")
    llm = tied_by_outer(config, text_settings(text, "qwen2"), default=True)
    vision = {
        **_tower_settings(tower, feature_layer),
        "downsample": "pixel_shuffle",
        "merge": _merge(config),
        "projector": {
            "kind": "mlp",
            "bias": True,
            "activation": config.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
            "norm": True,
            "norm_kind": "layer",
            "norm_eps": _PROJECTOR_NORM_EPS,
            "ffn": None,
        },
    }
    text.finish()
    tower.finish()
    side = vision["max_side"]
    if side % vision["merge"]:
        config.reject("downsample_ratio", f"{side} patches a side are no multiple of {vision['merge']}")
    num_features = (side // vision["merge"]) ** 2
    config.require("image_seq_length", num_features, default=256)
    image = {
        "scheme": "tiles",
        "tile": side * vision["patch"],
        "max_tiles": 12,
        "resample": "bicubic",
        "decode": "full",
        "mean": _IMAGENET_MEAN,
        "std": _IMAGENET_STD,
    }
    data: dict[str, Settings] = {"image": image, "video": {"sampling": "middles", **FRAME_COUNT}}
    return FolderSettings({"vision": vision, "llm": llm}, data, tuple(_unused_weights(vision, tower)))


def _merge(config: ConfigSection) -> int:
    """Return the side of the squares of patches that become one feature."""
    ratio = config.number("downsample_ratio", 0.5)
    merge = max(1, round(1 / ratio))
    if merge * ratio != 1:
        config.reject("downsample_ratio", f"{ratio} is not supported yet; supported: 1, 0.5, 0.25")
    return merge


def _tower_settings(config: ConfigSection, feature_layer: int) -> Settings:
    """Return the settings of InternViT, without what is done to its tokens."""
    config.require("model_type", "internvl_vision", default="internvl_vision")
    config.require("num_channels", 3, default=3)
    for key in ("hidden_dropout_prob", "attention_dropout", "projection_dropout"):
        config.require(key, 0, 0.0, default=0)
    config.require("use_absolute_position_embeddings", True, default=True)
    config.value("layer_scale_init_value")  # of new models
    config.flag("use_mask_token", False)
    norm_eps = config.number("layer_norm_eps", 1e-6)
    norm = config.choice("norm_type", {"layer_norm": "layer", "rms_norm": "rms"}, "layer_norm")
    qk_norm = config.flag("use_qk_norm", False)
    if qk_norm and norm_eps != _QK_NORM_EPS:
        config.reject("layer_norm_eps", f"{norm_eps} is not supported yet beside use_qk_norm; supported: 1e-06")
    has_last_norm = not config.flag("use_mean_pooling", True)
    post_norm = has_last_norm and feature_layer == -1
    if post_norm and norm == "rms":
        config.reject("use_mean_pooling", "false is not supported yet beside norm_type rms_norm; supported: true")
    patch, size = _side(config, "patch_size", 14), _side(config, "image_size", 448)
    if size % patch:
        config.reject("image_size", f"{size} is not a multiple of patch_size {patch}, which is not supported yet")
    return {
        **PLAIN_TRANSFORMER,
        "layers": num_used_blocks(config, feature_layer, 24),
        "hidden": config.integer("hidden_size", 1024),
        "heads": config.integer("num_attention_heads", 16),
        "ffn": config.integer("intermediate_size", 4096),
        "patch": patch,
        "activation": config.choice("hidden_act", ACTIVATIONS, "gelu"),
        "norm": norm,
        "norm_eps": norm_eps,
        "qkv_bias": config.flag("attention_bias", False),
        "qk_norm": qk_norm,
        "layer_scale": True,
        "patch_bias": True,
        "positions": "grid",
        "max_side": max(1, size // patch),
        "class_token": True,
        "pre_norm": False,
        "post_norm": post_norm,
    }


def _side(config: ConfigSection, key: str, default: int) -> int:
    """Read a side of a square, stated as one number or as two."""
    value = config.value(key)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1] and type(value[0]) is int and value[0] > 0:
        return int(value[0])
    if isinstance(value, list):
        config.reject(key, f"{value} is not supported yet; supported: a square")
        return default
    return config.integer(key, default)


def _weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    vision, llm = settings.model["vision"], settings.model["llm"]
    yield from _tower_weights(vision)
    ours, theirs = f"vision.layers.{vision['layers'] + 1}.", "model.multi_modal_projector."
    merged = vision["hidden"] * vision["merge"] ** 2
    for kind in ("weight", "bias"):
        yield as_is(f"{ours}norm.{kind}", f"{theirs}layer_norm.{kind}", (merged,))
    for linear, width in (("linear_1", merged), ("linear_2", llm["hidden"])):
        for kind, shape in (("weight", (llm["hidden"], width)), ("bias", (llm["hidden"],))):
            yield as_is(f"{ours}{linear}.{kind}", f"{theirs}{linear}.{kind}", shape)
    yield from decoder_weights(settings, "model.language_model.")


def _tower_weights(vision: Settings) -> Iterator[ParameterSource]:
    hidden, patch = vision["hidden"], vision["patch"]
    ours, theirs = "vision.layers.0.", f"{_TOWER}embeddings."
    projection = f"{theirs}patch_embeddings.projection"
    yield flattened(f"{ours}proj.weight", f"{projection}.weight", (hidden, 3, patch, patch))
    yield as_is(f"{ours}proj.bias", f"{projection}.bias", (hidden,))
    yield without_leading_ones(f"{ours}class_token", f"{theirs}cls_token", (hidden,))
    positions = (1 + vision["max_side"] ** 2, hidden)
    yield without_leading_ones(f"{ours}grid_positions", f"{theirs}position_embeddings", positions)
    for block in range(vision["layers"]):
        yield from _block_weights(vision, f"vision.layers.{block + 1}.", f"{_TOWER}encoder.layer.{block}.")
    if vision["post_norm"]:
        for kind in ("weight", "bias"):
            yield as_is(
                f"vision.layers.{vision['layers'] + 1}.post_norm.{kind}", f"{_TOWER}layernorm.{kind}", (hidden,)
            )


def _block_weights(vision: Settings, ours: str, theirs: str) -> Iterator[ParameterSource]:
    hidden, heads, ffn = vision["hidden"], vision["heads"], vision["ffn"]
    attention, mlp = f"{theirs}attention.", f"{theirs}mlp."
    norm_kinds = ("weight",) if vision["norm"] == "rms" else ("weight", "bias")
    for norm, name in (("input_layernorm", "layernorm_before"), ("pre_mlp_layernorm", "layernorm_after")):
        for kind in norm_kinds:
            yield as_is(f"{ours}{norm}.{kind}", f"{theirs}{name}.{kind}", (hidden,))
    for kind, inputs in (("weight", (hidden,)), ("bias", ()))[: 1 + vision["qkv_bias"]]:
        projections = (f"{attention}q_proj.{kind}", f"{attention}k_proj.{kind}", f"{attention}v_proj.{kind}")
        joint = f"{ours}self_attention.linear_qkv.{kind}"
        yield query_key_value(joint, projections, heads, heads, hidden // heads, inputs)
    if vision["qk_norm"]:
        for norm in ("q", "k"):
            yield as_is(f"{ours}self_attention.{norm}_layernorm.weight", f"{attention}{norm}_norm.weight", (hidden,))
    for kind, inputs, inner_inputs in (("weight", (hidden,), (ffn,)), ("bias", (), ())):
        output = f"{ours}self_attention.linear_proj.{kind}"
        yield as_is(output, f"{attention}projection_layer.{kind}", (hidden, *inputs))
        yield as_is(f"{ours}mlp.linear_fc1.{kind}", f"{mlp}fc1.{kind}", (ffn, *inputs))
        yield as_is(f"{ours}mlp.linear_fc2.{kind}", f"{mlp}fc2.{kind}", (hidden, *inner_inputs))
    yield as_is(f"{ours}self_attn_bda.weight", f"{theirs}lambda_1", (hidden,))
    yield as_is(f"{ours}mlp_bda.weight", f"{theirs}lambda_2", (hidden,))


def _unused_weights(vision: Settings, tower: ConfigSection) -> Iterator[ParameterSource]:
    """Yield what features do not depend on: blocks behind their layer, the last norm, and the mask of pretraining."""
    hidden = vision["hidden"]
    for block in range(vision["layers"], tower.integer("num_hidden_layers", 24)):
        yield from _block_weights(vision, f"vision.unused.{block}.", f"{_TOWER}encoder.layer.{block}.")
    if not vision["post_norm"] and not tower.flag("use_mean_pooling", True):
        for kind in ("weight", "bias"):
            yield as_is(f"vision.unused.post_norm.{kind}", f"{_TOWER}layernorm.{kind}", (hidden,))
    if tower.flag("use_mask_token", False):
        yield as_is("vision.unused.mask_token", f"{_TOWER}embeddings.mask_token", (1, 1, hidden))


INTERNVL = Family(
    "internvl",
    ("InternVLForConditionalGeneration",),
    _settings,
    _weights,
    {
        "config.json": _TINY,
        "preprocessor_config.json": _TINY_IMAGES,
        "processor_config.json": _TINY_PROCESSOR,
        "tokenizer_config.json": _TINY_TOKENIZER,
    },
    markups={
        "image": MediaMarkup(_FEATURE, _FEATURE, _START, _END),
        "video": MediaMarkup(
            MEDIA_TOKENS["video"], _FEATURE, f"Frame1: {_START}", _END, later_prefix=f"\nFrame{{number}}: {_START}"
        ),
    },
    image_processor={"crop_to_patches": True},
    spellings=(
        (
            (_TOWER, "vision_tower."),
            ("model.language_model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
        ),
        (),
    ),
    video_type="InternVLVideoProcessor",
    ignored=decoder_buffers,
)
