"""The layers of encoders as shapes, by modality."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mmtrain.models.shapes.layer_shape import LayerShape, linear_parameters, norm_parameters
from mmtrain.recipe.settings.audio_settings import AudioSettings
from mmtrain.recipe.settings.encoder_settings import EncoderSettings
from mmtrain.recipe.settings.vision_settings import VisionSettings


def vision_layers(settings: VisionSettings, llm_hidden: int) -> tuple[LayerShape, ...]:
    """Describe the layers of a vision transformer."""
    num_positions = {
        "factorized": 2 * settings.max_side,
        "grid": settings.max_side**2 + settings.extra_tokens,
        "rotary": settings.position_grid**2,
    }[settings.positions]
    is_rms = settings.norm == "rms"
    embedding = LayerShape(
        "patch_embed",
        hidden=settings.hidden,
        out=settings.hidden,
        patch_features=settings.cell_features,
        max_side=settings.max_side,
        extra_tokens=settings.extra_tokens,
        position_rows=num_positions,
        norm_widths=(settings.hidden,) if settings.pre_norm else (),
        rms_norm=is_rms,
        linear_bias=settings.patch_bias,
    )
    block = replace(
        encoder_block(settings, qkv_bias=settings.qkv_bias),
        gated=settings.gated_mlp,
        rms_norm=is_rms,
        rotary=settings.positions == "rotary",
        joint_qk_norm=settings.qk_norm,
        layer_scale=settings.layer_scale,
    )
    windowed = replace(block, window_side=settings.window)
    blocks = [block if i in settings.full_attention_blocks else windowed for i in range(settings.layers)]
    num_kept = [sum(kept < i for kept in settings.deepstack) for i in range(settings.layers + 1)]  # before block i
    blocks = [replace(block, carried_in=num_kept[i], carried_out=num_kept[i + 1]) for i, block in enumerate(blocks)]
    projector_kind = settings.projector.norm_kind or settings.norm
    projector = replace(
        projector_layer(settings, llm_hidden),
        rms_norm=projector_kind != "layer",
        layer_post_norm=settings.post_norm and not is_rms and projector_kind != "layer",
        zero_centered_norms=projector_kind == "zero_centered_rms",
        carried_in=len(settings.deepstack),
        carried_out=len(settings.deepstack),
    )
    return (embedding, *blocks, projector)


def audio_layers(settings: AudioSettings, llm_hidden: int) -> tuple[LayerShape, ...]:
    """Describe the layers of a Whisper-shaped audio encoder."""
    embedding = LayerShape(
        "audio_embed",
        hidden=settings.hidden,
        out=settings.hidden,
        mel_bins=settings.mel_bins,
        partial_cells=settings.partial_cells,
        position_rows=0 if settings.positions == "sinusoidal" else settings.max_frames // 2,
        linear_bias=True,
    )
    chunk = (settings.chunk or 0) // settings.cells_per_token
    block = replace(encoder_block(settings, qkv_bias=True), key_bias=settings.key_bias, chunk=chunk)
    return (embedding, *[block] * settings.layers, projector_layer(settings, llm_hidden))


def _patch_embed_parameters(layer: LayerShape, settings: VisionSettings) -> Iterator[str]:
    yield from linear_parameters("proj", layer.linear_bias)
    if settings.class_token:
        yield "class_token"
    if settings.positions == "factorized":
        yield from ("row_positions", "col_positions")
    elif layer.position_rows:
        yield "grid_positions"
    if settings.pre_norm:
        yield from norm_parameters("pre_norm", layer)


def _audio_embed_parameters(layer: LayerShape, settings: AudioSettings) -> Iterator[str]:
    yield from linear_parameters("conv1", layer.linear_bias)
    yield from linear_parameters("conv2", layer.linear_bias)
    if layer.position_rows:
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


def encoder_block(settings: EncoderSettings, qkv_bias: bool) -> LayerShape:
    """Describe one transformer block of an encoder."""
    return LayerShape(
        "vit_block",
        hidden=settings.hidden,
        out=settings.hidden,
        heads=settings.heads,
        kv_heads=settings.heads,
        head_dim=settings.hidden // settings.heads,
        ffn=settings.ffn,
        linear_bias=True,
        qkv_bias=qkv_bias,
    )


def projector_layer(settings: EncoderSettings, llm_hidden: int) -> LayerShape:
    """Describe the projector, the last layer of every encoder."""
    merged_width = settings.hidden * (1 if settings.pools else settings.tokens_per_feature)
    norm_widths: tuple[int, ...] = ()
    if settings.has_post_norm:
        norm_widths += (settings.hidden,)
    if settings.projector.norm:
        norm_widths += (merged_width,)
    return LayerShape(
        "projector",
        hidden=settings.hidden,
        out=llm_hidden,
        ffn=0 if settings.projector.kind == "linear" else settings.projector.ffn or llm_hidden,
        joins=settings.tokens_per_feature,
        pools=settings.pools,
        extra_tokens=settings.extra_tokens - settings.kept_extra_tokens,
        newline=settings.sends_newline,
        norm_widths=norm_widths,
        linear_bias=settings.projector.bias,
    )
