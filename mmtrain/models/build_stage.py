"""From settings and a slice of layers to a torch module that computes one stage.

The same recipe and seed give the same weights on any mesh and for any split into stages, because every parameter is
drawn under its plan-independent name (`mmtrain.models.parameter_specs`).
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmtrain.models import parameter_specs as params
from mmtrain.models.attention import AttentionBackend, choose_backend
from mmtrain.models.audio_layers import AudioContext, AudioEmbed
from mmtrain.models.llm_layers import Embedding, Head, TextContext
from mmtrain.models.model_shape import BLOCK_PIECES, LayerShape, ModelShape, UnitShape
from mmtrain.models.stage_inputs import AudioInput, TextInput, UnitInput, VisionInput
from mmtrain.models.vision_layers import PatchEmbed, Projector, VisionContext
from mmtrain.recipe.model_settings import AudioSettings, ModelSettings, VisionSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory, ParallelGroups

StageContext = VisionContext | AudioContext | TextContext
_BLOCKS = ("vit_block", "decoder_block")
_SLICED = (*_BLOCKS, "head")  # layers that read a slice of the tokens under sequence parallelism


def build_stage(
    recipe_model: ModelSettings,
    shape: ModelShape,
    unit: str,
    layers: tuple[int, int],
    groups: "ParallelGroups",
    *,
    dtype: torch.dtype,
    device: torch.device,
    recompute: frozenset[int],
    seed: int,
    attention: Literal["auto"] | AttentionBackend,
    sequence_parallel: bool = False,
) -> "StageModule":
    """Build layers [lo, hi) of `unit` on this rank, with their initial weights, frozen where the settings say so.

    `recompute` names layers (by index in the unit) whose activations are computed again in backward. With
    `sequence_parallel` the ranks of a TP group share out the tokens between the layers' products.
    Raises UserError if the attention backend does not work here.
    """
    from mmtrain.models.megatron import prepare_megatron

    prepare_megatron(device)
    backend = choose_backend(attention, device, dtype)
    parts = _parts(recipe_model, shape.unit(unit), groups, dtype, backend, sequence_parallel and groups.tp_size > 1)
    stage = StageModule(recipe_model, shape, unit, layers, parts, recompute)
    specs = params.stage_param_specs(stage, unit, groups.tp_size)
    params.initialize_parameters(stage, specs, seed, groups.tp_rank, groups.tp_size)
    _freeze(stage)
    return stage.to(device)


class StageModule(nn.Module):
    """Consecutive layers of one unit. `layers` is keyed by the layer's index in the unit.

    `f"{unit}.{name}"` for a parameter's `name` here is its plan-independent name. A stage that holds the head but not
    the embedding of a model with tied embeddings also holds its own copy of layer 0, for its weight only; both
    copies are marked `param.shared = "embeddings"`, and their gradients must be summed.
    """

    def __init__(
        self,
        recipe_model: ModelSettings,
        shape: ModelShape,
        unit: str,
        layers: tuple[int, int],
        parts: "LayerFactory",
        recompute: frozenset[int],
    ) -> None:
        super().__init__()
        self.unit = unit
        self.shape = shape.unit(unit)
        self.indices = range(*layers)
        self.parts = parts
        self.recompute = recompute
        self.layers = nn.ModuleDict()
        self._settings = recipe_model
        tied = shape.tied_embeddings and self.shape.kind == "llm"
        for index in self.indices:
            if tied and self.shape.layers[index].kind == "head" and "0" not in self.layers:
                self.layers["0"] = self._layer(self.shape.layers[0], None)
            embedding = self.layers["0"] if tied and self.shape.layers[index].kind == "head" else None
            self.layers[str(index)] = self._layer(self.shape.layers[index], embedding)
        if tied and "0" in self.layers and not {0, len(self.shape.layers) - 1} <= set(self.indices):
            self.layers["0"].table.weight.shared = "embeddings"  # type: ignore[union-attr]

    def forward(self, hidden: Tensor | None, inputs: UnitInput, features: Mapping[str, Tensor] | None = None) -> Tensor:
        """Run the stage on one microbatch.

        `hidden` (T, hidden) comes from the stage before, None for the first; `features` holds what encoders hand to
        the LLM's embedding, (F, hidden) each. Returns hidden states (T, hidden), an encoder's last stage features
        (F, llm_hidden), the LLM's last stage the sum of token losses (a scalar in fp32). Under sequence parallelism
        hidden states come and go as this rank's ceil(T / tp) rows.
        """
        return self.run(self.context(inputs, features or {}), hidden, self.indices)

    def run(self, context: StageContext, hidden: Tensor | None, layers: range) -> Tensor:
        """Run consecutive layers of the stage as if they were a stage of their own; `context` is that of all of them.

        See `forward`.
        """
        out, sliced = self._through(layers, hidden, context)
        if not self.parts.sequence_parallel or layers.stop == len(self.shape.layers):
            return out
        num_tokens = context.packing.num_tokens
        return self._laid_out(out, sliced, True, num_tokens) if num_tokens else out[:0]

    def run_pieces(
        self, context: StageContext, state: tuple[Tensor, ...], layer: int, pieces: range
    ) -> tuple[Tensor, ...]:
        """Run pieces of a block; see `megatron.pieces`. Of a microbatch without tokens, the last one runs the block."""
        from mmtrain.models.megatron import run_pieces

        packing = context.packing
        if not packing.num_tokens:
            is_last = pieces.stop == len(BLOCK_PIECES)
            return (self.run(context, state[0], range(layer, layer + 1)),) if is_last else state
        if self.parts.sequence_parallel:
            packing = packing.padded(self.parts.num_padding_rows(packing.num_tokens))
        return run_pieces(self.layers[str(layer)], state, packing, pieces)

    def logits(self, hidden: Tensor | None, inputs: TextInput, features: Mapping[str, Tensor] | None = None) -> Tensor:
        """Run a stage that ends with the head, but return logits (T, padded vocabulary) and look at no labels."""
        *before, last = self.indices
        head = self.layers[str(last)]
        assert isinstance(head, Head), f"layer {last} of {self.unit} is no head"
        context = self.context(inputs, features or {})
        out, sliced = self._through(before, hidden, context)
        if not self.parts.sequence_parallel:
            return head.logits(out)
        return head.logits(self._laid_out(out, sliced, True, context.packing.num_tokens))[: context.packing.num_tokens]

    def next_tokens(
        self, hidden: Tensor | None, inputs: TextInput, features: Mapping[str, Tensor] | None, limit: int
    ) -> Tensor:
        """Run a stage that ends with the head; return the likeliest token below `limit` after each sequence: (S,)."""
        *before, last = self.indices
        head = self.layers[str(last)]
        assert isinstance(head, Head), f"layer {last} of {self.unit} is no head"
        context = self.context(inputs, features or {})
        out, sliced = self._through(before, hidden, context)
        # Only the last token of a sequence needs the vocabulary, the widest product of all.
        ends = torch.tensor([*itertools.accumulate(inputs.lengths)], dtype=torch.int64, device=out.device) - 1
        rows = self._laid_out(out, sliced, False, context.packing.num_tokens).index_select(0, ends)
        tokens = head.greedy_tokens(self._laid_out(rows, False, self.parts.sequence_parallel, len(rows)), limit)
        return tokens[: len(ends)]

    def _through(self, indices: Iterable[int], hidden: Tensor | None, context: StageContext) -> tuple[Tensor, bool]:
        """Run layers; return what the last one hands on, and whether that is a slice of the tokens."""
        packing, num_tokens, slicing = context.packing, context.packing.num_tokens, self.parts.sequence_parallel
        if slicing:
            packing = packing.padded(self.parts.num_padding_rows(num_tokens))
        sliced = slicing and hidden is not None and num_tokens > 0
        for index in indices:
            kind = self.shape.layers[index].kind
            wanted = slicing and kind in _SLICED
            hidden = None if hidden is None else self._laid_out(hidden, sliced, wanted, num_tokens)
            sliced = wanted
            layer = self.layers[str(index)]
            argument = packing if kind in _BLOCKS else context
            if index in self.recompute and torch.is_grad_enabled():
                # No dropout, so there is no generator state to restore.
                hidden = checkpoint(layer, hidden, argument, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = layer(hidden, argument)
        assert hidden is not None, "a stage has at least one layer, and only the first one starts from nothing"
        return hidden, sliced

    def _laid_out(self, hidden: Tensor, sliced: bool, wanted: bool, num_tokens: int) -> Tensor:
        """Turn tokens that are `sliced` over the TP group, or whole, into what is `wanted`."""
        if sliced == wanted:
            return hidden
        return self.parts.scatter_tokens(hidden) if wanted else self.parts.gather_tokens(hidden, num_tokens)

    def context(self, inputs: UnitInput, features: Mapping[str, Tensor]) -> StageContext:
        """Work out what all layers need to know of a microbatch."""
        device = next(self.parameters()).device
        if isinstance(inputs, VisionInput):
            return VisionContext(inputs, self.shape.layers[0].extra_tokens, device)
        if isinstance(inputs, AudioInput):
            return AudioContext(inputs, device)
        head_dim, base = self.parts.block.head_dim, self._settings.llm.rope_base
        return TextContext(inputs, features, head_dim, base, self.parts.dtype, device)

    def _layer(self, layer: LayerShape, tied: nn.Module | None) -> nn.Module:
        from mmtrain.models.megatron.layer_factory import ACTIVATIONS

        match layer.kind:
            case "vit_block" | "decoder_block":
                return self.parts.transformer_block()
            case "patch_embed":
                assert self._settings.vision is not None
                return PatchEmbed(self._settings.vision, layer, self.parts)
            case "audio_embed":
                audio = self._settings.audio
                assert audio is not None
                return AudioEmbed(audio, layer, self.parts, ACTIVATIONS[audio.activation])
            case "projector":
                encoder = _encoder(self._settings, self.unit)
                return Projector(encoder, layer, self.parts, ACTIVATIONS[encoder.projector.activation])
            case "embedding":
                return Embedding(layer, self.parts)
            case "head":
                assert tied is None or isinstance(tied, Embedding)
                return Head(layer, self.parts, tied)
            case _:
                raise AssertionError(f"{layer.kind} is a shape only; `require_runnable` lets no such recipe through")


def _parts(
    model: ModelSettings,
    unit: UnitShape,
    groups: "ParallelGroups",
    dtype: torch.dtype,
    attention: AttentionBackend,
    sequence_parallel: bool,
) -> "LayerFactory":
    from mmtrain.models.megatron import LayerFactory

    block = next(layer for layer in unit.layers if layer.kind in _BLOCKS)
    if unit.kind == "llm":
        activation = "silu" if block.gated else "gelu"
        return LayerFactory(block, activation, model.llm.norm_eps, groups, dtype, attention, sequence_parallel)
    encoder = _encoder(model, unit.name)
    return LayerFactory(block, encoder.activation, encoder.norm_eps, groups, dtype, attention, sequence_parallel)


def _encoder(model: ModelSettings, unit: str) -> VisionSettings | AudioSettings:
    settings: VisionSettings | AudioSettings | None = getattr(model, unit)
    assert settings is not None, f"the model has no {unit} unit"
    return settings


def _freeze(stage: StageModule) -> None:
    """Stop the gradients of what the recipe freezes."""
    for index, module in stage.layers.items():
        frozen = stage.shape.layers[int(index)].frozen
        for name, param in module.named_parameters():
            param.requires_grad_(name not in frozen)
