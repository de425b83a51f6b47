"""The layers of encoders as shapes, by modality."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mmtrain.models.shapes.layer_shape import (
    Attention,
    DenseMlp,
    LayerShape,
    MediaShape,
    ProjectorShape,
    linear_parameters,
    norm_parameters,
)
from mmtrain.recipe.settings.audio_settings import AudioSettings
from mmtrain.recipe.settings.encoder_settings import EncoderSettings
from mmtrain.recipe.settings.vision_settings import VisionSettings


def vision_layers(settings: VisionSettings, llm_hidden: int) -> tuple[LayerShape, ...]:
    """Describe the layers of a vision transformer."""
    num_positions = {
        "factorized": 2 * settings.max_side,
        "factorized_rotary": 2 * settings.max_side,
        "grid": settings.max_side**2 + settings.extra_tokens,
        "rotary": settings.position_grid**2,
    }[settings.positions]
    is_rms = settings.norm == "rms"
    embedding = LayerShape(
        "patch_embed",
        hidden=settings.hidden,
        out=settings.hidden,
        media=MediaShape(
            patch_features=settings.cell_features,
            max_side=settings.max_side,
            position_rows=num_positions,
            position_neighbors=16 if settings.position_interpolation == "bicubic" else 4,
        ),
        extra_tokens=settings.extra_tokens,
        norm_widths=(settings.hidden,) * (settings.patch_norm + settings.pre_norm),
        rms_norm=is_rms,
        linear_bias=settings.patch_bias,
    )
    attention = replace(
        encoder_attention(settings),
        rotary=settings.rotates,
        rotary_base=settings.rotary_base,
        rotary_alternates=settings.rotary_frequencies == "alternating",
        qkv_bias=settings.qkv_bias,
        joint_qk_norm=settings.qk_norm,
        qk_norm=settings.head_norms,
        value_norm=settings.head_norms,
    )
    block = replace(
        encoder_block(settings, attention),
        mlp=DenseMlp(settings.ffn, gated=settings.gated_mlp),
        rms_norm=is_rms,
        linear_bias=settings.linear_bias,
        layer_scale=settings.layer_scale,
        post_norms=settings.post_norms,
    )
    windowed = replace(block, mixer=replace(attention, window_side=settings.window))
    blocks = [block if i in settings.full_attention_blocks else windowed for i in range(settings.layers)]
    num_kept = [sum(kept < i for kept in settings.deepstack) for i in range(settings.layers + 1)]  # before block i
    blocks = [replace(block, carried_in=num_kept[i], carried_out=num_kept[i + 1]) for i, block in enumerate(blocks)]
    return (embedding, *blocks, _vision_projector(settings, llm_hidden))


def _vision_projector(settings: VisionSettings, llm_hidden: int) -> LayerShape:
    """Describe the projector of a vision transformer, whose norms may be of kinds of their own."""
    projector_kind = settings.projector.norm_kind or settings.norm
    projector = projector_layer(settings, llm_hidden)
    has_layer_post_norm = settings.post_norm and settings.norm == "layer" and projector_kind != "layer"
    return replace(
        projector,
        projector=replace(
            projector.projector,
            layer_post_norm=has_layer_post_norm,
            standardizes=settings.averages == "standardized",
            plain_norm=settings.projector.norm and projector_kind == "plain_rms",
        ),
        rms_norm=projector_kind != "layer",
        zero_centered_norms=projector_kind == "zero_centered_rms",
        carried_in=len(settings.deepstack),
        carried_out=len(settings.deepstack),
    )


def audio_layers(settings: AudioSettings, llm_hidden: int) -> tuple[LayerShape, ...]:
    """Describe the layers of an audio encoder."""
    embedding = LayerShape(
        "audio_embed",
        hidden=settings.hidden,
        out=settings.hidden,
        media=MediaShape(
            mel_bins=settings.mel_bins,
            partial_cells=settings.partial_cells,
            conv_channels=settings.conv_channels or 0,
            position_rows=0 if settings.positions == "sinusoidal" else settings.max_frames // 2,
        ),
        linear_bias=True,
    )
    chunk = settings.chunk_tokens * settings.window_chunks
    attention = replace(encoder_attention(settings), qkv_bias=True, key_bias=settings.key_bias, chunk=chunk)
    block = encoder_block(settings, attention)
    return (embedding, *[block] * settings.layers, projector_layer(settings, llm_hidden))


def _patch_embed_parameters(layer: LayerShape, settings: VisionSettings) -> Iterator[str]:
    yield from linear_parameters("proj", layer.linear_bias)
    if settings.class_token:
        yield "class_token"
    if settings.has_position_tables:
        yield from ("row_positions", "col_positions")
    elif layer.media.position_rows:
        yield "grid_positions"
    if settings.patch_norm:
        yield from norm_parameters("patch_norm", layer)
    if settings.pre_norm:
        yield from norm_parameters("pre_norm", layer)


def _audio_embed_parameters(layer: LayerShape, settings: AudioSettings) -> Iterator[str]:
    yield from linear_parameters("conv1", layer.linear_bias)
    yield from linear_parameters("conv2", layer.linear_bias)
    if layer.media.conv_channels:
        yield from linear_parameters("conv3", layer.linear_bias)
        yield "conv_out.weight"
    if layer.media.position_rows:
        yield "positions"


@dataclass(frozen=True)
class EncoderShapes:
    """How to describe the encoders of one modality."""

    layers: Callable[[Any, int], tuple[LayerShape, ...]]  # (settings, width of the LLM) -> all layers
    embedding_parameters: Callable[[LayerShape, Any], Iterator[str]]  # (layer 0, settings) -> names inside the layer


# By the name of the modality.
ENCODER_SHAPES: Mapping[str, EncoderShapes] = {
    "vision": EncoderShapes(vision_layers, _patch_embed_parameters),
    "audio": EncoderShapes(audio_layers, _audio_embed_parameters),
}


def encoder_attention(settings: EncoderSettings) -> Attention:
    """Describe the attention that blocks of all encoders share."""
    return Attention(settings.heads, settings.heads, settings.hidden // settings.heads)


def encoder_block(settings: EncoderSettings, attention: Attention) -> LayerShape:
    """Describe one transformer block of an encoder."""
    return LayerShape(
        "vit_block",
        hidden=settings.hidden,
        out=settings.hidden,
        mixer=attention,
        mlp=DenseMlp(settings.ffn),
        linear_bias=True,
    )


def projector_layer(settings: EncoderSettings, llm_hidden: int) -> LayerShape:
    """Describe the projector, the last layer of every encoder."""
    merged_width = settings.hidden * (1 if settings.pools else settings.tokens_per_feature)
    norm_widths: tuple[int, ...] = ()
    if settings.has_post_norm:
        norm_widths += (settings.hidden,)
    if settings.projector.norm:
        norm_widths += (merged_width,)
    if settings.features_per_item is not None:
        return _resampler_layer(settings, llm_hidden, norm_widths)
    is_merger = settings.projector.kind == "merger"
    mlp = DenseMlp(settings.projector.ffn or llm_hidden, gated=is_merger)
    return LayerShape(
        "merger" if is_merger else "projector",
        hidden=settings.hidden,
        out=llm_hidden,
        mlp=None if settings.projector.kind == "linear" else mlp,
        projector=ProjectorShape(
            settings.tokens_per_feature, settings.pools, settings.merges_by_linear, settings.sends_newline
        ),
        extra_tokens=settings.extra_tokens - settings.kept_extra_tokens,
        norm_widths=norm_widths,
        linear_bias=settings.projector.bias,
    )


def _resampler_layer(settings: EncoderSettings, llm_hidden: int, norm_widths: tuple[int, ...]) -> LayerShape:
    """Describe a projector whose queries attend to each item, with norms of queries and of attention's output."""
    heads, width = settings.projector.heads or settings.heads, settings.hidden
    return LayerShape(
        "resampler",
        hidden=width,
        out=llm_hidden,
        mixer=Attention(heads, heads, width // heads),
        projector=ProjectorShape(features_per_item=settings.features_per_item or 0),
        extra_tokens=settings.extra_tokens,
        norm_widths=(*norm_widths, width, width),
        linear_bias=settings.projector.bias,
    )
