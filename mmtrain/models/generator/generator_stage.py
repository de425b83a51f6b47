"""One pipeline stage of a generator as a torch module, and its loss."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmtrain.models.attention.index_tables import HostTables
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
from mmtrain.models.stage.generator_input import (
    DrawingContext,
    GeneratorContext,
    GeneratorInput,
    GeneratorState,
    join_state,
    split_state,
)
from mmtrain.models.stage.stage_inputs import UnitInput
from mmtrain.models.stage.stage_module import StageContext, StageModule
from mmtrain.recipe.settings.generator_settings import GeneratorSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory


class GeneratorStage(StageModule):
    """Consecutive layers of a generator. The last stage's output is the sum of the squared errors of its prediction."""

    def context(self, inputs: UnitInput, features: Mapping[str, Tensor]) -> DrawingContext:
        """Derive from a microbatch what all layers of the stage need to know about it."""
        assert isinstance(inputs, GeneratorInput)
        device = next(self.parameters()).device
        return DrawingContext(GeneratorContext(inputs, device), next(iter(features.values()), None))

    def run(self, context: StageContext, hidden: Tensor | None, layers: range) -> Tensor:
        """Run consecutive layers on the LLM's outputs, or on what the stage before sends.

        Returns the flat state that the next layer reads (`join_state`) as a column, or the last layer's loss, a scalar
        in fp32.
        """
        assert isinstance(context, DrawingContext)
        state = self._run_to_state(context, hidden, layers)
        if layers.stop < len(self.shape.layers):
            return join_state(state, self.shape.layers[layers.stop])[:, None]
        assert state.hidden is not None
        return _sum_of_squares(state.hidden, context.inputs)

    def run_layer(self, context: StageContext, state: Any, index: int) -> Any:
        """Run one layer on the state before it, None for the first; the last layer's result is the loss."""
        assert isinstance(context, DrawingContext)
        before = self._start_state(context, None, range(index, index + 1)) if state is None else state
        after = self._map_state(context, before, index)
        is_last = index == len(self.shape.layers) - 1
        return _sum_of_squares(after.hidden, context.inputs) if is_last else after

    def predict(self, inputs: GeneratorInput, outputs: Tensor) -> Tensor:
        """Run a stage that holds the whole unit on the LLM's outputs (I * context tokens, llm_hidden).

        Returns its prediction (N, features of a cell), in fp32.
        """
        assert inputs.cells is not None, "there is nothing to denoise"
        context = DrawingContext(GeneratorContext(inputs, outputs.device), outputs)
        state = self._run_to_state(context, None, range(len(self.shape.layers)))
        assert state.hidden is not None
        return state.hidden[:, : inputs.cells.shape[1]].float()

    def host_tables(self, inputs: UnitInput) -> HostTables:
        """Compute, on the host, the index tables that the stage's layers need of a microbatch with these lengths."""
        assert isinstance(inputs, GeneratorInput)
        context = GeneratorContext(replace(inputs, tables=None), torch.device("cpu"))
        if not self.shape.is_splittable:  # a U-Net reads batches of images of one size
            return context.size_tables()
        tables, backend = context.index_tables(), self.factory.attention
        layers = [self.shape.layers[i] for i in self.indices]
        for tokens in {layer.generator.context for layer in layers if layer.mixer is not None}:
            tables |= context.layout.host_tables(backend)
            tables |= context.layout.host_context_tables(context.contexts(tokens), backend)
        return tables

    def _run_to_state(self, context: DrawingContext, hidden: Tensor | None, layers: range) -> GeneratorState:
        """Run consecutive layers; return what the last one leaves."""
        state = self._start_state(context, hidden, layers)
        for index in layers:
            state = self._map_state(context, state, index)
        return state

    def _map_state(self, context: DrawingContext, state: Any, index: int) -> Any:
        """Return the state behind a layer."""
        layer = self.layers[str(index)]
        if index in self.recompute and torch.is_grad_enabled():
            return checkpoint(layer, state, context.generator, use_reentrant=False, preserve_rng_state=False)
        return layer(state, context.generator)

    def _start_state(self, context: DrawingContext, hidden: Tensor | None, layers: range) -> GeneratorState:
        if layers.start:
            assert hidden is not None, "only the first layer starts without an input"
            generator = context.generator
            first = self.shape.layers[layers.start]
            return split_state(hidden.flatten(), first, generator.num_tokens, generator.num_images)
        outputs, kept = context.outputs, context.inputs.kept_contexts
        assert outputs is not None, "the stage with the projector reads the LLM's outputs"
        if kept is not None:  # an image without its context is drawn from the projector's bias
            rows_per_image = self.shape.layers[0].generator.context
            outputs = outputs * kept.to(outputs.dtype).repeat_interleave(rows_per_image)[:, None]
        return GeneratorState(outputs)

    def _build_layer(
        self, layer: LayerShape, tied_embedding: nn.Module | None = None, is_recomputed: bool = False
    ) -> nn.Module:
        generator = self._settings.generator
        assert generator is not None, "a model without a generator has no stage of one"
        return build_generator_layer(generator, layer, self.factory)


def _sum_of_squares(output: Tensor, inputs: GeneratorInput) -> Tensor:
    """Sum the squared errors of predictions (N, features of a cell): a scalar.

    A transformer's have a second half, a variance (`learn_sigma` of `diffusers`). Nothing is learned from it, which the
    simple loss of DDPM does not need.
    """
    targets = inputs.targets
    assert targets is not None, "the stage with the loss needs targets"
    errors = output[:, : targets.shape[1]].float() - targets.float()
    if inputs.counted is not None:
        errors = errors * inputs.counted[:, None]
    return errors.square().sum()


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
