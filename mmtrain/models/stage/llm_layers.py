"""The LLM's first and last layer: embedding and head. Its blocks come from the Megatron adapter."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mmtrain.models.attention import SequenceLayout
from mmtrain.models.attention.context_parallel import SharedMixing, exchange_rows
from mmtrain.models.attention.index_tables import HostTables, brought_or_computed
from mmtrain.models.attention.packed_sequences import PackedSequences
from mmtrain.models.kernels.rotary_positions import RotaryTables, Rotation, look_up_rotations, rotate_by_axes
from mmtrain.models.kernels.vocab_loss import LogitRules
from mmtrain.models.shapes.layer_shape import Attention, LayerShape
from mmtrain.models.stage.host_offload import OffloadedBlocks
from mmtrain.models.stage.stage_inputs import RowMix, TextInput
from mmtrain.recipe.settings.llm_settings import LlmSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory

_IGNORED_LABEL = -100  # of a token that has nothing to predict


@dataclass(frozen=True)
class TextContext:
    """What the layers of an LLM stage need to know about one microbatch of packed sequences."""

    inputs: TextInput
    features: Mapping[str, Tensor]  # encoder unit -> (F, hidden)
    settings: LlmSettings
    head_dim: int  # of blocks with a window, where others have another
    dtype: torch.dtype
    device: torch.device
    cp_group: dist.ProcessGroup | None = None  # of the ranks that share the sequences, where the input has a share
    offloaded: OffloadedBlocks = field(default_factory=OffloadedBlocks, compare=False)

    @cached_property
    def packing(self) -> PackedSequences:
        """Sequences with rotary positions: those of the input, or from 0, or from where the cached tokens end."""
        turning = self.settings.rope_width
        rotation = Rotation(self.head_dim, self.settings.rope_base, self.settings.rope_scaling, turning)
        if (full := self.settings.full_attention) is not None:
            rotation = rotation._replace(width=full.head_dim, turning=full.rope_width, as_whole_head=True)
        sections, position_ids = self.settings.rope_sections, self.inputs.position_ids
        if sections is None or position_ids is None:  # in text alone the three positions are one
            rope = self._rotate(rotation)
        else:
            axes = tuple(rotary_axes(sections, self.settings.rope_interleaved))
            axes += (0,) * (self.head_dim // 2 - len(axes))  # of pairs that do not turn
            rope = rotate_by_axes(position_ids, axes, rotation, self.dtype)
        return PackedSequences(
            self._layout,
            rope,
            self.inputs.kv_cache,
            self.shared_mixing,
            token_weight=self.inputs.token_weight,
            query_factors=self._query_factors(),
            token_keys=self.inputs.token_keys,
        )

    @cached_property
    def shared_mixing(self) -> SharedMixing | None:
        """How tokens are mixed whose sequences lie on several ranks."""
        if self.inputs.context is None:
            return None
        assert self.cp_group is not None, "ranks that share sequences have a group"
        return SharedMixing(self.inputs.context, self.cp_group, self.inputs.tables)

    def exchanged(self, unit: str, features: Tensor) -> Tensor:
        """Return an encoder's rows for this rank's tokens, of those (F, width) that it sent to the ranks."""
        exchange = None if self.inputs.context is None else self.inputs.context.features.get(unit)
        if exchange is None:
            return features
        assert self.cp_group is not None, "ranks that share sequences have a group"
        sent = F.embedding(exchange.sent, features)  # its backward adds gradients of equal rows in one order
        return exchange_rows(sent, exchange.num_sent, exchange.num_received, self.cp_group)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences; a stage without blocks has no tables for their `packing`."""
        return self._layout.num_tokens

    @cached_property
    def _layout(self) -> SequenceLayout:
        return SequenceLayout(self.inputs.lengths, self.inputs.image_spans, "sequences", self.inputs.tables)

    @cached_property
    def _causal_layout(self) -> SequenceLayout:
        """The same sequences for blocks in which tokens of an image see earlier ones alone."""
        return SequenceLayout(self.inputs.lengths, (), "causal sequences", self.inputs.tables)

    def block_layout(self, layer: LayerShape) -> SequenceLayout:
        """Return the sequences inside which the tokens attend in a block: the same in all, with images or without."""
        sees_images = isinstance(layer.mixer, Attention) and layer.mixer.image_spans
        return self._layout if sees_images or not self.inputs.image_spans else self._causal_layout

    def index_tables(self) -> HostTables:
        """Compute the position of each token in its sequence, (T,), which rotates it unless the input has others."""
        if self.settings.rope_sections is not None and self.inputs.position_ids is not None:
            return {}
        lengths = np.asarray(self.inputs.lengths, dtype=np.int32)
        firsts = np.cumsum(lengths, dtype=np.int32) - lengths - np.asarray(self._starts, dtype=np.int32)
        return {"rotary_positions": np.arange(lengths.sum(), dtype=np.int32) - np.repeat(firsts, lengths)}

    @property
    def _starts(self) -> tuple[int, ...]:
        """The position of the first token of each sequence, behind those that are cached or on other ranks."""
        if self.inputs.context is not None:
            return self.inputs.context.starts
        kv_cache = self.inputs.kv_cache
        return (0,) * len(self.inputs.lengths) if kv_cache is None else kv_cache.cached_lengths

    def _rotate(self, rotation: Rotation) -> RotaryTables:
        """Return the rotations of all tokens by their places in their sequences."""
        stops = (start + length for start, length in zip(self._starts, self.inputs.lengths, strict=True))
        tables = brought_or_computed(self.inputs.tables, self.index_tables, self.device)
        return look_up_rotations(tables["rotary_positions"], max(stops, default=0), rotation, self.dtype)

    def _query_factors(self) -> Tensor | None:
        """Return the factors on queries, (T, 1, 1), which grow with positions; None if they do not."""
        growth, scaling = self.settings.query_growth, self.settings.rope_scaling
        if growth is None:
            return None
        assert scaling is not None, "checked by the settings"
        assert scaling.original_positions is not None, "checked by the settings"
        tables = brought_or_computed(self.inputs.tables, self.index_tables, self.device)
        num_contexts = torch.floor(tables["rotary_positions"] / scaling.original_positions)
        return (1 + growth * torch.log(1 + num_contexts)).to(self.dtype)[:, None, None]

    def block_packing(self, layer: LayerShape) -> PackedSequences:
        """Each sequence is one, in every block; some blocks attend inside a sliding window."""
        layout = self.block_layout(layer)
        if not isinstance(layer.mixer, Attention) or not layer.mixer.window:
            return self.packing if layout is self._layout else replace(self.packing, layout=layout)
        has_own_rotation = self.settings.window_rope_base is not None or self.settings.full_attention is not None
        rope = self._window_rope if has_own_rotation else self.packing.rope
        return replace(self.packing, rope=rope, window=layer.mixer.window)

    @cached_property
    def _window_rope(self) -> RotaryTables:
        """Rotary positions of blocks with a window, where they have a base or a width of heads of their own."""
        base, scaling = self.settings.window_rope_base, None
        if base is None:
            base, scaling = self.settings.rope_base, self.settings.rope_scaling
        return self._rotate(Rotation(self.head_dim, base, scaling, turning=self.settings.rope_width))


