"""Attention written down as its definition: the oracle for the other backends."""

import torch
from torch import Tensor

from mmtrain.models.attention.options import AttentionOptions
from mmtrain.models.attention.sequence_layout import SequenceLayout


def attend_by_definition(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, options: AttentionOptions) -> Tensor:
    """Compute softmax over the masked scores of all tokens with all tokens."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    sequence = torch.arange(len(layout.lengths), device=q.device).repeat_interleave(
        torch.tensor(layout.lengths, device=q.device), output_size=q.shape[0]
    )
    allowed = sequence[:, None] == sequence[None, :]
    if options.causal:
        allowed = allowed.tril()
    for start, stop in layout.spans:
        allowed[start:stop, start:stop] = True
    if options.window:
        allowed = allowed.triu(1 - options.window)
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * scale
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)
