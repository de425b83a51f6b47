"""The layers of encoders as shapes, one function for each modality."""

from collections.abc import Callable, Mapping
from typing import Any

from mmtrain.models.layer_shape import LayerShape
from mmtrain.recipe.model_settings import AudioSettings, EncoderSettings, VisionSettings


def vision_layers(settings: VisionSettings, llm_hidden: int) -> tuple[LayerShape, ...]:
    """Describe the layers of a vision transformer."""
    num_positions = settings.max_side**2 + settings.extra_tokens
    if settings.positions == "factorized":
        num_positions = 2 * settings.max_side
    embedding = LayerShape(
        "patch_embed",
        hidden=settings.hidden,
        out=settings.hidden,
        patch_features=settings.cell_features,
        max_side=settings.max_side,
        extra_tokens=settings.extra_tokens,
        position_rows=num_positions,
        norm_widths=(settings.hidden,) if settings.pre_norm else (),
        linear_bias=settings.patch_bias,
    )
    block = _encoder_block(settings, qkv_bias=settings.qkv_bias)
    return (embedding, *[block] * settings.layers, _projector(settings, llm_hidden))


def audio_layers(settings: AudioSettings, llm_hidden: int) -> tuple[LayerShape, ...]:
    """Describe the layers of a Whisper-shaped audio encoder."""
    embedding = LayerShape(
        "audio_embed",
        hidden=settings.hidden,
        out=settings.hidden,
        mel_bins=settings.mel_bins,
        position_rows=settings.max_frames // 2 if settings.positions == "learned" else 0,
        linear_bias=True,
    )
    block = _encoder_block(settings, qkv_bias=True)
    return (embedding, *[block] * settings.layers, _projector(settings, llm_hidden))


# By the name of the modality. Each function takes the modality's settings and the LLM's width.
ENCODER_LAYERS: Mapping[str, Callable[[Any, int], tuple[LayerShape, ...]]] = {
    "vision": vision_layers,
    "audio": audio_layers,
}


def _encoder_block(settings: EncoderSettings, qkv_bias: bool) -> LayerShape:
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


def _projector(settings: EncoderSettings, llm_hidden: int) -> LayerShape:
    merged_width = settings.hidden * settings.tokens_per_feature
    norm_widths: tuple[int, ...] = ()
    if settings.has_post_norm:
        norm_widths += (settings.hidden,)
    if settings.projector.norm:
        norm_widths += (merged_width,)
    return LayerShape(
        "projector",
        hidden=settings.hidden,
        out=llm_hidden,
        ffn=llm_hidden,
        joins=settings.tokens_per_feature,
        extra_tokens=settings.extra_tokens,
        norm_widths=norm_widths,
        linear_bias=True,
    )
