"""The input of a stage besides the hidden states: one microbatch of one unit.

Every rank of the unit knows the lengths; it has the payload (cells, ids, labels) only where its stage needs it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Self, TypeAlias

import torch
from torch import Tensor

from mmtrain.models.attention import Spans
from mmtrain.models.attention.context_parallel import ContextShare
from mmtrain.models.attention.index_tables import HostTables
from mmtrain.models.attention.kv_cache import KVCache
from mmtrain.models.kernels.keyed_dropout import token_keys
from mmtrain.models.stage.generator_input import GeneratorInput

_MAX_BYTE = 255.0
_NUM_CHANNELS = 3


@dataclass(frozen=True)
class PixelScale:
    """What turns the bytes of patches into the numbers that an encoder was trained on."""

    mean: Tensor  # (F,) fp32, of each feature of a patch
    std: Tensor  # (F,) fp32

    @classmethod
    def of(cls, mean: tuple[float, ...], std: tuple[float, ...], num_features: int, device: torch.device) -> Self:
        """Scale patches whose features are ordered by channel first, as `data.image.mean` and `std` say."""
        per_channel = num_features // _NUM_CHANNELS
        return cls(_of_features(mean, per_channel, device), _of_features(std, per_channel, device))

    def normalize(self, patches: Tensor, blank_cells: tuple[tuple[int, int], ...] = ()) -> Tensor:
        """Return (byte / 255 - mean) / std in fp32: (N, F) uint8 -> (N, F).

        blank_cells: [start, stop) of patches that become zeros.
        """
        normalized = patches.float().div_(_MAX_BYTE).sub_(self.mean).div_(self.std)
        for start, stop in blank_cells:
            normalized[start:stop].zero_()
        return normalized


@lru_cache(maxsize=64)
def _of_features(values: tuple[float, ...], per_channel: int, device: torch.device) -> Tensor:
    """Repeat the value of each channel; once for a run, since the copy to the device may have to wait."""
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(per_channel).to(device)


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
    item_keys: tuple[int, ...] | None = None  # (I,) by which adapters drop inputs; None: they drop none

    def token_keys(self, lengths: Sequence[int]) -> HostTables:
        """Return a table with the key of each token of items of these lengths, or none: see `keyed_dropout`."""
        return {} if self.item_keys is None else {"token_keys": token_keys(self.item_keys, lengths)}

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
    token_weight: float = 0.0  # of a token in means over the global batch, which routers' losses are
    token_keys: Tensor | None = None  # (T,) int64, by which adapters drop inputs; None: they drop none


UnitInput: TypeAlias = EncoderInput | TextInput | GeneratorInput
