"""The vision tower of Gemma 4 and its projector, as `Gemma4VisionModel` of `transformers` computes them.

Pictures keep their shapes. Patches have learned positions and rotary ones; averages of squares of them are scaled, in
larger sizes also standardized, normalized and mapped by one matrix.
"""

from collections.abc import Iterator
from typing import Any

from mmtrain.families.clip import PLAIN_TRANSFORMER
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings
from mmtrain.families.weight_layouts import (
    ParameterSource,
    as_is,
    axial_head_features,
    axial_query_key_value,
    gate_and_up,
    table_of_stack,
)

VISION_PREFIXES = ("model.vision_tower.", "model.embed_vision.")
_TOWER, _PROJECTOR = VISION_PREFIXES
TINY_TOWER: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "patch_size": 8,
    "pooling_kernel_size": 2,
    "position_embedding_size": 512,
    "standardize": True,
}


def gemma4_vision_settings(tower: ConfigSection) -> Settings:
    """Return the settings of tower and projector."""
    tower.require("model_type", "gemma4_vision", default="gemma4_vision")
    tower.require("use_clipped_linears", False, default=False)
    tower.require("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    tower.require("attention_bias", False, None, default=False)
    tower.require("attention_dropout", 0, 0.0, None, default=0.0)
    tower.pass_over("global_head_dim", "default_output_length")  # which `transformers` does not read
    rotary = tower.section("rope_parameters")
    rotary.require("rope_type", "axial", "default", default="axial")
    rotary_base = rotary.number("rope_theta", 100.0)
    rotary.finish()
    hidden, heads = tower.integer("hidden_size", 768), tower.integer("num_attention_heads", 12)
    for key, derived in (("num_key_value_heads", heads), ("head_dim", hidden // heads)):
        default = {"num_key_value_heads": 12, "head_dim": 64}[key]
        tower.require(key, derived, default=default)
    vision = {
        **PLAIN_TRANSFORMER,
        "layers": tower.integer("num_hidden_layers", 16),
        "hidden": hidden,
        "heads": heads,
        "ffn": tower.integer("intermediate_size", 3072),
        "patch": tower.integer("patch_size", 16),
        "patch_order": "pixels",
        "activation": "gelu_tanh",
        "gated_mlp": True,
        "norm": "rms",
        "norm_eps": tower.number("rms_norm_eps", 1e-6),
        "qkv_bias": False,
        "linear_bias": False,
        "patch_bias": False,
        "head_norms": True,
        "post_norms": True,
        "positions": "factorized_rotary",
        "rotary_base": rotary_base,
        "max_side": tower.integer("position_embedding_size", 10240),
        "class_token": False,
        "pre_norm": False,
        "post_norm": False,
        "downsample": "average_pool",
        "merge": tower.integer("pooling_kernel_size", 3),
        "averages": "standardized" if tower.flag("standardize", False) else "scaled",
        "projector": {
            "kind": "linear",
            "bias": False,
            "norm": True,
            "norm_kind": "plain_rms",
            "norm_eps": None,
            "ffn": None,
        },
    }
    tower.finish()
    return vision


def gemma4_vision_weights(vision: Settings, out: int) -> Iterator[ParameterSource]:
    """Yield the weights of tower and projector; `out` is the width of the LLM."""
    hidden, patch, side = vision["hidden"], vision["patch"], vision["max_side"]
    embedder = f"{_TOWER}patch_embedder."
    yield as_is("vision.layers.0.proj.weight", f"{embedder}input_proj.weight", (hidden, 3 * patch**2))
    for number, ours in enumerate(("col_positions", "row_positions")):
        yield table_of_stack(f"vision.layers.0.{ours}", f"{embedder}position_embedding_table", number, (side, hidden))
    for block in range(vision["layers"]):
        yield from _block_weights(vision, f"vision.layers.{block + 1}.", f"{_TOWER}encoder.layers.{block}.")
    ours = f"vision.layers.{vision['layers'] + 1}."
    if vision["averages"] == "standardized":
        yield as_is(f"{ours}average_shift", f"{_TOWER}std_bias", (hidden,))
        yield as_is(f"{ours}average_scale", f"{_TOWER}std_scale", (hidden,))
    yield as_is(f"{ours}linear.weight", f"{_PROJECTOR}embedding_projection.weight", (out, hidden))


def _block_weights(vision: Settings, ours: str, theirs: str) -> Iterator[ParameterSource]:
    hidden, heads, ffn = vision["hidden"], vision["heads"], vision["ffn"]
    norms = {
        "input_layernorm": "input_layernorm",
        "self_attn_bda.norm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "mlp_bda.norm": "post_feedforward_layernorm",
    }
    for norm, tensor in norms.items():
        yield as_is(f"{ours}{norm}.weight", f"{theirs}{tensor}.weight", (hidden,))
    attention, head_dim = f"{ours}self_attention.", hidden // heads
    query, key, value = (f"{theirs}self_attn.{name}_proj.linear.weight" for name in "qkv")
    yield axial_query_key_value(f"{attention}linear_qkv.weight", (query, key, value), heads, head_dim, (hidden,))
    for name in "qk":
        yield axial_head_features(
            f"{attention}{name}_layernorm.weight", f"{theirs}self_attn.{name}_norm.weight", head_dim
        )
    yield as_is(f"{attention}linear_proj.weight", f"{theirs}self_attn.o_proj.linear.weight", (hidden, hidden))
    gate, up, down = (f"{theirs}mlp.{name}_proj.linear.weight" for name in ("gate", "up", "down"))
    yield gate_and_up(f"{ours}mlp.linear_fc1.weight", gate, up, (ffn, hidden))
    yield as_is(f"{ours}mlp.linear_fc2.weight", down, (hidden, ffn))
