"""The autoencoders of Stable Diffusion and PixArt, as `AutoencoderKL` of `diffusers` computes it."""

from collections.abc import Iterator, Sequence

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import PrefixChange, Settings
from mmtrain.families.weight_layouts import ParameterSource, as_is

AUTOENCODER = "autoencoder"  # what the unit is called in folders; no unit of a recipe
_PIXEL_CHANNELS = 3
_KERNEL = (3, 3)
_POINT_KERNEL = (1, 1)
_STABLE_DIFFUSION_SCALE = 0.18215  # of latents to a variance of 1 (arXiv 2112.10752), if a config states none
_OLDER_LINEARS = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
# Folders of before 2023, Stable Diffusion's among them, have older names for the parts of the attention.
OLDER_ATTENTION: tuple[PrefixChange, ...] = tuple(
    (f"{half}.mid_block.attentions.0.{name}.", f"{half}.mid_block.attentions.0.{older}.")
    for half in ("encoder", "decoder")
    for name, older in _OLDER_LINEARS.items()
)
_WITHOUT_EFFECT = ("force_upcast", "sample_size")  # tiling, and the precision on a GPU


def autoencoder_settings(config: ConfigSection) -> Settings:
    """Return the settings of an autoencoder; what is not built is rejected by key."""
    widths = _widths(config)
    down_types, up_types = ["DownEncoderBlock2D"] * len(widths), ["UpDecoderBlock2D"] * len(widths)
    config.require("act_fn", "silu", default="silu")
    config.require("in_channels", _PIXEL_CHANNELS, default=_PIXEL_CHANNELS)
    config.require("out_channels", _PIXEL_CHANNELS, default=_PIXEL_CHANNELS)
    config.require("down_block_types", down_types, default=["DownEncoderBlock2D"])
    config.require("up_block_types", up_types, default=["UpDecoderBlock2D"])
    config.require("latents_mean", None, default=None)
    config.require("latents_std", None, default=None)
    config.pass_over(*_WITHOUT_EFFECT)
    groups = config.integer("norm_num_groups", 32)
    if any(width % groups for width in widths):
        config.reject("norm_num_groups", f"{groups} does not divide all of block_out_channels {list(widths)}")
    shift = config.value("shift_factor")
    if shift is not None and type(shift) not in (int, float):
        config.reject("shift_factor", f"found {shift!r}, allowed: a number or null")
        shift = None
    return {
        "widths": widths,
        "heads": (1,),
        "layers": config.integer("layers_per_block", 1),
        "latent_channels": config.integer("latent_channels", 4),
        "norm_groups": groups,
        "scale": config.number("scaling_factor", _STABLE_DIFFUSION_SCALE),
        "shift": float(shift or 0.0),
        "has_attention": config.flag("mid_block_add_attention", True),
        "has_quantizing": config.flag("use_quant_conv", True),
        "has_dequantizing": config.flag("use_post_quant_conv", True),
    }


def latent_settings(settings: Settings) -> Settings:
    """Return what a generator of the autoencoder's latents must have in a recipe."""
    return {"channels": settings["latent_channels"], "latent_scale": 2 ** (len(settings["widths"]) - 1)}


def autoencoder_weights(settings: Settings) -> Iterator[ParameterSource]:
    """Yield the weights of both halves. Our names are those of `diffusers`, behind the unit's."""
    yield from _encoder_weights(settings)
    yield from _decoder_weights(settings)


def _encoder_weights(settings: Settings) -> Iterator[ParameterSource]:
    widths, latents = settings["widths"], 2 * settings["latent_channels"]  # mean and variance
    yield from _affine("encoder.conv_in", (widths[0], _PIXEL_CHANNELS, *_KERNEL))
    width = widths[0]
    for level, out in enumerate(widths):
        block = f"encoder.down_blocks.{level}"
        for i in range(settings["layers"]):
            yield from _residual_weights(f"{block}.resnets.{i}", width, out)
            width = out
        if level < len(widths) - 1:
            yield from _affine(f"{block}.downsamplers.0.conv", (width, width, *_KERNEL))
    yield from _middle_weights("encoder.mid_block", width, settings["has_attention"])
    yield from _affine("encoder.conv_norm_out", (width,))
    yield from _affine("encoder.conv_out", (latents, width, *_KERNEL))
    if settings["has_quantizing"]:
        yield from _affine("quant_conv", (latents, latents, *_POINT_KERNEL))


def _decoder_weights(settings: Settings) -> Iterator[ParameterSource]:
    widths, latents = settings["widths"][::-1], settings["latent_channels"]
    if settings["has_dequantizing"]:
        yield from _affine("post_quant_conv", (latents, latents, *_POINT_KERNEL))
    width = widths[0]
    yield from _affine("decoder.conv_in", (width, latents, *_KERNEL))
    yield from _middle_weights("decoder.mid_block", width, settings["has_attention"])
    for level, out in enumerate(widths):
        block = f"decoder.up_blocks.{level}"
        for i in range(settings["layers"] + 1):
            yield from _residual_weights(f"{block}.resnets.{i}", width, out)
            width = out
        if level < len(widths) - 1:
            yield from _affine(f"{block}.upsamplers.0.conv", (width, width, *_KERNEL))
    yield from _affine("decoder.conv_norm_out", (width,))
    yield from _affine("decoder.conv_out", (_PIXEL_CHANNELS, width, *_KERNEL))


def _middle_weights(name: str, width: int, has_attention: bool) -> Iterator[ParameterSource]:
    for i in range(2):
        yield from _residual_weights(f"{name}.resnets.{i}", width, width)
    if has_attention:
        attention = f"{name}.attentions.0"
        yield from _affine(f"{attention}.group_norm", (width,))
        for linear in _OLDER_LINEARS:
            yield from _affine(f"{attention}.{linear}", (width, width))


def _residual_weights(name: str, width: int, out: int) -> Iterator[ParameterSource]:
    yield from _affine(f"{name}.norm1", (width,))
    yield from _affine(f"{name}.conv1", (out, width, *_KERNEL))
    yield from _affine(f"{name}.norm2", (out,))
    yield from _affine(f"{name}.conv2", (out, out, *_KERNEL))
    if width != out:
        yield from _affine(f"{name}.conv_shortcut", (out, width, *_POINT_KERNEL))


def _affine(name: str, shape: Sequence[int]) -> Iterator[ParameterSource]:
    """Yield weight and bias of a linear, a convolution or a norm."""
    yield as_is(f"{AUTOENCODER}.{name}.weight", f"{name}.weight", shape)
    yield as_is(f"{AUTOENCODER}.{name}.bias", f"{name}.bias", shape[:1])


def _widths(config: ConfigSection) -> tuple[int, ...]:
    value = config.value("block_out_channels")
    if value is None:
        return (64,)
    if isinstance(value, list) and value and all(type(width) is int and width >= 1 for width in value):
        return tuple(value)
    config.reject("block_out_channels", f"found {value!r}, allowed: a list of whole numbers of at least 1")
    return (config.integer("norm_num_groups", 32),)
