"""Image generators after the LLM, as shapes: the U-Net of Stable Diffusion 2 and a diffusion transformer.

Both predict the noise of one latent image from its tokens (positions of the latent; patches of it in a transformer), a
timestep, and the LLM's outputs, which a linear maps to the context that every attention block reads. They are shapes to
plan with: the runtime trains none.
"""

from collections.abc import Iterator

from mmtrain.models.layer_shape import LayerShape
from mmtrain.recipe.model_settings import GeneratorSettings

TIMESTEP_WIDTH_FACTOR = 4  # width of the timestep's features over the finest level's (U-Net)
GENERATOR_FFN_FACTOR = 4
NUM_TIMESTEP_FREQUENCIES = 256  # sinusoidal features of a timestep (diffusion transformer)


def generator_layers(g: GeneratorSettings, llm_hidden: int) -> tuple[LayerShape, ...]:
    """All layers in execution order, the projector of the context first."""
    context = LayerShape("context_projector", hidden=llm_hidden, out=g.context_width, context=g.context_tokens)
    return (context, *(_unet(g) if g.kind == "unet" else _transformer(g)))


def _unet(g: GeneratorSettings) -> Iterator[LayerShape]:
    """Rombach et al., arXiv 2112.10752: down the levels, a middle, and up again with what was kept on the way."""
    widths, last = g.widths, len(g.widths) - 1
    yield LayerShape(
        "unet_embed", g.channels, widths[0], patch_features=9 * g.channels, time_width=TIMESTEP_WIDTH_FACTOR * widths[0]
    )
    width, kept = widths[0], [widths[0]]
    for level, wide in enumerate(widths):
        for _ in range(g.layers):
            yield _residual(g, level, width, wide)
            if level < last:
                yield _attention(g, level)
            width = wide
            kept.append(width)
        if level < last:
            yield LayerShape("unet_down", width, width, scale=2 ** (level + 1))
            kept.append(width)
    yield from (_residual(g, last, width, width), _attention(g, last), _residual(g, last, width, width))
    for level, wide in reversed([*enumerate(widths)]):
        for _ in range(g.layers + 1):
            yield _residual(g, level, width + kept.pop(), wide)
            if level < last:
                yield _attention(g, level)
            width = wide
        if level > 0:
            yield LayerShape("unet_up", width, width, scale=2 ** (level - 1))
    assert not kept
    yield LayerShape("unet_out", width, g.channels)


def _residual(g: GeneratorSettings, level: int, width: int, out: int) -> LayerShape:
    return LayerShape("unet_residual", width, out, time_width=TIMESTEP_WIDTH_FACTOR * g.widths[0], scale=2**level)


def _attention(g: GeneratorSettings, level: int) -> LayerShape:
    wide, heads = g.widths[level], g.heads[level]
    return LayerShape(
        "unet_attention",
        hidden=wide,
        out=wide,
        heads=heads,
        kv_heads=heads,
        head_dim=wide // heads,
        ffn=GENERATOR_FFN_FACTOR * wide,
        gated=True,
        context=g.context_tokens,
        context_width=g.context_width,
        scale=2**level,
    )


def _transformer(g: GeneratorSettings) -> Iterator[LayerShape]:
    """Chen et al., arXiv 2310.00426 (PixArt): blocks with cross-attention; the timestep scales all of them alike."""
    (wide,), (heads,) = g.widths, g.heads
    pixels = g.channels * g.patch**2
    tokens, width = g.context_tokens, g.context_width
    yield LayerShape(
        "dit_embed",
        pixels,
        wide,
        patch_features=pixels,
        time_width=NUM_TIMESTEP_FREQUENCIES,
        context=tokens,
        context_width=width,
    )
    block = LayerShape(
        "dit_block",
        hidden=wide,
        out=wide,
        heads=heads,
        kv_heads=heads,
        head_dim=wide // heads,
        ffn=GENERATOR_FFN_FACTOR * wide,
        context=tokens,
        context_width=width,
    )
    yield from [block] * g.layers
    yield LayerShape("dit_out", wide, 2 * pixels)  # of every pixel the noise and its variance
