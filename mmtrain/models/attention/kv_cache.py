"""The KV cache: keys and values that attention keeps while a model generates, so that each token is computed once.

Mixers without attention keep states of fixed size here.

The sequences of a microbatch are padded to a common capacity here, because each of them grows by one token at a time.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.models.attention import AttentionOptions, SequenceLayout, attend


@dataclass(eq=False)
class KVCache:
    """Keys and values of one microbatch of S sequences, for all decoder blocks of one rank.

    Each block has keys and values of its own, found by the block object itself; the cached lengths are the same for
    all blocks. Call `advance` after every pass through the blocks.
    """

    capacity: int  # tokens that the longest sequence may reach
    cached_lengths: tuple[int, ...]  # (S,) cached tokens of each sequence
    states: dict[object, tuple[Tensor, ...]] = field(default_factory=dict)  # by mixer; each (S, ...)
    _by_block: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)  # each (S, capacity, kv_heads, d)
    _new_tokens: "_NewTokens | None" = None  # of the current pass, the same for all blocks

    def attend(
        self, block: object, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, options: AttentionOptions
    ) -> Tensor:
        """Cache the new tokens and let them attend to themselves and to earlier tokens of their sequence.

        q (T, heads, d), k and v (T, kv_heads, d) -> (T, heads, d). `layout` holds the number of new tokens of each of
        the S sequences: the whole prompt in the first pass, one token in every later pass, which is text. Further
        sequences of it are padding, whose result is zero.
        """
        num_sequences = len(self.cached_lengths)
        num_padding = sum(layout.lengths[num_sequences:])
        num_tokens = len(q) - num_padding
        q, k, v = (x[:num_tokens] for x in (q, k, v))
        if self._new_tokens is None:
            unpadded = SequenceLayout(layout.lengths[:num_sequences], layout.spans)
            self._new_tokens = _NewTokens.of(self.cached_lengths, unpadded, q.device)
        keys, values = self._store(block, k, v)
        if any(self.cached_lengths):
            out = self._attend_to_cache(q, keys, values, options)
        else:
            out = attend(q, k, v, self._new_tokens.layout, options)
        return F.pad(out, (0, 0, 0, 0, 0, num_padding))

    def advance(self, lengths: tuple[int, ...]) -> None:
        """Count the tokens of the pass that all blocks have finished."""
        self.cached_lengths = tuple(cached + new for cached, new in zip(self.cached_lengths, lengths, strict=True))
        self._new_tokens = None

    def select_sequences(self, indices: list[int]) -> None:
        """Keep only the sequences at `indices`, in this order, and drop the others."""
        if len(indices) == len(self.cached_lengths):
            return
        self.cached_lengths = tuple(self.cached_lengths[i] for i in indices)
        for block, (keys, values) in self._by_block.items():
            index = torch.tensor(indices, dtype=torch.int64, device=keys.device)
            self._by_block[block] = keys.index_select(0, index), values.index_select(0, index)
        for mixer, tensors in self.states.items():
            index = torch.tensor(indices, dtype=torch.int64, device=tensors[0].device)
            self.states[mixer] = tuple(tensor.index_select(0, index) for tensor in tensors)

    def _store(self, block: object, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values of a block; return all of that block."""
        assert self._new_tokens is not None
        if block not in self._by_block:
            size = (len(self.cached_lengths), self.capacity, *k.shape[1:])
            self._by_block[block] = (k.new_zeros(size), v.new_zeros(size))
        keys, values = self._by_block[block]
        keys[self._new_tokens.sequence, self._new_tokens.position] = k
        values[self._new_tokens.sequence, self._new_tokens.position] = v
        return keys, values

    def _attend_to_cache(self, q: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        """Let one new token of each sequence, (S, heads, d), attend to its sequence; mask unused capacity.

        The heads that share keys become queries of one head, which all see the same tokens: the kernels of GPUs that
        take a mask do not take fewer heads of keys than of queries.
        """
        assert len(q) == len(self.cached_lengths), "after the first pass a sequence grows by one token at a time"
        assert self._new_tokens is not None
        is_visible = self._new_tokens.is_visible(options.window)
        num_positions = is_visible.shape[-1]
        k = keys[:, :num_positions].transpose(1, 2)
        v = values[:, :num_positions].transpose(1, 2)
        queries = q.view(len(q), k.shape[1], -1, q.shape[2])
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=is_visible, scale=options.scale)
        return out.flatten(1, 2)


@dataclass(frozen=True)
class _NewTokens:
    """Where the new tokens of a pass belong. Built once for all blocks: each copy to the device may have to wait."""

    layout: SequenceLayout  # the new tokens of each sequence
    sequence: Tensor  # (T,) index of the token's sequence
    position: Tensor  # (T,) position of the token in its sequence
    ends: Tensor  # (S, 1) number of tokens of each sequence after the pass
    num_positions: int  # of the longest sequence
    _masks: dict[int, Tensor] = field(default_factory=dict)  # by window

    def is_visible(self, window: int) -> Tensor:
        """Return (S, 1, 1, longest): whether a position holds one of the last `window` tokens; 0: any token."""
        if window not in self._masks:
            positions = torch.arange(self.num_positions, device=self.ends.device)
            visible = positions < self.ends
            if window:
                visible &= positions >= self.ends - window
            self._masks[window] = visible[:, None, None]
        return self._masks[window]

    @classmethod
    def of(cls, cached_lengths: tuple[int, ...], layout: SequenceLayout, device: torch.device) -> "_NewTokens":
        sequence: list[int] = []
        position: list[int] = []
        for i, (cached, new) in enumerate(zip(cached_lengths, layout.lengths, strict=True)):
            sequence += [i] * new
            position += range(cached, cached + new)
        ends = [cached + new for cached, new in zip(cached_lengths, layout.lengths, strict=True)]
        sequences, positions, stops = (
            torch.tensor(column, dtype=torch.int64).to(device) for column in (sequence, position, ends)
        )
        return cls(layout, sequences, positions, stops[:, None], max(position, default=-1) + 1)
