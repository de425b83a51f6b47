"""The U-Net of Stable Diffusion 2, as `UNet2DConditionModel` of `diffusers` computes it."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings
from mmtrain.families.weight_layouts import ParameterSource, as_is, by_head, swapped_halves

_KERNEL = (3, 3)
_SHORTCUT_KERNEL = (1, 1)
_TIME_FACTOR = 4  # width of the timestep's features / width of the finest level
_FFN_FACTOR = 4  # inner width of an MLP / width of its level
_SAMPLE_SIZE = 64  # of a config that states none: a U-Net does not compute with it
_CLASS = "UNet2DConditionModel"
_FIXED: dict[str, object] = {  # what is built; `diffusers` assumes the same if a key is missing
    "act_fn": "silu",
    "attention_type": "default",
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
    "downsample_padding": 1,
    "flip_sin_to_cos": True,
    "mid_block_scale_factor": 1,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "norm_eps": 1e-5,
    "resnet_out_scale_factor": 1.0,
    "resnet_time_scale_shift": "default",
    "time_embedding_type": "positional",
    "transformer_layers_per_block": 1,
}
_WITHOUT_EFFECT = ("addition_embed_type_num_heads", "projection_class_embeddings_input_dim", "upcast_attention")


class _Layer(NamedTuple):
    """One layer of the U-Net in execution order."""

    kind: str
    tensors: str  # prefix of its tensors' names
    width: int  # channels of its input
    out: int
    heads: int = 0


def unet_settings(config: ConfigSection) -> Settings:
    """Return the settings of a U-Net; what is not built is rejected by key."""
    widths = _integers(config, "block_out_channels", (320, 640, 1280, 1280))
    num_levels = len(widths)
    for key, supported in _FIXED.items():
        alternatives = (int(supported),) if isinstance(supported, float) and supported == int(supported) else ()
        config.require(key, supported, *alternatives, default=supported)
    config.require("use_linear_projection", True, default=False)
    config.require("dropout", 0, 0.0, default=0.0)
    config.require("down_block_types", _down_types(num_levels), default=_down_types(num_levels))
    config.require("up_block_types", _down_types(num_levels, up=True), default=_down_types(num_levels, up=True))
    config.pass_over(*_WITHOUT_EFFECT)
    channels = config.integer("in_channels", 4)
    config.require("out_channels", channels, default=4)
    return {
        "kind": "unet",
        "widths": widths,
        # `diffusers` calls the number of heads `attention_head_dim`.
        "heads": _integers(config, "attention_head_dim", (8,) * num_levels, num_levels),
        "layers": config.integer("layers_per_block", 2),
        "channels": channels,
        "patch": 1,
        "context_width": config.integer("cross_attention_dim", 1280),
        "sample_size": config.optional_integer("sample_size") or _SAMPLE_SIZE,
        "norm_groups": config.integer("norm_num_groups", 32),
    }


def unet_config(settings: Settings) -> dict[str, Any]:
    """Return the `config.json` of a U-Net with these settings."""
    num_levels = len(settings["widths"])
    return {
        "_class_name": _CLASS,
        **_FIXED,
        "attention_head_dim": list(settings["heads"]),
        "block_out_channels": list(settings["widths"]),
        "center_input_sample": False,
        "cross_attention_dim": settings["context_width"],
        "down_block_types": _down_types(num_levels),
        "freq_shift": 0,
        "in_channels": settings["channels"],
        "layers_per_block": settings["layers"],
        "norm_num_groups": settings["norm_groups"],
        "out_channels": settings["channels"],
        "sample_size": settings["sample_size"],
        "up_block_types": _down_types(num_levels, up=True),
        "use_linear_projection": True,
    }


def unet_weights(settings: Settings) -> Iterator[ParameterSource]:
    """Yield the weights of all layers behind the projector of the context, which is layer 0."""
    for index, layer in enumerate(_layers(settings), start=1):
        ours = f"generator.layers.{index}."
        match layer.kind:
            case "embed":
                yield from _embed_weights(settings, ours)
            case "residual":
                yield from _residual_weights(settings, layer, ours)
            case "attention":
                yield from _attention_weights(settings, layer, ours)
            case "out":
                yield from _affine(f"{ours}norm", "conv_norm_out", (layer.width,))
                yield from _affine(f"{ours}conv", "conv_out", (layer.out, layer.width, *_KERNEL))
            case _:
                yield from _affine(f"{ours}conv", f"{layer.tensors}.conv", (layer.out, layer.width, *_KERNEL))


def _layers(settings: Settings) -> Iterator[_Layer]:
    widths, heads, last = settings["widths"], settings["heads"], len(settings["widths"]) - 1
    yield _Layer("embed", "", settings["channels"], widths[0])
    width = widths[0]
    kept = [width]
    for level, out in enumerate(widths):
        block = f"down_blocks.{level}"
        for i in range(settings["layers"]):
            yield _Layer("residual", f"{block}.resnets.{i}", width, out)
            if level < last:
                yield _Layer("attention", f"{block}.attentions.{i}", out, out, heads[level])
            width = out
            kept.append(width)
        if level < last:
            yield _Layer("down", f"{block}.downsamplers.0", width, width)
            kept.append(width)
    yield _Layer("residual", "mid_block.resnets.0", width, width)
    yield _Layer("attention", "mid_block.attentions.0", width, width, heads[last])
    yield _Layer("residual", "mid_block.resnets.1", width, width)
    for level in range(last, -1, -1):
        block = f"up_blocks.{last - level}"
        for i in range(settings["layers"] + 1):
            yield _Layer("residual", f"{block}.resnets.{i}", width + kept.pop(), widths[level])
            if level < last:
                yield _Layer("attention", f"{block}.attentions.{i}", widths[level], widths[level], heads[level])
            width = widths[level]
        if level > 0:
            yield _Layer("up", f"{block}.upsamplers.0", width, width)
    yield _Layer("out", "", width, settings["channels"])


def _embed_weights(settings: Settings, ours: str) -> Iterator[ParameterSource]:
    width = settings["widths"][0]
    time_width = _TIME_FACTOR * width
    yield from _affine(f"{ours}conv", "conv_in", (width, settings["channels"], *_KERNEL))
    yield from _affine(f"{ours}time_fc1", "time_embedding.linear_1", (time_width, width))
    yield from _affine(f"{ours}time_fc2", "time_embedding.linear_2", (time_width, time_width))


def _residual_weights(settings: Settings, layer: _Layer, ours: str) -> Iterator[ParameterSource]:
    theirs, width, out = layer.tensors, layer.width, layer.out
    yield from _affine(f"{ours}norm1", f"{theirs}.norm1", (width,))
    yield from _affine(f"{ours}conv1", f"{theirs}.conv1", (out, width, *_KERNEL))
    yield from _affine(f"{ours}time", f"{theirs}.time_emb_proj", (out, _TIME_FACTOR * settings["widths"][0]))
    yield from _affine(f"{ours}norm2", f"{theirs}.norm2", (out,))
    yield from _affine(f"{ours}conv2", f"{theirs}.conv2", (out, out, *_KERNEL))
    if width != out:
        yield from _affine(f"{ours}shortcut", f"{theirs}.conv_shortcut", (out, width, *_SHORTCUT_KERNEL))


def _attention_weights(settings: Settings, layer: _Layer, ours: str) -> Iterator[ParameterSource]:
    width, heads, context = layer.width, layer.heads, settings["context_width"]
    ffn = _FFN_FACTOR * width
    block = f"{layer.tensors}.transformer_blocks.0"
    yield from _affine(f"{ours}norm", f"{layer.tensors}.norm", (width,))
    yield from _affine(f"{ours}linear_in", f"{layer.tensors}.proj_in", (width, width))
    yield from _affine(f"{ours}linear_out", f"{layer.tensors}.proj_out", (width, width))
    for norm, number in (("self_attention_norm", 1), ("cross_attention_norm", 2), ("mlp_norm", 3)):
        yield from _affine(f"{ours}{norm}", f"{block}.norm{number}", (width,))
    queries_keys_values = [f"{block}.attn1.to_{x}.weight" for x in "qkv"]
    yield by_head(f"{ours}self_attention.linear_qkv.weight", queries_keys_values, heads, (width, width))
    yield from _affine(f"{ours}self_attention.linear_proj", f"{block}.attn1.to_out.0", (width, width))
    yield as_is(f"{ours}cross_attention.linear_q.weight", f"{block}.attn2.to_q.weight", (width, width))
    keys_values = [f"{block}.attn2.to_{x}.weight" for x in "kv"]
    yield by_head(f"{ours}cross_attention.linear_kv.weight", keys_values, heads, (width, context))
    yield from _affine(f"{ours}cross_attention.linear_proj", f"{block}.attn2.to_out.0", (width, width))
    for kind, inputs in (("weight", (width,)), ("bias", ())):  # values first there, gates first here
        yield swapped_halves(f"{ours}mlp.linear_fc1.{kind}", f"{block}.ff.net.0.proj.{kind}", (2 * ffn, *inputs))
    yield from _affine(f"{ours}mlp.linear_fc2", f"{block}.ff.net.2", (width, ffn))


def _affine(ours: str, theirs: str, shape: Sequence[int]) -> Iterator[ParameterSource]:
    """Yield weight and bias of a linear, a convolution or a norm."""
    yield as_is(f"{ours}.weight", f"{theirs}.weight", shape)
    yield as_is(f"{ours}.bias", f"{theirs}.bias", shape[:1])


def _down_types(num_levels: int, up: bool = False) -> list[str]:
    """Return the types of the levels: all but the coarsest have attention."""
    if up:
        return ["UpBlock2D", *["CrossAttnUpBlock2D"] * (num_levels - 1)]
    return [*["CrossAttnDownBlock2D"] * (num_levels - 1), "DownBlock2D"]


def _integers(config: ConfigSection, key: str, default: tuple[int, ...], length: int | None = None) -> tuple[int, ...]:
    """Return a list of whole numbers of at least 1; with a `length`, one number stands for that many."""
    value = config.value(key)
    value = list(default) if value is None else value
    if type(value) is int and length is not None:
        value = [value] * length
    is_list = isinstance(value, list) and value and all(type(number) is int and number >= 1 for number in value)
    if is_list and length in (None, len(value)):
        return tuple(value)
    allowed = "whole numbers of at least 1" if length is None else f"{length} whole numbers of at least 1"
    config.reject(key, f"found {value}, allowed: {allowed}")
    return (1,) * (length or 1)
