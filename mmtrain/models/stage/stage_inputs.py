"""The input of a stage besides the hidden states: one microbatch of one unit.

Every rank of the unit knows the lengths; it has the payload (cells, ids, labels) only where its stage needs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from mmtrain.models.attention import Spans
from mmtrain.models.attention.context_share import ContextShare
from mmtrain.models.attention.kv_cache import KVCache
from mmtrain.models.stage.generator_input import GeneratorInput
from mmtrain.models.stage.pixel_scale import PixelScale


@dataclass(frozen=True)
class EncoderInput:
    """One microbatch of an encoder: I items with N cells in total, packed one after another.

    An item is a grid of cells: an image has rows x cols patches, a clip has as many rows as log-mel frames and one
    column.
    """

    rows: tuple[int, ...]  # (I,)
    cols: tuple[int, ...]  # (I,)
    cells: Tensor | None = None  # (N, `EncoderSettings.cell_features`), row by row; first stage only
    scale: PixelScale | None = None  # of cells that are bytes
    blank_cells: tuple[tuple[int, int], ...] = ()  # [start, stop) of cells that are zeros whatever their bytes
    tables: Mapping[str, Tensor] | None = None  # `StageModule.host_tables`; None: computed in the forward, and copied

    def numbers(self, dtype: torch.dtype) -> Tensor | None:
        """Return the cells as numbers, normalized if they came as bytes."""
        if self.cells is None or self.cells.dtype != torch.uint8:
            return None if self.cells is None else self.cells.to(dtype)
        assert self.scale is not None, "bytes say nothing without their scale"
        return self.scale.normalize(self.cells, self.blank_cells).to(dtype)


@dataclass(frozen=True)
class RowMix:
    """F features that are weighted sums of rows that an encoder sends."""

    rows: Tensor  # (F, n) int64
    weights: Tensor  # (F, n) fp32


@dataclass(frozen=True)
class TextInput:
    """One microbatch of the LLM: S sequences with T tokens in total, packed one after another.

    With `context` it is a rank's share of one: its sequences are whole ones and pieces of others.
    """

    lengths: tuple[int, ...]  # (S,) LLM tokens of each sequence
    ids: Tensor | None = None  # (T,) int64; stages with the embedding
    labels: Tensor | None = None  # (T,) int64, the token to predict at each position, -100 for none; stages with head
    # Encoder unit -> (F,) positions in [0, T) that its features take.
    feature_positions: dict[str, Tensor] = field(default_factory=dict)
    # (3, T) int64 rotary positions in time, row and column, for models that have them; None: places in the sequence.
    position_ids: Tensor | None = None
    # Encoder unit -> what its features are made of; without an entry they are the rows that it sends, in order.
    feature_mixes: dict[str, RowMix] = field(default_factory=dict)
    kv_cache: KVCache | None = None  # the sequences' earlier tokens, while the model generates
    image_spans: Spans = ()  # of tokens of one image each, for models in which these see each other
    # (N,) int64 places of the labels that are not -100, so that the host need not ask the device; None: found there.
    target_positions: Tensor | None = None
    # (N,) int64 the source of each of these labels, so that losses are summed by source; None: all are summed.
    target_sources: Tensor | None = None
    num_sources: int = 1
    tables: Mapping[str, Tensor] | None = None  # `StageModule.host_tables`; None: computed in the forward, and copied
    context: ContextShare | None = None  # where ranks share the sequences of the microbatch
    # (Q,) int64 positions in [0, T) of the queries of images to draw; None for models without a generator.
    query_positions: Tensor | None = None


UnitInput: TypeAlias = EncoderInput | TextInput | GeneratorInput