def rotary_axes(sections: tuple[int, ...], interleaved: bool) -> list[int]:
    """Return for each pair of features of a head which of time, row and column (0, 1, 2) rotates it.

    Interleaved, pairs 1, 4, 7, ... belong to rows and 2, 5, 8, ... to columns, as many as their sections say.
    """
    if not interleaved:
        return [axis for axis, num_pairs in enumerate(sections) for _ in range(num_pairs)]
    pairs = range(sum(sections))
    return [pair % len(sections) if pair < sections[pair % len(sections)] * len(sections) else 0 for pair in pairs]


class Embedding(nn.Module):
    """Token embeddings; the features of encoders replace the rows at their positions.

    With DeepStack the features of earlier encoder blocks, which lie behind them in the same rows, travel on beside the
    embeddings until the blocks that add them.
    """

    def __init__(self, shape: LayerShape, factory: "LayerFactory", scaled: bool = False) -> None:
        """Build the layer that `shape` describes; its weights are uninitialized.

        scaled: multiply embeddings by the square root of their width, in their own precision.
        """
        super().__init__()
        self.table = factory.vocab_embedding(shape.vocab, shape.out)
        self.width, self.num_carried = shape.out, shape.carried_out
        self.scale = torch.tensor(shape.out**0.5, dtype=factory.dtype).item() if scaled else 1.0
        self.layer_inputs: nn.Module | None = None
        if shape.layer_input:
            self.layer_inputs = factory.layer_inputs(shape.vocab, shape.layer_input, len(shape.side_out))
        self.queries: nn.Parameter | None = None
        if shape.queries:
            self.queries = nn.Parameter(torch.empty(shape.queries, shape.out, dtype=factory.dtype))

    def forward(self, hidden: None, context: TextContext) -> Tensor:
        """Embed ids (T,) to (T, hidden) and overwrite the rows `feature_positions[unit]` with `features[unit]`.

        With DeepStack the result is (T, (1 + blocks) * hidden): zeros beside tokens that are no features.
        Of an encoder in `feature_mixes`, the features are first made of what it sends. Each image to draw has all
        queries, in order, at its positions. Inputs of single blocks lie behind all of that.
        """
        assert context.inputs.ids is not None, "the stage with the embedding needs ids"
        tokens: Tensor = self.table(context.inputs.ids)
        if self.scale != 1.0:
            tokens = tokens * self.scale
        if self.num_carried:
            tokens = F.pad(tokens, (0, tokens.shape[1] * self.num_carried))
        for unit, received in context.features.items():
            features = context.exchanged(unit, received)
            mix = context.inputs.feature_mixes.get(unit)
            rows = (features if mix is None else _mix(features, mix)).to(tokens.dtype)
            if rows.shape[1] < tokens.shape[1]:  # of an encoder that keeps fewer blocks' outputs than another
                rows = F.pad(rows, (0, tokens.shape[1] - rows.shape[1]))
            tokens = tokens.index_copy(0, context.inputs.feature_positions[unit], rows)
        if self.queries is not None:
            positions = context.inputs.query_positions
            assert positions is not None, "the stage with the embedding needs the positions of queries"
            queries = F.pad(self.queries, (0, tokens.shape[1] - self.queries.shape[1]))
            num_images = len(positions) // len(queries)
            tokens = tokens.index_copy(0, positions, queries.repeat(num_images, 1))
        if self.layer_inputs is not None:
            inputs_of_blocks = self.layer_inputs(context.inputs.ids, tokens[:, : self.width])
            tokens = torch.cat((tokens, inputs_of_blocks), dim=1)
        return tokens


