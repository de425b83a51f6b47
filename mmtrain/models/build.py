"""From settings and a slice of layers to a torch module that computes one stage.

The same recipe and seed give the same weights on any mesh and for any split into stages, because every parameter is
drawn under its plan-independent name (`mmtrain.models.params`).
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmtrain.models import params
from mmtrain.models.attention import Backend, choose
from mmtrain.models.audio import AudioContext, AudioEmbed
from mmtrain.models.inputs import AudioInput, TextInput, UnitInput, VisionInput
from mmtrain.models.llm import Embedding, Head, TextContext
from mmtrain.models.shape import LayerShape, ModelShape, UnitShape
from mmtrain.models.vision import PatchEmbed, Projector, VisionContext
from mmtrain.recipe.schema import AudioSettings, ModelSettings, VisionSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import ParallelGroups, Parts

Context = VisionContext | AudioContext | TextContext
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
    attention: Literal["auto"] | Backend,
    sequence_parallel: bool = False,
) -> "StageModule":
    """Build layers [lo, hi) of `unit` on this rank, with their initial weights, frozen where the settings say so.

    `recompute` names layers (by index in the unit) whose activations are computed again in backward. With
    `sequence_parallel` the ranks of a lane share out the tokens between the layers' products.
    Raises UserError if the attention backend does not work here.
    """
    from mmtrain.models.megatron import prepare

    prepare(device)
    backend = choose(attention, device, dtype)
    parts = _parts(recipe_model, shape.unit(unit), groups, dtype, backend, sequence_parallel and groups.tp_size > 1)
    stage = StageModule(recipe_model, shape, unit, layers, parts, recompute)
    specs = params.specs(stage, unit, groups.tp_size)
    params.initialize(stage, specs, seed, groups.tp_rank, groups.tp_size)
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
        parts: "Parts",
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
        (F, llm_hidden), the LLM's last stage the sum of token losses (a scalar in fp32).
        """
        return self._through(self.indices, hidden, self._context(inputs, features or {}))

    def logits(self, hidden: Tensor | None, inputs: TextInput, features: Mapping[str, Tensor] | None = None) -> Tensor:
        """Run a stage that ends with the head, but return logits (T, padded vocabulary) and look at no labels."""
        *before, last = self.indices
        head = self.layers[str(last)]
        assert isinstance(head, Head), f"layer {last} of {self.unit} is no head"
        hidden = self._through(before, hidden, self._context(inputs, features or {}))
        if not self.parts.sequence_parallel:
            return head.logits(hidden)
        return head.logits(self.parts.slice_tokens(hidden))[: len(hidden)]

    def _through(self, indices: Iterable[int], hidden: Tensor | None, context: Context) -> Tensor:
        packing, kind = context.packing, "embedding"
        if self.parts.sequence_parallel:
            packing = packing.padded(self.parts.padding(sum(packing.lengths)))
        for index in indices:
            before, kind = kind, self.shape.layers[index].kind
            hidden = self._shared_out(hidden, before, kind, context)
            layer = self.layers[str(index)]
            argument = packing if kind in _BLOCKS else context
            if index in self.recompute and torch.is_grad_enabled():
                # No dropout, so there is no generator state to restore.
                hidden = checkpoint(layer, hidden, argument, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = layer(hidden, argument)
        hidden = hidden if kind == "head" else self._shared_out(hidden, kind, "embedding", context)
        assert hidden is not None, "a stage has at least one layer, and only the first one starts from nothing"
        return hidden

    def _shared_out(self, hidden: Tensor | None, before: str, after: str, context: Context) -> Tensor | None:
        """Slice or join tokens between two kinds of layers; outside the stage they are whole, as in an embedding."""
        if not self.parts.sequence_parallel or hidden is None or (before in _SLICED) == (after in _SLICED):
            return hidden
        if after in _SLICED:
            return self.parts.slice_tokens(hidden)
        return self.parts.join_tokens(hidden, sum(context.packing.lengths))

    def _context(self, inputs: UnitInput, features: Mapping[str, Tensor]) -> Context:
        device = next(self.parameters()).device
        if isinstance(inputs, VisionInput):
            return VisionContext(inputs, self.shape.layers[0].extra_tokens, device)
        if isinstance(inputs, AudioInput):
            return AudioContext(inputs, device)
        head_dim, base = self.parts.block.head_dim, self._settings.llm.rope_base
        return TextContext(inputs, features, head_dim, base, self.parts.dtype, device)

    def _layer(self, layer: LayerShape, tied: nn.Module | None) -> nn.Module:
        from mmtrain.models.megatron.parts import ACTIVATIONS

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


def _parts(
    model: ModelSettings,
    unit: UnitShape,
    groups: "ParallelGroups",
    dtype: torch.dtype,
    attention: Backend,
    sequence_parallel: bool,
) -> "Parts":
    from mmtrain.models.megatron import Parts

    block = next(layer for layer in unit.layers if layer.kind in _BLOCKS)
    if unit.kind == "llm":
        return Parts(block, "silu", model.llm.norm_eps, groups, dtype, attention, sequence_parallel)
    encoder = _encoder(model, unit.name)
    return Parts(block, encoder.activation, encoder.norm_eps, groups, dtype, attention, sequence_parallel)


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
