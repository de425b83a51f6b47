"""The resampler: a projector whose learned queries attend to the tokens of each item."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmtrain.models.attention import AttentionOptions, SequenceLayout, attend_to_context
from mmtrain.models.attention.index_tables import HostTables
from mmtrain.models.shapes.layer_shape import LayerShape
from mmtrain.models.stage.projector import EncoderContext, Projector
from mmtrain.recipe.settings.encoder_settings import EncoderSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory


class Resampler(Projector):
    """Cross-attention from learned queries to the tokens of each item, a norm, and a linear to the LLM's width.

    Every item becomes as many features as there are queries (one layer of it, as in Qwen-VL, arXiv 2308.12966). Norms
    stand before both inputs of attention: that of queries, and those of a `Projector` before its first linear. Tensor
    parallelism splits heads. Rows of `linear_kv` are [key, value] by head.
    """

    def __init__(self, settings: EncoderSettings, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the resampler that `shape` describes; its weights are uninitialized."""
        super().__init__(settings, shape, factory)
        width, bias, norm_eps = shape.hidden, shape.linear_bias, settings.projector.norm_eps
        self.head_dim = shape.attention.head_dim
        self.options = AttentionOptions(factory.attention, causal=False)
        self.queries = nn.Parameter(torch.empty(shape.projector.features_per_item, width, dtype=factory.dtype))
        self.query_norm = factory.projector_norm(shape, width, norm_eps)
        self.linear_q = factory.column_linear(width, width, bias=bias)
        self.linear_kv = factory.column_linear(width, 2 * width, bias=bias)
        self.linear_proj = factory.row_linear(width, width, bias=bias)
        self.output_norm = factory.projector_norm(shape, width, norm_eps)

    def forward(self, hidden: Tensor, context: EncoderContext, *carried: Tensor) -> Tensor:
        """Map tokens (T, hidden) to features (items * queries, llm_hidden)."""
        tokens = self._merge_last(hidden, context)
        if self.norm is not None:
            tokens = self.norm(tokens)
        keys, values = self.linear_kv(tokens)[0].unflatten(1, (-1, 2, self.head_dim)).unbind(2)
        queries = self.linear_q(self.query_norm(self.queries))[0].unflatten(1, (-1, self.head_dim))
        rows = queries.repeat(len(context.item_lengths), 1, 1)
        items, of_queries = self._layouts(context, self._tables(context))
        attended = attend_to_context(rows, keys, values, of_queries, items, self.options)
        features: Tensor = self.linear(self.output_norm(self.linear_proj(attended.flatten(1))[0]))[0]
        return features

    def index_tables(self, context: EncoderContext) -> HostTables:
        """See `TableUser`: those of a projector, and where the tokens and queries of each item lie."""
        items, queries = self._layouts(context)
        backend = self.options.backend
        of_items = items.host_tables(backend) | items.host_context_tables(queries, backend)
        return super().index_tables(context) | of_items

    def _layouts(
        self, context: EncoderContext, tables: Mapping[str, Tensor] | None = None
    ) -> tuple[SequenceLayout, SequenceLayout]:
        """Return where the tokens of each item lie, class tokens left out, and where its queries do."""
        lengths = tuple(length - self.dropped_tokens for length in context.item_lengths)
        queries = (len(self.queries),) * len(lengths)
        return SequenceLayout(lengths, (), "resampled", tables), SequenceLayout(queries, (), "queries", tables)