def _mix(rows: Tensor, mix: RowMix) -> Tensor:
    """Make features (F, hidden) of rows (R, hidden), in fp32 where they are sums."""
    # Unlike that of `index_select`, its backward adds gradients of equal rows in the same order every time.
    parts = [F.embedding(numbers, rows) for numbers in mix.rows.unbind(1)]
    if len(parts) == 1:
        return parts[0]
    mixed = torch.zeros_like(parts[0], dtype=torch.float32)
    for part, weights in zip(parts, mix.weights.unbind(1), strict=True):
        mixed = mixed + part * weights[:, None]
    return mixed


def sum_by_source(losses: Tensor, inputs: TextInput) -> Tensor:
    """Sum the losses (N,) of all targets, or those of each source: a scalar or (sources,)."""
    if inputs.target_sources is None:
        return losses.sum()
    sources = torch.arange(inputs.num_sources, device=losses.device)
    # Not `index_add`, which adds in any order on a GPU. A loss that is not finite stays with its source.
    return torch.where(inputs.target_sources == sources[:, None], losses, 0.0).sum(dim=1)


class Head(nn.Module):
    """Last norm, projection to the vocabulary, and the loss."""

    def __init__(
        self,
        shape: LayerShape,
        factory: "LayerFactory",
        vocab_size: int,
        tied: Embedding | None,
        logit_cap: float | None = None,
    ) -> None:
        """Build the layer for a vocabulary of `vocab_size`; `shape.vocab` is larger if it is padded.

        tied: the embedding whose matrix it uses, if the model ties them. logit_cap: see `LlmSettings`.
        """
        super().__init__()
        self.vocab_size = vocab_size
        self.factory = factory
        self.logit_cap = logit_cap
        self.norm = factory.norm(shape.hidden, on_sequence_shards=True)
        self.output = factory.vocab_linear(shape.hidden, shape.vocab, own_weight=tied is None)
        # In a tuple, so that torch does not list the tied weight under this module too.
        self._tied = (tied,)

    def forward(self, hidden: Tensor, context: TextContext) -> Tensor:
        """Sum the losses of the tokens (T, hidden) whose label is not -100: a scalar in fp32, or one for each source.

        Under sequence parallelism `hidden` is this rank's shard of the tokens; each rank returns the total sum.
        """
        return self._loss(hidden, None, context)

    def queries_and_loss(self, hidden: Tensor, context: TextContext) -> tuple[Tensor, Tensor]:
        """Return what `forward` returns behind the normalized rows of `hidden` at the queries, (Q, hidden)."""
        positions = context.inputs.query_positions
        assert positions is not None, "the stage with the head needs the positions of queries"
        if not self.factory.sequence_parallel:
            queries: Tensor = self.norm(hidden.index_select(0, positions))
            return queries, self._loss(hidden, None, context)
        normed = self.norm(hidden)  # once, since its gradient is summed over shards
        # Unlike those of logits, every rank's gradients of queries are whole.
        queries = self.factory.gather_tokens(normed, context.num_tokens).index_select(0, positions)
        return queries, self._loss(hidden, normed, context)

    def _loss(self, hidden: Tensor, normed_shard: Tensor | None, context: TextContext) -> Tensor:
        labels, rows = context.inputs.labels, context.inputs.target_positions
        assert labels is not None, "the stage with the head needs labels"
        if rows is None:
            rows = torch.nonzero(labels != _IGNORED_LABEL).squeeze(1)
        normed = self._rows_with_targets(hidden, normed_shard, rows)
        (tied,) = self._tied
        weight: Tensor = self.output.weight if tied is None else tied.table.weight  # type: ignore[assignment]
        targets = labels.index_select(0, rows)
        losses = self.factory.losses_of_targets(normed, weight, targets, self.vocab_size, self.logit_cap)
        return sum_by_source(losses, context.inputs)

    def _rows_with_targets(self, hidden: Tensor, normed_shard: Tensor | None, rows: Tensor) -> Tensor:
        """Select rows of hidden (T, hidden), or of the shards of all ranks, and normalize them: (N, hidden)."""
        if self.factory.sequence_parallel:  # the norm's gradient is summed over shards, so it must see its shard
            normed_shard = self.norm(hidden) if normed_shard is None else normed_shard
            return self.factory.gather_inputs(normed_shard).index_select(0, rows)
        normed: Tensor = self.norm(hidden.index_select(0, rows))
        return self.factory.copy_inputs(normed)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map (T, hidden), or this rank's shard of it, to logits (T, padded vocabulary)."""
        return self.factory.gather_vocab(self._project(hidden))

    def greedy_tokens(self, hidden: Tensor, vocab_size: int, rules: LogitRules | None = None) -> Tensor:
        """Return the most likely token below `vocab_size` after each row: (T, hidden), or a shard of it -> (T,) int64.

        `hidden` may be this rank's shard of the rows; all ranks return the tokens of all rows.
        """
        return self.factory.greedy_tokens(self._project(hidden), vocab_size, rules)

    def _project(self, hidden: Tensor) -> Tensor:
        (tied,) = self._tied
        weight = None if tied is None else tied.table.weight
        logits: Tensor = self.output(self.norm(hidden), weight=weight)[0]
        return logits if self.logit_cap is None else self.logit_cap * torch.tanh(logits / self.logit_cap)
