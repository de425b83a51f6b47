"""One pipeline stage as a torch module: consecutive layers of one unit.

DeepStack (arXiv 2406.04334): an encoder keeps the outputs of some blocks until its projector, which maps each to the
LLM's width; the LLM's embedding sends these on, and each of the first blocks adds one of them to its output. Inside a
stage they are tensors of their own. Between stages they lie in the rows of the hidden states, behind these.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmtrain.models.attention.index_tables import HostTables, TableUser
from mmtrain.models.attention.packed_sequences import PackedSequences
from mmtrain.models.shapes.layer_shape import BLOCK_KINDS, Attention, GatedDeltaNet, LayerShape
from mmtrain.models.shapes.model_shape import ModelShape
from mmtrain.models.stage.generator_input import DrawingContext
from mmtrain.models.stage.host_offload import HostOffload
from mmtrain.models.stage.llm_layers import Embedding, Head, TextContext
from mmtrain.models.stage.merger import Merger
from mmtrain.models.stage.projector import EncoderContext, Projector
from mmtrain.models.stage.resampler import Resampler
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput, UnitInput
from mmtrain.recipe.settings.audio_settings import AudioSettings
from mmtrain.recipe.settings.modalities import VISION
from mmtrain.recipe.settings.model_settings import ModelSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory
from collections.abc import Sequence

from mmtrain.models.shapes.unit_shape import UnitShape
from mmtrain.models.stage.audio_conv_embed import AudioConvEmbed
from mmtrain.models.stage.audio_layers import AudioContext, AudioEmbed
from mmtrain.models.stage.vision_layers import PatchEmbed, VisionContext

StageContext: TypeAlias = EncoderContext | TextContext | DrawingContext
Outputs = TypeVar("Outputs")
_BlockContext: TypeAlias = EncoderContext | TextContext  # of units whose blocks pack their tokens
_SHARDED_KINDS = (*BLOCK_KINDS, "head")  # layers that read only this rank's tokens under sequence parallelism


def split_rows(rows: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Split rows (T, sum of widths) into the hidden states and what travels beside them."""
    return [rows] if len(widths) == 1 else list(torch.split(rows, list(widths), dim=1))


def join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Lay the hidden states and what travels beside them side by side, for the next stage."""
    return torch.cat(tuple(tensors), dim=1) if len(tensors) > 1 else tensors[0]


def carry_on(layer: LayerShape, outputs: Sequence[Tensor], beside: Sequence[Tensor]) -> list[Tensor]:
    """Return what leaves a block with these outputs: hidden states, and what travels beside them.

    Args:
        outputs: hidden states, then keys and values if later blocks read them.
        beside: what came beside the hidden states.
    """
    output, carried = outputs[0], beside[: layer.carried_in]
    by_side = dict(zip(layer.side_in, beside[layer.carried_in :], strict=True))
    if layer.keeps_kv:
        by_side[layer.attention.kv_side] = outputs[1]
    sides = [by_side[side] for side in layer.side_out]
    if layer.adds_carried:
        return [output + carried[0], *carried[1:], *sides]
    if layer.keeps_output:
        return [output, *carried, output]
    return [output, *carried, *sides]


def with_sides(packing: PackedSequences, layer: LayerShape, beside: Sequence[Tensor]) -> PackedSequences:
    """Return the packing of a block's tokens with what the block alone reads of what came beside the hidden states."""
    by_side = dict(zip(layer.side_in, beside[layer.carried_in :], strict=True))
    if layer.layer_input:
        packing = replace(packing, layer_input=by_side[layer.side_in[0]])
    if isinstance(layer.mixer, Attention) and layer.mixer.reads_kv:
        packing = replace(packing, shared_kv=by_side[layer.mixer.kv_side])
    return packing


@dataclass(frozen=True)
class StageSpec:
    """Which layers a stage has, and how it runs them."""

    unit: str
    layers: tuple[int, int]  # [lo, hi) in the unit's layers
    recompute: frozenset[int] = frozenset()  # layers, by index in the unit, whose activations backward recomputes
    sequence_parallel: bool = False  # outside the TP GEMMs, keep the tokens split over the TP ranks
    tp_chunks: int = 1  # chunks of tokens, so that the TP group communicates one while it computes another


