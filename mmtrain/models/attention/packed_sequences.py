"""How the tokens of one microbatch are packed: what every block of a stage needs to know about them."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mmtrain.models.attention import SequenceLayout
from mmtrain.models.attention.context_parallel import SharedMixing
from mmtrain.models.attention.kv_cache import KVCache
from mmtrain.models.kernels.rotary_positions import RotaryTables


@dataclass(frozen=True, eq=False)
class TokenSamples:
    """The samples of the tokens of a microbatch, for losses over samples."""

    numbers: Tensor  # (T,) int64 of each token's sample; `count` for padding
    count: int  # samples
    token_weight: float  # of a token in means over the global batch
    group: dist.ProcessGroup | None  # of ranks that have other tokens of the same samples

    @cached_property
    def is_real(self) -> Tensor:
        """Return which tokens are no padding, (T,)."""
        return self.numbers < self.count


@dataclass(frozen=True)
class PackedSequences:
    """Sequences that lie one after another without padding.

    Blocks pass it to Megatron-core as `packed_seq_params`.
    """

    layout: SequenceLayout
    rope: RotaryTables | None = None  # rotary positions; None for models without them
    kv_cache: KVCache | None = None  # earlier tokens of the same sequences, while the model generates
    context: SharedMixing | None = None  # of tokens whose sequences lie on several ranks
    window: int = 0  # tokens that a token of a causal block attends to, itself and earlier ones; 0: all
    num_padding_rows: int = 0  # at the end
    token_weight: float = 0.0  # of a token in means over the global batch
    query_factors: Tensor | None = None  # (T, 1, 1), by which rotated queries are multiplied; None: by nothing
    layer_input: Tensor | None = None  # (T, width) of one block alone
    shared_kv: Tensor | None = None  # keys and values of an earlier block side by side, those of this rank's heads
    token_keys: Tensor | None = None  # (T,) int64, by which adapters drop inputs; None: they drop none
    qkv_format: ClassVar[str] = "thd"  # Megatron-core's name for packed tokens; it reads this attribute

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the tokens of each sequence."""
        return self.layout.lengths

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sequences together."""
        return self.layout.num_tokens

    def padded(self, num_rows: int) -> "PackedSequences":
        """Append a sequence of `num_rows` padding tokens, which the other sequences do not attend to."""
        if not num_rows:
            return self
        # Zeros instead of cosines and sines: padding attends to itself evenly, and its output is never read.
        rope = self.rope
        if rope is not None:
            cos, sin = rope
            rope = F.pad(cos, (0, 0, 0, 0, 0, num_rows)), F.pad(sin, (0, 0, 0, 0, 0, num_rows))
        factors = self.query_factors
        if factors is not None:
            factors = F.pad(factors, (0, 0, 0, 0, 0, num_rows))
        keys = None if self.token_keys is None else F.pad(self.token_keys, (0, num_rows))
        layout, num_padding_rows = self.layout.padded(num_rows), self.num_padding_rows + num_rows
        padded = replace(self, layout=layout, rope=rope, num_padding_rows=num_padding_rows, query_factors=factors)
        return replace(padded, token_keys=keys)

    def samples(self, device: torch.device) -> TokenSamples:
        """Return which sample each token belongs to, on a device."""
        samples, count = self._samples
        numbers = torch.tensor(samples, dtype=torch.int64)
        of_tokens = numbers.repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64))
        group = None if self.context is None else self.context.group
        return TokenSamples(of_tokens.to(device), count, self.token_weight, group)

    @property
    def _samples(self) -> tuple[tuple[int, ...], int]:
        """The number of each sequence's sample, padding behind all others, and how many samples there are."""
        is_padded = self.num_padding_rows > 0
        if self.context is None:
            return tuple(range(len(self.lengths))), len(self.lengths) - is_padded
        share = self.context.share
        return share.sequences + (share.num_sequences,) * is_padded, share.num_sequences
