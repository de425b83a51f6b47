"""How the tokens of one microbatch are packed: what every block of a stage needs to know about them."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F

from mmtrain.models.attention import SequenceLayout
from mmtrain.models.attention.context_parallel import SharedAttention
from mmtrain.models.attention.kv_cache import KVCache
from mmtrain.models.kernels.rotary_positions import RotaryTables


@dataclass(frozen=True)
class PackedSequences:
    """Sequences that lie one after another without padding.

    Blocks pass it to Megatron-core as `packed_seq_params`.
    """

    layout: SequenceLayout
    rope: RotaryTables | None = None  # rotary positions; None for models without them
    kv_cache: KVCache | None = None  # earlier tokens of the same sequences, while the model generates
    context: SharedAttention | None = None  # of tokens whose sequences lie on several ranks
    window: int = 0  # tokens that a token of a causal block attends to, itself and earlier ones; 0: all
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
        return replace(self, layout=self.layout.padded(num_rows), rope=rope)
