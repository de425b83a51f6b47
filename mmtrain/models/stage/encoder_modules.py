"""The torch side of every modality: its embedding layer, and the context that its layers share.

The other layers (transformer blocks, projector) are the same for all encoders.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from mmtrain.models.shapes.unit_shape import UnitShape
from mmtrain.models.stage.audio_layers import AudioContext, AudioEmbed
from mmtrain.models.stage.projector import EncoderContext
from mmtrain.models.stage.stage_inputs import EncoderInput
from mmtrain.models.stage.vision_layers import PatchEmbed, VisionContext


@dataclass(frozen=True)
class EncoderModules:
    """How to build what is particular to one modality."""

    embedding: Callable[..., nn.Module]  # (settings of the encoder, LayerShape, LayerFactory)
    context: Callable[[EncoderInput, UnitShape, torch.dtype, torch.device], EncoderContext]


def _vision_context(inputs: EncoderInput, unit: UnitShape, dtype: torch.dtype, device: torch.device) -> VisionContext:
    embedding, block = unit.layers[:2]
    rotary_width = block.attention.head_dim if block.attention.rotary else 0
    window_side = max(layer.attention.window_side for layer in unit.layers if layer.mixer is not None)
    return VisionContext(inputs, embedding.extra_tokens, device, rotary_width, window_side, dtype)


def _audio_context(inputs: EncoderInput, unit: UnitShape, dtype: torch.dtype, device: torch.device) -> AudioContext:
    embedding, block = unit.layers[:2]
    return AudioContext(inputs, device, block.attention.chunk, embedding.media.partial_cells)


ENCODER_MODULES: Mapping[str, EncoderModules] = {
    "vision": EncoderModules(PatchEmbed, _vision_context),
    "audio": EncoderModules(AudioEmbed, _audio_context),
}
