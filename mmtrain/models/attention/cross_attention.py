"""Attention of packed tokens to a context of their sequence: every sequence has equally many context tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.models.attention.fused import FUSED_KERNELS, attend_by_fused_kernel
from mmtrain.models.attention.options import AttentionOptions
from mmtrain.models.attention.sequence_layout import SequenceLayout


def attend_to_context(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, contexts: SequenceLayout, options: AttentionOptions
) -> Tensor:
    """Attend from the tokens of each sequence to all context tokens of this sequence.

    q (T, heads, d); k and v (sequences * context tokens, heads, d), which lie as `contexts` says -> (T, heads, d). A
    kernel that knows packed sequences is called once; torch's dense one, once for each distinct length.
    """
    assert layout.num_tokens == q.shape[0], f"lengths sum to {layout.num_tokens}, but there are {q.shape[0]} tokens"
    assert contexts.num_tokens == k.shape[0], f"contexts have {contexts.num_tokens} tokens, and there are {k.shape[0]}"
    assert not options.causal, "tokens and context have no order between them"
    if q.shape[0] == 0:
        return q + (k.sum() + v.sum()) * 0  # an empty result that still gives k and v a gradient
    assert len(layout.filled_lengths) == len(layout.lengths), "an image without tokens has no context"
    if options.backend in FUSED_KERNELS:
        return attend_by_fused_kernel(q, k, v, layout, options, contexts)
    return _attend_by_sdpa(q, k, v, layout)


def _attend_by_sdpa(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> Tensor:
    k, v = (x.view(len(layout.lengths), -1, *x.shape[1:]) for x in (k, v))
    sorted_tokens = layout.length_buckets(q.device)
    if sorted_tokens.order is not None:
        q = q.index_select(0, sorted_tokens.order)
        sequence_order = layout.sequence_order(q.device)
        k, v = (x.index_select(0, sequence_order) for x in (k, v))
    qs = torch.split(q, [length * count for length, count in sorted_tokens.buckets])
    ks, vs = (torch.split(x, [count for _, count in sorted_tokens.buckets]) for x in (k, v))
    outputs = [
        _attend_in_bucket(bucket_q.view(len(bucket_k), -1, *q.shape[1:]), bucket_k, bucket_v)
        for bucket_q, bucket_k, bucket_v in zip(qs, ks, vs, strict=True)
    ]
    out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return out if sorted_tokens.inverse is None else out.index_select(0, sorted_tokens.inverse)


def _attend_in_bucket(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend inside sequences of equal length: (S, n, heads, d) and (S, context, heads, d) -> (S * n, heads, d)."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2).flatten(0, 1)