class StageModule(nn.Module):
    """Consecutive layers of an encoder or the LLM; `generator_stage.GeneratorStage` overrides what a generator needs.

    `layers` is keyed by the layer's index in the unit.

    The plan-independent name of a parameter is `f"{unit}.{name}"`, where `name` is its name in this module. With tied
    embeddings, a stage with the head but without the embedding holds a copy of layer 0 for its weight.
    Both copies are marked `param.shared = "embeddings"`; the runtime must sum their gradients.
    """

    def __init__(self, settings: ModelSettings, shape: ModelShape, spec: StageSpec, factory: "LayerFactory") -> None:
        """Build the layers that `spec` names, with uninitialized weights."""
        super().__init__()
        self.unit = spec.unit
        self.shape = shape.unit(spec.unit)
        self.indices = range(*spec.layers)
        self.factory = factory
        recomputed = spec.recompute.intersection(self.indices)
        # Blocks whose activations come back from host memory.
        self.offloaded = frozenset(index for index in recomputed if self.shape.layers[index].offload == "all")
        self.recompute = spec.recompute - self.offloaded
        self.layers = nn.ModuleDict()
        self._settings = settings
        is_tied = self._is_tied = shape.tied_embeddings and self.shape.kind == "llm"
        for index in self.indices:
            layer = self.shape.layers[index]
            embedding: nn.Module | None = None
            if is_tied and layer.kind == "head":
                if "0" not in self.layers:
                    # The first stage alone inserts queries, and makes inputs of blocks.
                    copied = replace(self.shape.layers[0], queries=0, layer_input=0, side_out=())
                    self.layers["0"] = self._build_layer(copied)
                embedding = self.layers["0"]
            if index in spec.recompute:  # recomputing or offloading a whole layer covers its activation function
                layer = replace(layer, recomputes_activation=False)
            self.layers[str(index)] = self._build_layer(layer, embedding, index in self.recompute)
            if layer.lora is not None:
                factory.add_adapters(self.layers[str(index)], layer.lora, f"{spec.unit}.layers.{index}")
        holds_both_ends = {0, len(self.shape.layers) - 1} <= set(self.indices)
        if is_tied and "0" in self.layers and not holds_both_ends:
            self.layers["0"].table.weight.shared = "embeddings"  # type: ignore[union-attr]

    @property
    def tied_layer(self) -> nn.Module | None:
        """Return the embedding whose matrix the head uses, if this stage holds them."""
        return self.layers["0"] if self._is_tied and "0" in self.layers else None

    @property
    def sharded_layers(self) -> Sequence[nn.Module]:
        """Return the parts whose weights FSDP gathers one after another; the rest is gathered for a whole pass.

        The head reads a matrix there that it shares with the embedding.
        """
        return [layer for layer in self.layers.values() if layer is not self.tied_layer]

    def layer_of(self, name: str) -> int:
        """Return the index in the unit of the layer of a parameter, by its name in the stage."""
        return int(name.split(".")[1])

    @property
    def needs_position_ids(self) -> bool:
        """Return whether the stage's input must say where tokens are in time, row and column."""
        return self.shape.kind == "llm" and self._settings.llm.rope_sections is not None

    @property
    def units_with_spans(self) -> tuple[str, ...]:
        """Return the encoders whose image spans must be in the stage's input."""
        if self.shape.kind != "llm" or self._settings.llm.image_attention == "causal":
            return ()
        encoders = self._settings.all_encoders.items()
        return tuple(unit for unit, settings in encoders if settings.modality == VISION.name)

    def forward(self, hidden: Tensor | None, inputs: UnitInput, features: Mapping[str, Tensor] | None = None) -> Tensor:
        """Run the stage on one microbatch.

        Args:
            hidden: (T, hidden) from the previous stage; None for the first stage.
            inputs: the microbatch; lengths on every stage, payload where the stage needs it.
            features: for the stage with the LLM's embedding, the encoders' outputs (F, hidden) by unit name.

        With DeepStack, outputs of encoder blocks lie beside the hidden states and the features, in the same rows: all
        are `LayerShape.in_width` or `LayerShape.out_width` wide.

        Returns:
            Hidden states (T, hidden); an encoder's last stage returns features (F, llm_hidden), the LLM's last stage
            the sum of the token losses, a scalar in fp32, or one for each source. Under sequence parallelism hidden
            states are this rank's ceil(T / tp) rows, at both ends.
        """
        return self.run(self.context(inputs, features or {}), hidden, self.indices)

    def run(self, context: StageContext, hidden: Tensor | None, layers: range) -> Tensor:
        """Run consecutive layers of the stage as `forward` does; `context` is the one of the whole stage."""
        assert not isinstance(context, DrawingContext)
        out, is_sharded = self._run_layers(layers, hidden, context)
        is_unit_output = layers.stop == len(self.shape.layers)
        if not self.factory.sequence_parallel or is_unit_output:
            return out
        num_tokens = context.num_tokens
        if not num_tokens:
            return out[:0]
        return self.redistribute(out, is_sharded, shard=True, num_tokens=num_tokens)

    def run_layer(self, context: StageContext, state: Any, index: int) -> Any:
        """Run one layer on what the layer before it made, None for the first; return what the next one reads.

        It is a tensor, or the state of a generator's layers.
        """
        return self.run(context, state, range(index, index + 1))

    @property
    def feeds_generator(self) -> bool:
        """Return whether the unit's outputs at queries go to a generator, beside its loss."""
        return self.shape.kind == "llm" and self._settings.generator is not None

    def run_to_queries(self, context: StageContext, hidden: Tensor | None, layers: range) -> tuple[Tensor, Tensor]:
        """Run layers up to the head; return the normalized outputs at queries (Q, hidden), and the loss."""
        assert isinstance(context, TextContext)

        def read(head: Head, rows: Tensor) -> tuple[Tensor, Tensor]:
            if layers[-1] in self.recompute and torch.is_grad_enabled():
                pair: tuple[Tensor, Tensor] = checkpoint(
                    head.queries_and_loss, rows, context, use_reentrant=False, preserve_rng_state=False
                )
                return pair
            return head.queries_and_loss(rows, context)

        return self.run_to_head(context, hidden, layers, read)

    def run_to_head(
        self, context: StageContext, hidden: Tensor | None, layers: range, read: Callable[[Head, Tensor], Outputs]
    ) -> Outputs:
        """Run layers up to the head, and return what `read` makes of the head and the rows before it.

        The rows are (T, hidden); under sequence parallelism those of this rank.
        """
        assert not isinstance(context, DrawingContext)
        out, is_sharded = self._run_layers(layers[:-1], hidden, context)
        rows = self.redistribute(out, is_sharded, self.factory.sequence_parallel, context.num_tokens)
        head = self.layers[str(layers[-1])]
        assert isinstance(head, Head), f"layer {layers[-1]} of {self.unit} is no head"
        return read(head, rows)

    def context(self, inputs: UnitInput, features: Mapping[str, Tensor]) -> StageContext:
        """Derive from a microbatch what all layers of the stage need to know about it."""
        return self._block_context(inputs, features)

    def _block_context(self, inputs: UnitInput, features: Mapping[str, Tensor] | None = None) -> _BlockContext:
        features = features or {}
        device = next(self.parameters()).device
        if isinstance(inputs, TextInput):
            llm, dtype, cp_group = self._settings.llm, self.factory.dtype, self.factory.groups.cp
            head_dim = llm.head_dim or llm.hidden // llm.heads
            return TextContext(inputs, features, llm, head_dim, dtype, device, cp_group)
        assert isinstance(inputs, EncoderInput)
        modality = self._settings.all_encoders[self.unit].modality
        return ENCODER_MODULES[modality].context(inputs, self.shape, self.factory.dtype, device)

    def host_tables(self, inputs: UnitInput) -> HostTables:
        """Compute on the host the index tables that this stage's layers need for a microbatch of these lengths.

        Copy them to the device and pass them as `inputs.tables`. Any thread may call this.
        """
        context = self._block_context(replace(inputs, tables=None))
        shapes = [self.shape.layers[index] for index in self.indices]
        layouts = {layout.name: layout for layout in map(context.block_layout, filter(_is_block, shapes))}
        tables = context.index_tables() if layouts else {}
        shared = context.shared_mixing if isinstance(context, TextContext) else None
        has_delta_nets = any(isinstance(shape.mixer, GatedDeltaNet) for shape in shapes)
        if layouts and shared is not None:
            tables |= shared.host_tables(self.factory.attention)
            if has_delta_nets:
                tables |= shared.host_chunk_tables()
            layouts = {}  # nothing attends inside pieces of sequences
        for layout in layouts.values():
            num_tokens = layout.num_tokens
            num_padding_rows = self.factory.num_padding_rows(num_tokens) if self.factory.sequence_parallel else 0
            run_layout = layout.padded(num_padding_rows) if num_padding_rows else layout
            tables |= run_layout.host_tables(self.factory.attention)
            if has_delta_nets:
                tables |= run_layout.host_chunk_tables()
        for layer in self.layers.values():
            if isinstance(layer, TableUser):
                tables |= layer.index_tables(context)
        return tables

    def _run_layers(self, indices: Iterable[int], hidden: Tensor | None, context: _BlockContext) -> tuple[Tensor, bool]:
        """Run layers; return the output of the last one, and whether it is this rank's shard of the tokens."""
        num_tokens = context.num_tokens
        sequence_parallel = self.factory.sequence_parallel
        num_padding_rows = self.factory.num_padding_rows(num_tokens) if sequence_parallel else 0
        packings: dict[tuple[int, ...], PackedSequences] = {}  # by what blocks may differ in: their windows
        is_sharded = sequence_parallel and hidden is not None and num_tokens > 0
        tensors: list[Tensor] = []  # hidden states, and what travels beside them
        last: LayerShape | None = None
        for index in indices:
            layer_shape = self.shape.layers[index]
            kind = layer_shape.kind
            if hidden is not None and not tensors:
                tensors = self.enter(hidden, layer_shape, is_sharded)
            shard = sequence_parallel and kind in _SHARDED_KINDS
            if tensors and is_sharded != shard:
                widths = [tensor.shape[1] for tensor in tensors]
                tensors = split_rows(self.redistribute(join_rows(tensors), is_sharded, shard, num_tokens), widths)
            is_sharded = shard
            argument: PackedSequences | _BlockContext = context
            if kind in BLOCK_KINDS:
                windows = _windows(layer_shape)
                if windows not in packings:
                    packings[windows] = context.block_packing(layer_shape).padded(num_padding_rows)
                argument = packings[windows]
            tensors = self._run_layer(index, tensors, argument, context)
            last = layer_shape
        if not tensors and hidden is not None:  # of a stage that holds nothing but the head, which its caller runs
            tensors = [hidden]
        assert tensors, "a stage has at least one layer, and only the first stage starts without an input"
        return (tensors[0] if last is None else self.leave(tensors, last)), is_sharded

    def enter(self, rows: Tensor, layer: LayerShape, is_sharded: bool) -> list[Tensor]:
        """Split what another stage sent for a layer: hidden states, and what travels beside them.

        Of keys and values this rank takes those of its heads, for all tokens.
        """
        tensors = split_rows(rows, layer.in_widths)
        first = len(tensors) - len(layer.side_in)
        for place, side in enumerate(layer.side_in, first):
            if side.num_heads:
                tensors[place] = self.factory.take_heads(tensors[place], side.num_heads, is_sharded)
        return tensors

    def leave(self, tensors: Sequence[Tensor], layer: LayerShape) -> Tensor:
        """Lay what leaves a layer side by side for another stage, with keys and values of all heads."""
        joined = list(tensors)
        for place, side in enumerate(layer.side_out, len(joined) - len(layer.side_out)):
            if side.num_heads:
                joined[place] = self.factory.join_heads(joined[place], side.width)
        return join_rows(joined)

    def _run_layer(
        self, index: int, tensors: list[Tensor], argument: PackedSequences | _BlockContext, context: _BlockContext
    ) -> list[Tensor]:
        """Run a layer on the hidden states, if there are any, and what travels beside them; return both."""
        shape, layer = self.shape.layers[index], self.layers[str(index)]
        hidden, beside = (tensors[0], tensors[1:]) if tensors else (None, [])
        is_block = shape.kind in BLOCK_KINDS
        if is_block:
            assert isinstance(argument, PackedSequences)
            argument = with_sides(argument, shape, beside)
        others = [] if is_block else beside
        with self.offloading(index, argument, context):
            if index in self.recompute and torch.is_grad_enabled():
                # Dropout depends on keys of tokens, so there is no random state to restore.
                output = checkpoint(layer, hidden, argument, *others, use_reentrant=False, preserve_rng_state=False)
            else:
                output = layer(hidden, argument, *others)
        if is_block:
            return carry_on(shape, [output] if isinstance(output, Tensor) else output, beside)
        return split_rows(output, shape.out_widths) if shape.kind == "embedding" else [output]

    def offloading(
        self, index: int, argument: PackedSequences | _BlockContext, context: _BlockContext
    ) -> AbstractContextManager[None]:
        """Return the context in which a layer saves its activations: to host memory, if the plan says so."""
        keeps_input = index in self.recompute and self.shape.layers[index].offload == "inputs"
        if not (keeps_input or index in self.offloaded) or not torch.is_grad_enabled():
            return nullcontext()
        assert isinstance(argument, PackedSequences), "blocks alone keep activations in host memory"
        offload = HostOffload.of(context.device)
        shared = [tensor for tensor in (argument.layer_input, argument.shared_kv) if tensor is not None]
        return offload.offload(self.layers[str(index)], (*(argument.rope or ()), *shared), context.offloaded)

    def redistribute(self, hidden: Tensor, is_sharded: bool, shard: bool, num_tokens: int) -> Tensor:
        """Convert between all tokens and this rank's shard of them (`shard` is what the result must be)."""
        if is_sharded == shard:
            return hidden
        return self.factory.scatter_tokens(hidden) if shard else self.factory.gather_tokens(hidden, num_tokens)

    def _build_layer(
        self, layer: LayerShape, tied_embedding: nn.Module | None = None, is_recomputed: bool = False
    ) -> nn.Module:
        match layer.kind:
            case "vit_block" | "decoder_block":
                return self.factory.transformer_block(layer, is_recomputed)
            case "patch_embed" | "audio_embed":
                encoder = self._settings.all_encoders[self.unit]
                return ENCODER_MODULES[encoder.modality].embedding(encoder, layer, self.factory)
            case "projector":
                return Projector(self._settings.all_encoders[self.unit], layer, self.factory)
            case "resampler":
                return Resampler(self._settings.all_encoders[self.unit], layer, self.factory)
            case "merger":
                return Merger(self._settings.all_encoders[self.unit], layer, self.factory)
            case "embedding":
                return Embedding(layer, self.factory, self._settings.llm.scale_embeddings)
            case "head":
                assert tied_embedding is None or isinstance(tied_embedding, Embedding)
                llm = self._settings.llm
                return Head(layer, self.factory, llm.vocab, tied_embedding, llm.logit_cap)
            case _:
                raise AssertionError(f"{layer.kind} can only be planned; `require_runnable` rejects such recipes")


