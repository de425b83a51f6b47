"""SigLIP's vision transformer (arXiv 2303.15343), as `SiglipVisionModel` of `transformers` computes it."""

from collections.abc import Iterator, Mapping
from typing import Any

from mmtrain.families.clip import ACTIVATIONS, PLAIN_TRANSFORMER, clip_block_weights, num_used_blocks
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings
from mmtrain.families.weight_layouts import ParameterSource, as_is, flattened

# The configuration of a tower in a tiny model, which takes pictures of 4 x 4 patches.
TINY_SIGLIP: Mapping[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "vision_use_head": False,
}


def siglip_settings(config: ConfigSection, feature_layer: int | None = None) -> Settings:
    """Return the settings of an encoder without its projector.

    feature_layer: features are `hidden_states[feature_layer]`, and blocks behind that layer and the last norm are not
        computed. By default features are the last hidden state behind the last norm.
    """
    config.require("num_channels", 3, default=3)
    config.require("attention_dropout", 0, 0.0, default=0)
    config.flag("vision_use_head", True)
    patch, size = config.integer("patch_size", 16), config.integer("image_size", 224)
    if patch > size:
        config.reject("patch_size", f"{patch} is larger than image_size {size}")
    return {
        **PLAIN_TRANSFORMER,
        "layers": num_used_blocks(config, -1 if feature_layer is None else feature_layer),
        "hidden": config.integer("hidden_size", 768),
        "heads": config.integer("num_attention_heads", 12),
        "ffn": config.integer("intermediate_size", 3072),
        "patch": patch,
        "activation": config.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
        "norm_eps": config.number("layer_norm_eps", 1e-6),
        "qkv_bias": True,
        "patch_bias": True,
        "positions": "grid",
        "max_side": max(1, size // patch),
        "class_token": False,
        "pre_norm": False,
        "post_norm": feature_layer is None,
    }


def siglip_weights(vision: Settings, model: str) -> Iterator[ParameterSource]:
    """Yield the weights of the encoder, without its projector; `model` is the prefix of its tensors."""
    hidden, patch = vision["hidden"], vision["patch"]
    ours, theirs = "vision.layers.0.", f"{model}embeddings."
    yield flattened(f"{ours}proj.weight", f"{theirs}patch_embedding.weight", (hidden, 3, patch, patch))
    yield as_is(f"{ours}proj.bias", f"{theirs}patch_embedding.bias", (hidden,))
    num_positions = vision["max_side"] ** 2
    yield as_is(f"{ours}grid_positions", f"{theirs}position_embedding.weight", (num_positions, hidden))
    for block in range(vision["layers"]):
        yield from clip_block_weights(vision, f"vision.layers.{block + 1}.", f"{model}encoder.layers.{block}.")
    if vision["post_norm"]:
        yield from _post_norm_weights(vision, f"vision.layers.{vision['layers'] + 1}.post_norm.", model)


def unused_siglip_weights(vision: Settings, num_blocks: int, has_head: bool, model: str) -> Iterator[ParameterSource]:
    """Yield the weights that features do not depend on: later blocks, the last norm, and the pooling head."""
    ours, hidden, ffn = "vision.unused.", vision["hidden"], vision["ffn"]
    for block in range(vision["layers"], num_blocks):
        yield from clip_block_weights(vision, f"{ours}{block}.", f"{model}encoder.layers.{block}.")
    if not vision["post_norm"]:
        yield from _post_norm_weights(vision, f"{ours}post_norm.", model)
    head_shapes = {
        "probe": (1, 1, hidden),
        "attention.in_proj_weight": (3 * hidden, hidden),
        "attention.in_proj_bias": (3 * hidden,),
        "attention.out_proj.weight": (hidden, hidden),
        "attention.out_proj.bias": (hidden,),
        "layernorm.weight": (hidden,),
        "layernorm.bias": (hidden,),
        "mlp.fc1.weight": (ffn, hidden),
        "mlp.fc1.bias": (ffn,),
        "mlp.fc2.weight": (hidden, ffn),
        "mlp.fc2.bias": (hidden,),
    }
    for name, shape in head_shapes.items() if has_head else ():
        yield as_is(f"{ours}head.{name}", f"{model}head.{name}", shape)


def _post_norm_weights(vision: Settings, ours: str, model: str) -> Iterator[ParameterSource]:
    for kind in ("weight", "bias"):
        yield as_is(f"{ours}{kind}", f"{model}post_layernorm.{kind}", (vision["hidden"],))
