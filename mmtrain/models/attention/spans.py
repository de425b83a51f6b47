"""Spans of tokens that see each other in both directions under a causal mask, which no packed kernel knows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.models.attention.options import AttentionOptions
from mmtrain.models.attention.sequence_layout import SequenceLayout


def replace_span_rows(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, options: AttentionOptions
) -> Tensor:
    """Compute the rows of `out` that belong to spans again, with the later tokens of their span among their keys.

    The keys of a span are consecutive: from the window of its first token, or from the start of its sequence, to its
    own end. So no kernel needs a mask of (T, T): one call for each span reads its keys where they lie.
    """
    rows = layout.span_rows(q.device)
    queries_of_spans = torch.split(q.index_select(0, rows), [stop - start for start, stop in layout.spans])
    outputs = []
    for span_q, keys in zip(queries_of_spans, layout.span_keys(options.window, q.device), strict=True):
        span_k, span_v = k[keys.first : keys.stop], v[keys.first : keys.stop]
        span_q, span_k, span_v = (x.transpose(0, 1)[None] for x in (span_q, span_k, span_v))
        span_out = F.scaled_dot_product_attention(
            span_q, span_k, span_v, attn_mask=keys.mask, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(span_out[0].transpose(0, 1))
    return out.index_put((rows,), torch.cat(outputs))  # `index_copy` would keep the new rows for backward