def _is_block(shape: LayerShape) -> bool:
    return shape.kind in BLOCK_KINDS


def _windows(block: LayerShape) -> tuple[int, ...]:
    """Return what the packing of a block's tokens depends on; only attention has any of it."""
    mixer = block.mixer
    if not isinstance(mixer, Attention):
        return (0, 0, 0, 0)
    return mixer.window_side, mixer.chunk, mixer.window, int(mixer.image_spans)


@dataclass(frozen=True)
class EncoderModules:
    """How to build what is particular to one modality."""

    embedding: Callable[..., nn.Module]  # (settings of the encoder, LayerShape, LayerFactory)
    context: Callable[[EncoderInput, UnitShape, torch.dtype, torch.device], EncoderContext]


def _vision_context(inputs: EncoderInput, unit: UnitShape, dtype: torch.dtype, device: torch.device) -> VisionContext:
    embedding, block = unit.layers[:2]
    rotary_width = block.attention.head_dim if block.attention.rotary else 0
    window_side = max(layer.attention.window_side for layer in unit.layers if layer.mixer is not None)
    alternates = block.attention.rotary_alternates
    base = block.attention.rotary_base
    return VisionContext(inputs, embedding.extra_tokens, device, rotary_width, base, window_side, alternates, dtype)


def _audio_context(inputs: EncoderInput, unit: UnitShape, dtype: torch.dtype, device: torch.device) -> AudioContext:
    embedding, block = unit.layers[:2]
    media = embedding.media
    return AudioContext(inputs, device, block.attention.chunk, media.partial_cells, media.frames_per_token)


def _audio_embedding(settings: AudioSettings, layer: LayerShape, factory: "LayerFactory") -> nn.Module:
    return (AudioConvEmbed if layer.media.conv_channels else AudioEmbed)(settings, layer, factory)


ENCODER_MODULES: Mapping[str, EncoderModules] = {
    "vision": EncoderModules(PatchEmbed, _vision_context),
    "audio": EncoderModules(_audio_embedding, _audio_context),
}
