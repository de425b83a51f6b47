"""When the loss over the vocabulary is computed for some tokens at a time, so that all logits never exist together.

The choice depends on sizes only, so that plans know it: `costs` predict what `kernels.vocab_loss` then does.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache

FP32_BYTES = 4
# Tokens whose logits exist at once. With fewer, adding up the gradient of the matrix costs more than a tenth of its
# GEMM on a CPU (`scripts/bench_loss.py`); its traffic is the same for each chunk.
CHUNK_TOKENS = 1024
# Of the memory of all logits. By chunks the loss takes up to 3% longer (`scripts/bench_loss.py`); where it saves less
# than this, computing a layer again in backward frees as many bytes in less time (docs/decisions/models.md).
MIN_SAVED_SHARE = 0.25
MAX_TOKENS = 1 << 24  # of a microbatch, when the number is searched from which on chunks are used
CHUNK_LOGITS = 1 << 24  # that are held in fp32 at once where activations are not in fp32: 64 MiB


@dataclass(frozen=True)
class LossSizes:
    """The sizes of one loss over the vocabulary on one rank."""

    tokens: int  # that have a target
    ids: int  # of the vocabulary on this rank, padding included
    hidden: int
    element_bytes: int  # of hidden states, weights and logits
    trains_matrix: bool

    @property
    def logits_bytes(self) -> int:
        """The bytes of all logits."""
        return self.tokens * self.ids * self.element_bytes

    @property
    def kept_bytes(self) -> int:
        """The bytes that a loss by chunks keeps for backward: gradients of hidden states, and of the matrix in fp32."""
        matrix_bytes = FP32_BYTES * self.ids * self.hidden if self.trains_matrix else 0
        return self.tokens * self.hidden * self.element_bytes + matrix_bytes

    @property
    def chunk_bytes(self) -> int:
        """The bytes of the logits of one chunk, and of the softmax of some of them."""
        return min(self.tokens, CHUNK_TOKENS) * self.ids * self.element_bytes + self.softmax_bytes

    @property
    def softmax_bytes(self) -> int:
        """The bytes of logits that are copied to fp32, where the softmax is computed, at once."""
        if self.element_bytes == FP32_BYTES:
            return 0
        return FP32_BYTES * min(self.tokens * self.ids, max(CHUNK_LOGITS, self.ids))

    @property
    def at_once_bytes(self) -> int:
        """The bytes of a loss without chunks at its peak: in backward, the gradient of the matrix beside the logits."""
        matrix_bytes = self.element_bytes * self.ids * self.hidden if self.trains_matrix else 0
        return self.logits_bytes + matrix_bytes

    @property
    def uses_chunks(self) -> bool:
        """Whether the loss is computed by chunks: where its peak is lower than with all logits by enough."""
        by_chunks = self.kept_bytes + self.chunk_bytes
        return self.tokens > CHUNK_TOKENS and by_chunks <= (1 - MIN_SAVED_SHARE) * self.at_once_bytes

    @property
    def most_tokens_at_once(self) -> int | None:
        """The most tokens whose loss is computed with all logits, whatever `tokens` is; None if any number is."""
        return _most_tokens_at_once(replace(self, tokens=0))


@lru_cache
def _most_tokens_at_once(sizes: LossSizes) -> int | None:
    """Search the number of tokens: logits grow faster with it than what chunks keep, or chunks are never used."""
    first_by_chunks = bisect_left(range(MAX_TOKENS), True, key=lambda tokens: replace(sizes, tokens=tokens).uses_chunks)
    return None if first_by_chunks == MAX_TOKENS else first_by_chunks - 1
