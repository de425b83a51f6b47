"""CLIP's vision transformer (arXiv 2103.00020), as `CLIPVisionModel` of `transformers` computes it."""

from collections.abc import Iterator

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings
from mmtrain.families.weight_layouts import ParameterSource, as_is, flattened, query_key_value

MEAN = (0.48145466, 0.4578275, 0.40821073)  # of RGB values, as in OpenAI's release
STD = (0.26862954, 0.26130258, 0.27577711)
# Of towers whose tokens are features as they are.
PLAIN_TRANSFORMER: Settings = {
    "temporal_patch": 1,
    "time_positions_per_second": None,
    "patch_seconds": "sampled",
    "gated_mlp": False,
    "norm": "layer",
    "qk_norm": False,
    "head_norms": False,
    "post_norms": False,
    "layer_scale": False,
    "rotary_frequencies": "alike",
    "rotary_base": 10_000.0,
    "position_grid": 0,
    "position_interpolation": "bilinear",
    "linear_bias": True,
    "patch_order": "colors",
    "patch_norm": False,
    "deepstack": (),
    "window": 0,
    "full_attention_blocks": (),
    "class_feature": False,
    "join_tiles": False,
    "max_joined_tiles": None,
    "pool_frames": False,
    "downsample": "identity",
    "averages": "plain",
    "merge": 1,
}
ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def clip_settings(config: ConfigSection, feature_layer: int) -> Settings:
    """Return the settings of an encoder whose features are `hidden_states[feature_layer]`, without its projector.

    Blocks behind that layer, and the last norm, are not computed.
    """
    config.require("num_channels", 3, default=3)
    config.require("attention_dropout", 0, 0.0, default=0)
    config.value("vocab_size")  # of the text tower, which such configs carry along
    used_blocks = num_used_blocks(config, feature_layer)
    patch, size = config.integer("patch_size", 32), config.integer("image_size", 224)
    if size % patch:
        config.reject("image_size", f"{size} is not a multiple of patch_size {patch}, which is not supported yet")
    return {
        **PLAIN_TRANSFORMER,
        "layers": used_blocks,
        "hidden": config.integer("hidden_size", 768),
        "heads": config.integer("num_attention_heads", 12),
        "ffn": config.integer("intermediate_size", 3072),
        "patch": patch,
        "activation": config.choice("hidden_act", ACTIVATIONS, "quick_gelu"),
        "norm_eps": config.number("layer_norm_eps", 1e-5),
        "qkv_bias": True,
        "patch_bias": False,
        "positions": "grid",
        "max_side": max(1, size // patch),
        "class_token": True,
        "pre_norm": True,
        "post_norm": False,
    }


def num_used_blocks(config: ConfigSection, feature_layer: int, default: int = 12) -> int:
    """Return how many blocks of a tower compute `hidden_states[feature_layer]`; it has `default` if it states none."""
    num_blocks = config.integer("num_hidden_layers", default)
    used_blocks = feature_layer if feature_layer >= 0 else num_blocks + 1 + feature_layer
    if 1 <= used_blocks <= num_blocks:
        return used_blocks
    config.reject("num_hidden_layers", f"{num_blocks} blocks have no features of layer {feature_layer}")
    return 1


def clip_weights(vision: Settings, model: str) -> Iterator[ParameterSource]:
    """Yield the weights of the encoder, without its projector; `model` is the prefix of its tensors."""
    hidden, patch = vision["hidden"], vision["patch"]
    ours, theirs = "vision.layers.0.", f"{model}embeddings."
    yield flattened(f"{ours}proj.weight", f"{theirs}patch_embedding.weight", (hidden, 3, patch, patch))
    yield as_is(f"{ours}class_token", f"{theirs}class_embedding", (hidden,))
    num_positions = 1 + vision["max_side"] ** 2
    yield as_is(f"{ours}grid_positions", f"{theirs}position_embedding.weight", (num_positions, hidden))
    for kind in ("weight", "bias"):
        yield as_is(f"{ours}pre_norm.{kind}", f"{model}pre_layrnorm.{kind}", (hidden,))
    for block in range(vision["layers"]):
        yield from clip_block_weights(vision, f"vision.layers.{block + 1}.", f"{model}encoder.layers.{block}.")


def clip_block_weights(vision: Settings, ours: str, theirs: str) -> Iterator[ParameterSource]:
    """Yield the weights of one block; `ours` and `theirs` are the prefixes of its names."""
    hidden, heads, ffn = vision["hidden"], vision["heads"], vision["ffn"]
    attention, mlp = f"{theirs}self_attn.", f"{theirs}mlp."
    for kind, inputs, inner_inputs in (("weight", (hidden,), (ffn,)), ("bias", (), ())):
        yield as_is(f"{ours}input_layernorm.{kind}", f"{theirs}layer_norm1.{kind}", (hidden,))
        projections = (f"{attention}q_proj.{kind}", f"{attention}k_proj.{kind}", f"{attention}v_proj.{kind}")
        joint = f"{ours}self_attention.linear_qkv.{kind}"
        yield query_key_value(joint, projections, heads, heads, hidden // heads, inputs)
        output = f"{ours}self_attention.linear_proj.{kind}"
        yield as_is(output, f"{attention}out_proj.{kind}", (hidden, *inputs))
        yield as_is(f"{ours}pre_mlp_layernorm.{kind}", f"{theirs}layer_norm2.{kind}", (hidden,))
        yield as_is(f"{ours}mlp.linear_fc1.{kind}", f"{mlp}fc1.{kind}", (ffn, *inputs))
        yield as_is(f"{ours}mlp.linear_fc2.{kind}", f"{mlp}fc2.{kind}", (hidden, *inner_inputs))


def unused_clip_weights(vision: Settings, num_blocks: int, model: str) -> Iterator[ParameterSource]:
    """Yield the weights behind the layer of the features, as if the encoder had `num_blocks` and a last norm."""
    for block in range(vision["layers"], num_blocks):
        yield from clip_block_weights(vision, f"vision.unused.{block}.", f"{model}encoder.layers.{block}.")
    for kind in ("weight", "bias"):
        yield as_is(f"vision.unused.post_norm.{kind}", f"{model}post_layernorm.{kind}", (vision["hidden"],))
