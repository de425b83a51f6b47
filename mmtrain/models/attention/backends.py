"""The backends of attention: which of them run here, and the call of the chosen one."""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.errors import UserError
from mmtrain.models.attention.fused import FUSED_KERNELS, attend_by_fused_kernel, fused_kernel_problem
from mmtrain.models.attention.options import AttentionBackend, AttentionOptions
from mmtrain.models.attention.sequence_layout import SequenceLayout

# The order in which `auto` tries them; why: "One order of attention kernels" in docs/decisions/models.md.
BACKENDS: tuple[AttentionBackend, ...] = get_args(AttentionBackend)
USUAL_HEAD_DIM = 128  # of a question about a machine and not about a model


def prepare_attention(device: torch.device) -> None:
    """Set up torch for attention on `device` in this process. May be called any number of times.

    On GPUs, keep `scaled_dot_product_attention` from cuDNN, which torch would choose first on Hopper: cuDNN plans anew
    for every shape, for 20 ms to a second each. Here nearly every call has one of its own: a number of sequences of
    equal length, or the length that a key-value cache has grown to.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def attend(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, options: AttentionOptions) -> Tensor:
    """Attend inside each packed sequence: q (T, heads, d), k and v (T, kv_heads, d) -> (T, heads, d)."""
    assert layout.num_tokens == q.shape[0], f"lengths sum to {layout.num_tokens}, but there are {q.shape[0]} tokens"
    assert options.causal or not (options.window or layout.spans), "windows and spans change a causal mask"
    if q.shape[0] == 0:
        return q + (k.sum() + v.sum()) * 0  # an empty result that still gives k and v a gradient
    if options.backend == "reference":
        return attend_by_definition(q, k, v, layout, options)
    attend_by = attend_by_sdpa if options.backend == "sdpa" else attend_by_fused_kernel
    out = attend_by(q, k, v, layout, options)
    return replace_span_rows(out, q, k, v, layout, options) if layout.spans else out


def choose_backend(
    backend: Literal["auto"] | AttentionBackend, device: torch.device, dtype: torch.dtype, head_dim: int
) -> AttentionBackend:
    """Return the backend for the setting `train.attention`; `auto` selects the first in `BACKENDS` that works here.

    Raises:
        UserError: the named backend does not work on this device, with this dtype and heads of this width.
    """
    candidates = _examine_backends(device, dtype, head_dim)
    if backend == "auto":  # the slow import of a kernel that a better one makes superfluous is left out
        return next(name for name, problem in candidates if problem is None)
    problems = dict(candidates)
    if (problem := problems[backend]) is not None:
        usable = [name for name, problem in problems.items() if problem is None]
        raise UserError(
            f"train.attention: {backend} cannot be used here: {problem}. "
            f"Usable on this machine: auto, {', '.join(usable)}."
        )
    return backend


def backend_problems(
    device: torch.device, dtype: torch.dtype, head_dim: int = USUAL_HEAD_DIM
) -> dict[AttentionBackend, str | None]:
    """Return all backends as `auto` tries them, each with the reason why it cannot run here, or None if it can."""
    return dict(_examine_backends(device, dtype, head_dim))


def _examine_backends(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> Iterator[tuple[AttentionBackend, str | None]]:
    for backend in BACKENDS:
        is_fused = backend in FUSED_KERNELS
        yield backend, fused_kernel_problem(backend, device, dtype, head_dim) if is_fused else None


def replace_span_rows(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, options: AttentionOptions
) -> Tensor:
    """Compute the rows of `out` that belong to spans again, with the later tokens of their span among their keys.

    Tokens of a span see each other in both directions under a causal mask, which no packed kernel knows.
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


def attend_by_definition(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, options: AttentionOptions) -> Tensor:
    """Compute softmax over the masked scores of all tokens with all tokens: the oracle for the other backends."""
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


def attend_to_context(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, contexts: SequenceLayout, options: AttentionOptions
) -> Tensor:
    """Attend from the tokens of each sequence to all context tokens of this sequence.

    q (T, heads, d) lie as `layout` says, k and v (context tokens, heads, d) as `contexts` says -> (T, heads, d).
    All sequences of one of both have the same length. A kernel that knows packed sequences is called once; torch's
    dense one, once for each distinct length of the other.
    """
    assert layout.num_tokens == q.shape[0], f"lengths sum to {layout.num_tokens}, but there are {q.shape[0]} tokens"
    assert contexts.num_tokens == k.shape[0], f"contexts have {contexts.num_tokens} tokens, and there are {k.shape[0]}"
    assert not options.causal, "tokens and context have no order between them"
    if q.shape[0] == 0:
        return q + (k.sum() + v.sum()) * 0  # an empty result that still gives k and v a gradient
    assert len(layout.filled_lengths) == len(layout.lengths), "an image without tokens has no context"
    if options.backend in FUSED_KERNELS:
        return attend_by_fused_kernel(q, k, v, layout, options, contexts)
    if len(set(contexts.lengths)) == 1:
        buckets = layout.length_buckets(q.device)
        qs, ks, vs = _by_length(q, layout), _as_sorted(k, layout), _as_sorted(v, layout)
        out = _attend_in_buckets(qs, ks, vs)
        return out if buckets.inverse is None else out.index_select(0, buckets.inverse)
    qs, ks, vs = _as_sorted(q, contexts), _by_length(k, contexts), _by_length(v, contexts)
    out = _attend_in_buckets(qs, ks, vs)
    if contexts.length_buckets(q.device).order is None:
        return out
    sequences = out.view(len(contexts.lengths), -1, *q.shape[1:])
    return sequences.index_select(0, torch.argsort(contexts.sequence_order(q.device))).flatten(0, 1)


def _by_length(x: Tensor, layout: SequenceLayout) -> list[Tensor]:
    """Return the tokens of sequences of each length, (S, n, heads, d), the shortest first."""
    sorted_tokens = layout.length_buckets(x.device)
    x = x if sorted_tokens.order is None else x.index_select(0, sorted_tokens.order)
    buckets = torch.split(x, [length * count for length, count in sorted_tokens.buckets])
    counts = [count for _, count in sorted_tokens.buckets]
    return [bucket.view(count, -1, *x.shape[1:]) for bucket, count in zip(buckets, counts, strict=True)]


def _as_sorted(x: Tensor, layout: SequenceLayout) -> list[Tensor]:
    """Return the tokens that belong to those of `_by_length`, equally many for each sequence of the layout."""
    x, sorted_tokens = x.view(len(layout.lengths), -1, *x.shape[1:]), layout.length_buckets(x.device)
    if sorted_tokens.order is not None:
        x = x.index_select(0, layout.sequence_order(x.device))
    return list(torch.split(x, [count for _, count in sorted_tokens.buckets]))


def _attend_in_buckets(qs: Sequence[Tensor], ks: Sequence[Tensor], vs: Sequence[Tensor]) -> Tensor:
    outputs = [_attend_in_bucket(q, k, v) for q, k, v in zip(qs, ks, vs, strict=True)]
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _attend_in_bucket(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend inside sequences of equal length: (S, n, heads, d) and (S, context, heads, d) -> (S * n, heads, d)."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2).flatten(0, 1)
