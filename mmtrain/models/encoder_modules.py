"""The torch side of every modality: its embedding layer, and the context that its layers share.

The other layers (transformer blocks, projector) are the same for all encoders.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from mmtrain.models.audio_layers import AudioContext, AudioEmbed
from mmtrain.models.layer_shape import LayerShape
from mmtrain.models.projector import EncoderContext
from mmtrain.models.stage_inputs import EncoderInput
from mmtrain.models.vision_layers import PatchEmbed, VisionContext


@dataclass(frozen=True)
class EncoderModules:
    """How to build what is particular to one modality."""

    embedding: Callable[..., nn.Module]  # (settings of the encoder, LayerShape, LayerFactory)
    context: Callable[[EncoderInput, LayerShape, torch.device], EncoderContext]  # the shape is the embedding layer's


def _vision_context(inputs: EncoderInput, embedding: LayerShape, device: torch.device) -> VisionContext:
    return VisionContext(inputs, embedding.extra_tokens, device)


def _audio_context(inputs: EncoderInput, embedding: LayerShape, device: torch.device) -> AudioContext:
    return AudioContext(inputs, device)


ENCODER_MODULES: Mapping[str, EncoderModules] = {
    "vision": EncoderModules(PatchEmbed, _vision_context),
    "audio": EncoderModules(AudioEmbed, _audio_context),
}
