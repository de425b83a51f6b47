"""`torch.nn.functional.scaled_dot_product_attention` over packed sequences: runs on any device, in any precision."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.models.attention.options import AttentionOptions
from mmtrain.models.attention.sequence_layout import SequenceLayout


def attend_by_sdpa(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, options: AttentionOptions) -> Tensor:
    """Call torch's dense kernel once for each distinct length, without padding or masks.

    One masked call over sequences padded to equal length measured slower on a CPU, forward and backward together.
    """
    sorted_sequences = layout.length_buckets(q.device)
    if sorted_sequences.order is not None:
        q, k, v = (x.index_select(0, sorted_sequences.order) for x in (q, k, v))
    elif q.untyped_storage().data_ptr() != v.untyped_storage().data_ptr():
        v = v.contiguous()  # values alone would keep the unrotated queries and keys that lie beside them
    bucket_tokens = [length * count for length, count in sorted_sequences.buckets]
    qs, ks, vs = (torch.split(x, bucket_tokens) for x in (q, k, v))
    outputs = [
        _sdpa_bucket(bucket_q, bucket_k, bucket_v, num_sequences, options)
        for (_, num_sequences), bucket_q, bucket_k, bucket_v in zip(sorted_sequences.buckets, qs, ks, vs, strict=True)
    ]
    out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return out if sorted_sequences.inverse is None else out.index_select(0, sorted_sequences.inverse)


def _sdpa_bucket(q: Tensor, k: Tensor, v: Tensor, num_sequences: int, options: AttentionOptions) -> Tensor:
    """Attend inside `num_sequences` packed sequences of equal length."""
    q, k, v = (x.view(num_sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    if 0 < options.window < q.shape[2]:
        out = _sdpa_in_windows(q, k, v, options)
    else:
        is_grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=options.causal, scale=options.scale, enable_gqa=is_grouped
        )
    return out.transpose(1, 2).flatten(0, 1)


def _sdpa_in_windows(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Attend inside sliding windows: q (S, heads, n, d), k and v (S, kv_heads, n, d), n > window -> (S, heads, n, d).

    The first `window` queries see all tokens before them. The others are cut into blocks of `window`; a block needs
    only its own keys and those of the block before, so work grows with n * window and not with n^2.
    """
    window, scale = options.window, options.scale
    is_grouped = q.shape[1] != k.shape[1]
    first_q, first_k, first_v = (x[:, :, :window] for x in (q, k, v))
    first = F.scaled_dot_product_attention(
        first_q, first_k, first_v, is_causal=True, scale=scale, enable_gqa=is_grouped
    )
    num_later = q.shape[2] - window
    num_blocks = -(-num_later // window)
    padding = (0, 0, 0, num_blocks * window - num_later)  # behind the last token, which nobody sees
    queries = F.pad(q[:, :, window:], padding).unfold(2, window, window).permute(0, 2, 1, 4, 3).flatten(0, 1)
    keys, values = (
        F.pad(x, padding).unfold(2, 2 * window, window).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (k, v)
    )
    in_window = torch.ones(window, 2 * window, dtype=torch.bool, device=q.device).tril(window).triu(1)
    later = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=in_window, scale=scale, enable_gqa=is_grouped
    )
    later = later.view(len(q), num_blocks, *later.shape[1:]).transpose(1, 2).flatten(2, 3)
    return torch.cat((first, later[:, :, :num_later]), dim=2)
