"""The module of each layer of a generator."""

from typing import TYPE_CHECKING

from torch import nn

from mmtrain.models.generator.dit_layers import ContextProjector, DitBlock, DitEmbed, DitOut
from mmtrain.models.generator.unet_layers import (
    UnetAttention,
    UnetDown,
    UnetEmbed,
    UnetOut,
    UnetResidual,
    UnetUp,
)
from mmtrain.models.shapes.layer_shape import LayerShape
from mmtrain.recipe.settings.generator_settings import GeneratorSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory


def build_generator_layer(settings: GeneratorSettings, layer: LayerShape, factory: "LayerFactory") -> nn.Module:
    """Build the layer that a shape describes, with uninitialized weights.

    It maps a state and the `GeneratorContext` of the microbatch to the next state. States are `GeneratorState`s;
    between the first and the last layer of a U-Net they are `UnetState`s.
    """
    if layer.kind.startswith("unet"):
        return _unet_layer(settings, layer, factory)
    match layer.kind:
        case "context_projector":
            return ContextProjector(layer, factory)
        case "dit_embed":
            return DitEmbed(settings, layer, factory)
        case "dit_block":
            return DitBlock(layer, factory)
        case "dit_out":
            return DitOut(layer, factory)
        case _:
            raise AssertionError(f"{layer.kind} is no layer of a generator")


def _unet_layer(settings: GeneratorSettings, layer: LayerShape, factory: "LayerFactory") -> nn.Module:
    match layer.kind:
        case "unet_embed":
            return UnetEmbed(settings, layer, factory)
        case "unet_residual":
            return UnetResidual(settings, layer, factory)
        case "unet_attention":
            return UnetAttention(settings, layer, factory)
        case "unet_down":
            return UnetDown(layer, factory)
        case "unet_up":
            return UnetUp(layer, factory)
        case _:
            assert layer.kind == "unet_out"
            return UnetOut(settings, layer, factory)
