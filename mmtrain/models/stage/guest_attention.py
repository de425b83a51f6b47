"""Attention of guests: that of packed samples, with what single models add to it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mmtrain.models.attention import AttentionBackend, AttentionOptions, SequenceLayout, attend


@dataclass(frozen=True)
class SampleAttention:
    """Attends inside the samples of one microbatch; see `mmtrain.guests.packed_attention.Attend`."""

    layout: SequenceLayout
    backend: AttentionBackend

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int,
        scale: float | None,
        score_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend: q (T, heads, d), k and v (T, kv_heads, d) -> (T, heads, d)."""
        is_plain = score_cap is None and sinks is None and q.shape[-1] == v.shape[-1]
        if is_plain:
            return attend(q, k, v, self.layout, AttentionOptions(self.backend, True, window, scale))
        outputs, start = [], 0
        for length in self.layout.filled_lengths:
            rows = slice(start, start + length)
            outputs.append(_attend_by_scores(q[rows], k[rows], v[rows], window, scale, score_cap, sinks))
            start += length
        return torch.cat(outputs)


def _attend_by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    scale: float | None,
    score_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend in one sample by its scores in fp32, with a cap on them, or a sink among the keys."""
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if score_cap is not None:
        scores = score_cap * torch.tanh(scores / score_cap)
    allowed = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
    if window:
        allowed = allowed.triu(1 - window)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(q), 1)), dim=2)
    weights = scores.softmax(dim=-1)[:, :, : len(q)]
    return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)
