"""Keys and values that attention keeps while a model writes an answer, so that each token is computed once.

The sequences of a microbatch lie padded to the longest, because each of them grows by a token at a time.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.models.attention import AttentionBackend, attend


@dataclass(eq=False)
class KVCache:
    """What the decoder blocks of one rank remember of one microbatch of S sequences.

    Each block keeps its own keys and values, found again by the block itself; how far the sequences have come is the
    same for all. After a pass through the blocks, `advance` by what it added.
    """

    capacity: int  # tokens that the longest sequence may reach
    cached_lengths: tuple[int, ...]  # (S,) tokens of each sequence that are remembered
    _of_block: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)  # each (S, room, kv_heads, d)
    _pass: "_Places | None" = None  # of the pass under way, the same for all blocks

    def attend(
        self, block: object, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], backend: AttentionBackend
    ) -> Tensor:
        """Let new tokens see themselves and all before them: q (T, heads, d), k and v (T, kv_heads, d) -> as q.

        `lengths` are new tokens of each of the S sequences: all of them at first, one each from then on. What follows
        them in `lengths` is padding, and its result is zero.
        """
        num_new, (lengths, padding) = len(q), (lengths[: len(self.cached_lengths)], lengths[len(self.cached_lengths) :])
        num_tokens = num_new - sum(padding)
        q, k, v = (x[:num_tokens] for x in (q, k, v))
        if self._pass is None:
            self._pass = _Places.of(self.cached_lengths, lengths, q.device)
        kept = self._remember(block, k, v)
        out = attend(q, k, v, lengths, True, backend) if not any(self.cached_lengths) else self._attend_one(q, *kept)
        return F.pad(out, (0, 0, 0, 0, 0, num_new - num_tokens))

    def advance(self, lengths: tuple[int, ...]) -> None:
        """Count the tokens that all blocks have seen now."""
        self.cached_lengths = tuple(before + new for before, new in zip(self.cached_lengths, lengths, strict=True))
        self._pass = None

    def select_sequences(self, places: list[int]) -> None:
        """Forget all sequences but those at `places`, which move together."""
        if len(places) == len(self.cached_lengths):
            return
        self.cached_lengths = tuple(self.cached_lengths[i] for i in places)
        for block, pair in self._of_block.items():
            index = torch.tensor(places, dtype=torch.int64, device=pair[0].device)
            self._of_block[block] = (pair[0].index_select(0, index), pair[1].index_select(0, index))

    def _remember(self, block: object, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert self._pass is not None
        if block not in self._of_block:
            size = (len(self.cached_lengths), self.capacity, *k.shape[1:])
            self._of_block[block] = (k.new_zeros(size), v.new_zeros(size))
        keys, values = self._of_block[block]
        keys[self._pass.sequence, self._pass.place] = k
        values[self._pass.sequence, self._pass.place] = v
        return keys, values

    def _attend_one(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One new token of each sequence, (S, heads, d), sees all that its sequence has; the rest is masked."""
        assert len(q) == len(self.cached_lengths), "after its first tokens a sequence grows by one at a time"
        assert self._pass is not None
        seen = self._pass.seen
        k, v = (kept[:, : seen.shape[-1]].transpose(1, 2) for kept in (keys, values))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen, enable_gqa=grouped)[:, :, 0]


@dataclass(frozen=True)
class _Places:
    """Where the new tokens of a pass go: made once for all blocks, since each would wait for the device."""

    sequence: Tensor  # (T,)
    place: Tensor  # (T,) in its sequence
    seen: Tensor  # (S, 1, 1, longest) whether a place is filled after the pass

    @classmethod
    def of(cls, held: tuple[int, ...], lengths: tuple[int, ...], device: torch.device) -> "_Places":
        sequence = [s for s, new in enumerate(lengths) for _ in range(new)]
        place = [at + i for at, new in zip(held, lengths, strict=True) for i in range(new)]
        filled = [at + new for at, new in zip(held, lengths, strict=True)]
        tensors = (torch.tensor(column, dtype=torch.int64).to(device) for column in (sequence, place, filled))
        sequences, places, ends = tensors
        seen = torch.arange(max(place, default=-1) + 1, device=device) < ends[:, None]
        return cls(sequences, places, seen[:, None, None])
