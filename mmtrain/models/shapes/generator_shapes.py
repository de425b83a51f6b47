"""Image generators after the LLM, as shapes: the U-Net of Stable Diffusion 2 and a diffusion transformer (DiT).

Both predict the noise of one latent image from three inputs: its tokens (positions of the latent; in a transformer
patches of it), a timestep, and the LLM's outputs. A linear layer maps the outputs to the context that every attention
block reads. Modules of these shapes are in `models.generator`.
"""

from collections.abc import Iterator
from dataclasses import replace

from mmtrain.models.shapes.layer_shape import (
    Attention,
    DenseMlp,
    GeneratorShape,
    LayerShape,
    MediaShape,
    linear_parameters,
)
from mmtrain.recipe.settings.generator_settings import GeneratorSettings

TIMESTEP_WIDTH_FACTOR = 4  # width of the timestep's features / width of the finest level (Stable Diffusion's U-Net)
GENERATOR_FFN_FACTOR = 4  # inner width of an MLP / width of its block, in both kinds
NUM_TIMESTEP_FREQUENCIES = 256  # sinusoidal features of a timestep (DiT, arXiv 2212.09748)
_CONV_TAPS = 9  # inputs of a 3 x 3 convolution for each channel
_ATTENTION_LINEARS = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "cross_attention.linear_q",
    "cross_attention.linear_kv",
    "cross_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_WITHOUT_BIAS = ("self_attention.linear_qkv", "cross_attention.linear_q", "cross_attention.linear_kv")  # of a U-Net


def generator_layers(settings: GeneratorSettings, llm_hidden: int) -> tuple[LayerShape, ...]:
    """Describe all layers in execution order; the projector of the context is the first."""
    reads = GeneratorShape(context=settings.context_tokens)
    context = LayerShape("context_projector", hidden=llm_hidden, out=settings.context_width, generator=reads)
    body = _unet(settings) if settings.kind == "unet" else _diffusion_transformer(settings)
    return (context, *body)


def generator_parameters(layer: LayerShape) -> Iterator[str]:
    """Yield the names of a layer's parameters inside the layer, in no particular order."""
    match layer.kind:
        case "context_projector":
            yield from linear_parameters("linear", bias=True)
        case "dit_embed":
            for linear in ("proj", "time_fc1", "time_fc2", "modulation"):
                yield from linear_parameters(linear, bias=True)
        case "dit_block":
            yield "modulation"
            for linear in _ATTENTION_LINEARS:
                yield from linear_parameters(linear, bias=True)
        case "dit_out":
            yield "modulation"
            yield from linear_parameters("proj", bias=True)
        case _:
            for module in _unet_modules(layer):
                yield from linear_parameters(module, bias=module not in _WITHOUT_BIAS)


def _unet_modules(layer: LayerShape) -> tuple[str, ...]:
    """Return the names of the modules with parameters inside a layer of a U-Net: linears, convolutions, norms."""
    match layer.kind:
        case "unet_embed":
            return "conv", "time_fc1", "time_fc2"
        case "unet_residual":
            shortcut = ("shortcut",) if layer.hidden != layer.out else ()
            return "norm1", "conv1", "time", "norm2", "conv2", *shortcut
        case "unet_attention":
            norms = ("norm", "self_attention_norm", "cross_attention_norm", "mlp_norm")
            return *norms, "linear_in", *_ATTENTION_LINEARS, "linear_out"
        case "unet_down" | "unet_up":
            return ("conv",)
        case _:
            assert layer.kind == "unet_out"
            return "norm", "conv"


def _unet(settings: GeneratorSettings) -> Iterator[LayerShape]:
    """Yield the layers of Rombach et al., arXiv 2112.10752: down the levels, a middle, and up with skip connections."""
    widths = settings.widths
    last = len(widths) - 1
    yield LayerShape(
        "unet_embed",
        hidden=settings.channels,
        out=widths[0],
        media=MediaShape(patch_features=_CONV_TAPS * settings.channels),
        generator=GeneratorShape(time_width=TIMESTEP_WIDTH_FACTOR * widths[0]),
    )
    width = widths[0]
    skip_widths = [width]  # of the outputs that the way up will read
    for level, level_width in enumerate(widths):
        for _ in range(settings.layers):
            yield _residual(settings, level, width, level_width)
            if level < last:
                yield _attention(settings, level)
            width = level_width
            skip_widths.append(width)
        if level < last:
            yield LayerShape("unet_down", width, width, generator=GeneratorShape(scale=2 ** (level + 1)))
            skip_widths.append(width)
    yield _residual(settings, last, width, width)
    yield _attention(settings, last)
    yield _residual(settings, last, width, width)
    for level, level_width in reversed([*enumerate(widths)]):
        for _ in range(settings.layers + 1):
            yield _residual(settings, level, width + skip_widths.pop(), level_width)
            if level < last:
                yield _attention(settings, level)
            width = level_width
        if level > 0:
            yield LayerShape("unet_up", width, width, generator=GeneratorShape(scale=2 ** (level - 1)))
    assert not skip_widths, "every skip connection has two ends"
    yield LayerShape("unet_out", width, settings.channels)


def _residual(settings: GeneratorSettings, level: int, width: int, out: int) -> LayerShape:
    time_width = TIMESTEP_WIDTH_FACTOR * settings.widths[0]
    return LayerShape("unet_residual", width, out, generator=GeneratorShape(2**level, time_width=time_width))


def _attention(settings: GeneratorSettings, level: int) -> LayerShape:
    width, heads = settings.widths[level], settings.heads[level]
    return LayerShape(
        "unet_attention",
        hidden=width,
        out=width,
        mixer=Attention(heads, heads, width // heads),
        mlp=DenseMlp(GENERATOR_FFN_FACTOR * width, gated=True),
        generator=GeneratorShape(2**level, settings.context_tokens, settings.context_width),
    )


def _diffusion_transformer(settings: GeneratorSettings) -> Iterator[LayerShape]:
    """Yield the layers of Chen et al., arXiv 2310.00426 (PixArt): blocks with cross-attention and shared modulation."""
    (width,) = settings.widths
    (heads,) = settings.heads
    patch_features = settings.channels * settings.patch**2
    reads = GeneratorShape(context=settings.context_tokens, context_width=settings.context_width)
    yield LayerShape(
        "dit_embed",
        hidden=patch_features,
        out=width,
        media=MediaShape(patch_features=patch_features),
        generator=replace(reads, time_width=NUM_TIMESTEP_FREQUENCIES),
    )
    block = LayerShape(
        "dit_block",
        hidden=width,
        out=width,
        mixer=Attention(heads, heads, width // heads),
        mlp=DenseMlp(GENERATOR_FFN_FACTOR * width),
        generator=reads,
    )
    yield from [block] * settings.layers
    yield LayerShape("dit_out", width, 2 * patch_features)  # noise and variance of every element of the latent
