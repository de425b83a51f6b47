"""Run a stage that ends with the LLM's head to generate text: logits, and the most likely next tokens."""

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from mmtrain.models.kernels.vocab_loss import LogitRules
from mmtrain.models.stage.llm_layers import Head, TextContext
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageModule


def next_tokens(
    stage: StageModule,
    hidden: Tensor | None,
    inputs: TextInput,
    features: Mapping[str, Tensor] | None,
    vocab_size: int,
    rules: LogitRules | None = None,
) -> Tensor:
    """Run a stage that ends with the head; return the most likely token after each sequence, (S,) int64.

    Only tokens below `vocab_size` are candidates; the rows above it pad the vocabulary. `rules` change logits.
    """
    context = stage.context(inputs, features or {})
    assert isinstance(context, TextContext)
    num_tokens, sequence_parallel = context.num_tokens, stage.factory.sequence_parallel

    def read(head: Head, rows: Tensor) -> Tensor:
        # Project the last token of each sequence only: the vocabulary's GEMM is the widest of the model.
        last_tokens = torch.tensor([*itertools.accumulate(inputs.lengths)], dtype=torch.int64, device=rows.device) - 1
        all_rows = stage.redistribute(rows, sequence_parallel, shard=False, num_tokens=num_tokens)
        last_rows = all_rows.index_select(0, last_tokens)
        last_rows = stage.redistribute(last_rows, False, shard=sequence_parallel, num_tokens=len(last_rows))
        return head.greedy_tokens(last_rows, vocab_size, rules)[: len(last_tokens)]

    return stage.run_to_head(context, hidden, stage.indices, read)
