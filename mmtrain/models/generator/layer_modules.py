"""The module of each layer of a generator."""

from typing import TYPE_CHECKING

from torch import nn

from mmtrain.models.generator.dit_layers import ContextProjector, DitBlock, DitEmbed, DitOut
from mmtrain.models.layer_shape import LayerShape
from mmtrain.recipe.generator_settings import GeneratorSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory


def build_generator_layer(settings: GeneratorSettings, layer: LayerShape, factory: "LayerFactory") -> nn.Module:
    """Build the layer that a shape describes, with uninitialized weights.

    It maps a `GeneratorState` and the `GeneratorContext` of the microbatch to the next state.
    """
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
            raise AssertionError(f"{layer.kind} can only be planned; `require_runnable` rejects such recipes")
