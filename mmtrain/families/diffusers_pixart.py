"""PixArt's diffusion transformer (arXiv 2310.00426), as `PixArtTransformer2DModel` of `diffusers` computes it."""

from collections.abc import Iterator
from typing import Any

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings
from mmtrain.families.weight_layouts import ParameterSource, as_is, by_head, channels_first, flattened

_FFN_FACTOR = 4  # inner width of an MLP / width of its block
_NUM_FREQUENCIES = 256  # sinusoidal features of a timestep
_CLASS = "PixArtTransformer2DModel"
_SIDE_WITH_SIZE_CONDITIONS = 128  # `diffusers` adds conditions on resolution and aspect ratio from this side on
_FIXED: dict[str, object] = {  # what is built; `diffusers` assumes the same if a key is missing
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "attention_type": "default",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "norm_type": "ada_norm_single",
    "upcast_attention": False,
}
_WITHOUT_EFFECT = ("norm_num_groups", "num_embeds_ada_norm")
# The projection of a text encoder's outputs to the context. Here the projector from the LLM's outputs replaces it.
_CAPTION_PROJECTION = "caption_projection"


def pixart_settings(config: ConfigSection) -> Settings:
    """Return the settings of a diffusion transformer; what is not built is rejected by key."""
    for key, supported in _FIXED.items():
        config.require(key, supported, default=supported)
    config.require("dropout", 0, 0.0, default=0.0)
    config.pass_over(*_WITHOUT_EFFECT)
    heads, head_dim = config.integer("num_attention_heads", 16), config.integer("attention_head_dim", 72)
    channels = config.integer("in_channels", 4)
    config.require("out_channels", 2 * channels, default=8)
    sample_size = config.integer("sample_size", 128)
    config.require("interpolation_scale", None, max(sample_size // 64, 1), default=None)
    config.optional_integer("caption_channels")
    _reject_size_conditions(config, sample_size)
    return {
        "kind": "dit",
        "widths": (heads * head_dim,),
        "heads": (heads,),
        "layers": config.integer("num_layers", 28),
        "channels": channels,
        "patch": config.integer("patch_size", 2),
        "context_width": config.integer("cross_attention_dim", 1152),
        "sample_size": sample_size,
    }


def _reject_size_conditions(config: ConfigSection, sample_size: int) -> None:
    """Reject conditions on resolution and aspect ratio. Where the key is missing or null, the side decides."""
    stated = config.value("use_additional_conditions")
    if stated is None and sample_size == _SIDE_WITH_SIZE_CONDITIONS:
        text = f"conditions on the image's size, which sample_size {sample_size} implies, are not supported yet"
        config.reject("use_additional_conditions", f"{text}; supported: false")
    elif stated is not None:
        config.require("use_additional_conditions", False, default=False)


def pixart_config(settings: Settings) -> dict[str, Any]:
    """Return the `config.json` of a diffusion transformer with these settings."""
    (width,), (heads,) = settings["widths"], settings["heads"]
    return {
        "_class_name": _CLASS,
        **_FIXED,
        "attention_head_dim": width // heads,
        "caption_channels": None,
        "cross_attention_dim": settings["context_width"],
        "dropout": 0.0,
        "in_channels": settings["channels"],
        "interpolation_scale": None,
        "num_attention_heads": heads,
        "num_embeds_ada_norm": 1000,
        "num_layers": settings["layers"],
        "out_channels": 2 * settings["channels"],
        "patch_size": settings["patch"],
        "sample_size": settings["sample_size"],
        "use_additional_conditions": False,
    }


def pixart_ignored() -> tuple[str, ...]:
    """Return the names of tensors that a folder may have and that this model does not compute."""
    return tuple(
        f"{_CAPTION_PROJECTION}.{linear}.{kind}" for linear in ("linear_1", "linear_2") for kind in ("weight", "bias")
    )


def pixart_weights(settings: Settings) -> Iterator[ParameterSource]:
    """Yield the weights of all layers behind the projector of the context, which is layer 0."""
    (width,) = settings["widths"]
    channels, patch = settings["channels"], settings["patch"]
    embed, embedder = "generator.layers.1.", "adaln_single.emb.timestep_embedder."
    yield flattened(f"{embed}proj.weight", "pos_embed.proj.weight", (width, channels, patch, patch))
    yield as_is(f"{embed}proj.bias", "pos_embed.proj.bias", (width,))
    yield from _affine(f"{embed}time_fc1", f"{embedder}linear_1", width, _NUM_FREQUENCIES)
    yield from _affine(f"{embed}time_fc2", f"{embedder}linear_2", width, width)
    yield from _affine(f"{embed}modulation", "adaln_single.linear", 6 * width, width)
    for block in range(settings["layers"]):
        yield from _block_weights(settings, f"generator.layers.{block + 2}.", f"transformer_blocks.{block}.")
    out = f"generator.layers.{settings['layers'] + 2}."
    yield as_is(f"{out}modulation", "scale_shift_table", (2, width))
    for kind, inputs in (("weight", (width,)), ("bias", ())):
        yield channels_first(f"{out}proj.{kind}", f"proj_out.{kind}", patch**2, 2 * channels, inputs)


def _block_weights(settings: Settings, ours: str, theirs: str) -> Iterator[ParameterSource]:
    (width,), (heads,) = settings["widths"], settings["heads"]
    context, ffn = settings["context_width"], _FFN_FACTOR * width
    yield as_is(f"{ours}modulation", f"{theirs}scale_shift_table", (6, width))
    for kind, inputs, context_inputs in (("weight", (width,), (context,)), ("bias", (), ())):
        queries_keys_values = [f"{theirs}attn1.to_{x}.{kind}" for x in "qkv"]
        yield by_head(f"{ours}self_attention.linear_qkv.{kind}", queries_keys_values, heads, (width, *inputs))
        keys_values = [f"{theirs}attn2.to_{x}.{kind}" for x in "kv"]
        yield by_head(f"{ours}cross_attention.linear_kv.{kind}", keys_values, heads, (width, *context_inputs))
    yield from _affine(f"{ours}self_attention.linear_proj", f"{theirs}attn1.to_out.0", width, width)
    yield from _affine(f"{ours}cross_attention.linear_q", f"{theirs}attn2.to_q", width, width)
    yield from _affine(f"{ours}cross_attention.linear_proj", f"{theirs}attn2.to_out.0", width, width)
    yield from _affine(f"{ours}mlp.linear_fc1", f"{theirs}ff.net.0.proj", ffn, width)
    yield from _affine(f"{ours}mlp.linear_fc2", f"{theirs}ff.net.2", width, ffn)


def _affine(ours: str, theirs: str, outputs: int, inputs: int) -> Iterator[ParameterSource]:
    """Yield weight and bias of a linear."""
    yield as_is(f"{ours}.weight", f"{theirs}.weight", (outputs, inputs))
    yield as_is(f"{ours}.bias", f"{theirs}.bias", (outputs,))
