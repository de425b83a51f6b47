"""The LLM unit's layers: embedding and head. Blocks come from the adapter."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmtrain.models.attention import PackedSequences, rotary_tables
from mmtrain.models.model_shape import LayerShape
from mmtrain.models.stage_inputs import TextInput

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory


@dataclass(frozen=True)
class TextContext:
    """One microbatch of packed sequences as every layer of an LLM stage sees it."""

    inputs: TextInput
    features: Mapping[str, Tensor]  # encoder unit -> (F, hidden)
    head_dim: int
    rope_base: float
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def packing(self) -> PackedSequences:
        """Sequences with rotary positions that start at 0 in each, or where its remembered tokens end."""
        lengths, memory = self.inputs.lengths, self.inputs.kv_cache
        starts = None if memory is None else memory.cached_lengths
        rope = rotary_tables(lengths, self.head_dim, self.rope_base, self.dtype, self.device, starts)
        return PackedSequences(lengths, rope, memory)


class Embedding(nn.Module):
    """Token embeddings, with the rows of encoder features put in their places."""

    def __init__(self, shape: LayerShape, parts: "LayerFactory") -> None:
        super().__init__()
        self.table = parts.vocab_embedding(shape.vocab, shape.out)

    def forward(self, hidden: None, context: TextContext) -> Tensor:
        """Embed ids (T,) to (T, hidden) and overwrite rows `feature_places[unit]` by `features[unit]`."""
        assert context.inputs.ids is not None, "the stage with the embedding needs ids"
        tokens: Tensor = self.table(context.inputs.ids)
        for unit, features in context.features.items():
            tokens = tokens.index_copy(0, context.inputs.feature_positions[unit], features.to(tokens.dtype))
        return tokens


class Head(nn.Module):
    """Last norm, projection to the vocabulary, and the loss."""

    def __init__(self, shape: LayerShape, parts: "LayerFactory", tied: Embedding | None) -> None:
        super().__init__()
        self.parts = parts
        self.norm = parts.norm(shape.hidden, sliced=True)
        self.output = parts.vocab_linear(shape.hidden, shape.vocab, own_weight=tied is None)
        # In a tuple so that torch does not list the shared weight under this module too.
        self._tied = (tied,)

    def forward(self, hidden: Tensor, context: TextContext) -> Tensor:
        """Sum the losses of the tokens (T, hidden) whose label is not -100: a scalar in fp32.

        Under sequence parallelism `hidden` is this rank's slice of them; each rank returns the whole sum.
        """
        labels = context.inputs.labels
        assert labels is not None, "the stage with the head needs labels"
        logits = self._project(hidden)
        labels = F.pad(labels, (0, len(logits) - len(labels)), value=-100)
        losses = self.parts.token_losses(logits, labels)
        return (losses * (labels != -100)).sum()

    def logits(self, hidden: Tensor) -> Tensor:
        """Map (T, hidden), or this rank's slice of it, to logits (T, padded vocabulary)."""
        return self.parts.gather_vocab(self._project(hidden))

    def greedy_tokens(self, hidden: Tensor, limit: int) -> Tensor:
        """Likeliest token below `limit` after each of (T, hidden), or of this rank's slice of them: (T,) int64."""
        return self.parts.greedy_tokens(self._project(hidden), limit)

    def _project(self, hidden: Tensor) -> Tensor:
        (tied,) = self._tied
        weight = None if tied is None else tied.table.weight
        logits: Tensor = self.output(self.norm(hidden), weight=weight)[0]
        return logits
