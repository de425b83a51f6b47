"""Keys and values that attention keeps while a model writes an answer, so that each token is computed once.

The sequences of a microbatch lie padded to the longest, because each of them grows by a token at a time.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.models.attention import Backend, attend


@dataclass(eq=False)
class KeyValues:
    """What the decoder blocks of one rank remember of one microbatch of S sequences.

    Each block keeps its own keys and values, found again by the block itself; how far the sequences have come is the
    same for all. After a pass through the blocks, `advance` by what it added.
    """

    room: int  # tokens that the longest sequence may reach
    held: tuple[int, ...]  # (S,) tokens of each sequence that are remembered
    _of_block: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)  # each (S, room, kv_heads, d)

    def attend(
        self, block: object, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], backend: Backend
    ) -> Tensor:
        """Let new tokens see themselves and all before them: q (T, heads, d), k and v (T, kv_heads, d) -> as q.

        `lengths` are new tokens of each of the S sequences: all of them at first, one each from then on. What follows
        them in `lengths` is padding, and its result is zero.
        """
        num_new, (lengths, padding) = len(q), (lengths[: len(self.held)], lengths[len(self.held) :])
        num_tokens = num_new - sum(padding)
        q, k, v = (x[:num_tokens] for x in (q, k, v))
        self._remember(block, k, v, lengths)
        out = attend(q, k, v, lengths, True, backend) if not any(self.held) else self._attend_one(block, q)
        return F.pad(out, (0, 0, 0, 0, 0, num_new - num_tokens))

    def advance(self, lengths: tuple[int, ...]) -> None:
        """Count the tokens that all blocks have seen now."""
        self.held = tuple(before + new for before, new in zip(self.held, lengths, strict=True))

    def keep(self, places: list[int]) -> None:
        """Forget all sequences but those at `places`, which move together."""
        if len(places) == len(self.held):
            return
        self.held = tuple(self.held[i] for i in places)
        for block, pair in self._of_block.items():
            index = torch.tensor(places, dtype=torch.int64, device=pair[0].device)
            self._of_block[block] = (pair[0].index_select(0, index), pair[1].index_select(0, index))

    def _remember(self, block: object, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> None:
        if block not in self._of_block:
            size = (len(lengths), self.room, *k.shape[1:])
            self._of_block[block] = (k.new_zeros(size), v.new_zeros(size))
        sequence = [s for s, new in enumerate(lengths) for _ in range(new)]
        place = [at + i for at, new in zip(self.held, lengths, strict=True) for i in range(new)]
        where = tuple(torch.tensor(index, device=k.device) for index in (sequence, place))
        for kept, new_rows in zip(self._of_block[block], (k, v), strict=True):
            kept[where] = new_rows

    def _attend_one(self, block: object, q: Tensor) -> Tensor:
        """One new token of each sequence, (S, heads, d), sees all that its sequence has; the rest is masked."""
        assert len(q) == len(self.held), "after its first tokens a sequence grows by one at a time"
        longest = max(self.held) + 1
        k, v = (kept[:, :longest].transpose(1, 2) for kept in self._of_block[block])
        ends = torch.tensor(self.held, device=q.device)
        seen = (torch.arange(longest, device=q.device)[None, :] <= ends[:, None])[:, None, None]
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen, enable_gqa=grouped)[:, :, 0]
