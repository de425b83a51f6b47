"""Attention over packed sequences: one function, several backends.

The tokens of many sequences lie one after another as (T, heads, d), without padding; attention is block-diagonal.
k and v may have fewer heads than q (grouped-query attention). Under a causal mask, spans of tokens (those of an image)
may see each other in both directions.
"""

import bisect
import importlib.util
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.errors import UserError
from mmtrain.models.rotary_scaling import rotary_amplitude, scale_frequencies
from mmtrain.recipe.llm_settings import RopeScalingSettings

AttentionBackend = Literal["flash_attn", "varlen", "sdpa", "reference"]
RotaryTables = tuple[Tensor, Tensor]  # cosines and sines, each (T, 1, d / 2)
Spans = tuple[tuple[int, int], ...]  # [start, stop) in a microbatch's packed tokens, each inside one sequence, in order


@dataclass(frozen=True)
class AttentionOptions:
    """How the tokens of a sequence attend to each other."""

    backend: AttentionBackend
    causal: bool  # to themselves and to earlier tokens only
    window: int = 0  # causal: to themselves and to the `window` - 1 tokens before; 0: to all earlier ones
    scale: float | None = None  # factor on scores; None: 1 / sqrt(d)
    spans: Spans = ()  # causal: tokens of one span also attend to the later tokens of it, however far


_HALF_PRECISIONS = (torch.float16, torch.bfloat16)


def rotary_tables(
    lengths: tuple[int, ...],
    head_dim: int,
    base: float,
    dtype: torch.dtype,
    device: torch.device,
    starts: tuple[int, ...] | None = None,
    scaling: RopeScalingSettings | None = None,
) -> RotaryTables:
    """Compute cosines and sines of the rotary positions of packed sequences (RoFormer, arXiv 2104.09864).

    Positions of sequence i start at `starts[i]`, by default at 0.
    """
    frequencies = rotary_frequencies(head_dim, base, scaling)
    starts = starts or (0,) * len(lengths)
    spans = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    num_positions = max((stop for _, stop in spans), default=0)
    positions = torch.arange(num_positions, dtype=torch.float32)
    all_angles = torch.outer(positions, frequencies)
    angles = torch.cat([all_angles[start:stop] for start, stop in spans] or [positions.new_empty(0, head_dim // 2)])
    angles = angles.unsqueeze(1)
    amplitude = rotary_amplitude(scaling)
    return (amplitude * torch.cos(angles)).to(device, dtype), (amplitude * torch.sin(angles)).to(device, dtype)


def rotary_frequencies(width: int, base: float, scaling: RopeScalingSettings | None = None) -> Tensor:
    """Return the angles per position, (width / 2,), by which rotary positions rotate the pairs of `width` features."""
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    return frequencies if scaling is None else scale_frequencies(frequencies, base, scaling)


def axis_rotary_tables(
    positions: Tensor, axes: Sequence[int], frequencies: Tensor, dtype: torch.dtype, amplitude: float = 1.0
) -> RotaryTables:
    """Compute cosines and sines of tokens with positions along several axes, such as row and column.

    positions (axes, T); `axes[i]` is the axis that rotates pair i of a head, by `frequencies[i]` for each position.
    """
    angles = (positions[list(axes)].T.float() * frequencies.to(positions.device)).unsqueeze(1)
    return (amplitude * torch.cos(angles)).to(dtype), (amplitude * torch.sin(angles)).to(dtype)


def apply_rotary(x: Tensor, rope: RotaryTables) -> Tensor:
    """Rotate each pair (x[i], x[i + d/2]) of every head by the angle of its position, paired as in Llama."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], options: AttentionOptions) -> Tensor:
    """Attend inside each packed sequence.

    q (T, heads, d), k and v (T, kv_heads, d), `sum(lengths) == T` -> (T, heads, d). Lengths are Python integers, so
    that no backend has to wait for the device to know them.
    """
    assert sum(lengths) == q.shape[0], f"lengths sum to {sum(lengths)}, but there are {q.shape[0]} tokens"
    assert options.causal or not (options.window or options.spans), "windows and spans change a causal mask"
    if q.shape[0] == 0:
        return q + (k.sum() + v.sum()) * 0  # an empty result that still gives k and v a gradient
    lengths = tuple(n for n in lengths if n)
    match options.backend:
        case "reference":
            return _reference(q, k, v, lengths, options)
        case "sdpa":
            out = _sdpa(q, k, v, lengths, options)
        case "varlen":
            out = _varlen(q, k, v, lengths, options)
        case "flash_attn":
            out = _flash_attn(q, k, v, lengths, options)
    return _replace_spans(out, q, k, v, lengths, options) if options.spans else out


def choose_backend(
    backend: Literal["auto"] | AttentionBackend, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """Return the backend for the setting `train.attention`; `auto` selects the fastest one that works here.

    Raises:
        UserError: the named backend does not work on this device with this dtype.
    """
    problems = backend_problems(device, dtype)
    usable = [name for name, problem in problems.items() if problem is None]
    if backend == "auto":
        return usable[0]
    if backend not in usable:
        raise UserError(
            f"train.attention: {backend} cannot be used here: {problems[backend]}. "
            f"Usable on this machine: auto, {', '.join(usable)}."
        )
    return backend


def backend_problems(device: torch.device, dtype: torch.dtype) -> dict[AttentionBackend, str | None]:
    """Return all backends, the fastest first, each with the reason why it cannot run here, or None if it can."""
    return {
        "flash_attn": _flash_attn_problem(device, dtype),
        "varlen": _varlen_problem(device, dtype),
        "sdpa": None,
        "reference": None,
    }


def _half_on_cuda_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, and this run uses `{device.type}`"
    if dtype not in _HALF_PRECISIONS:
        return f"it computes in bf16 or fp16, and this run uses {str(dtype).removeprefix('torch.')}"
    return None


def _flash_attn_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    if problem := _half_on_cuda_problem(device, dtype):
        return problem
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed (pip install 'mmtrain[cuda]')"
    return None


def _varlen_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    if problem := _half_on_cuda_problem(device, dtype):
        return problem
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    from torch.nn.attention.varlen import varlen_attn

    if not {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        return f"varlen_attn of torch {torch.__version__} lacks `window_size` (causal) or `enable_gqa` (grouped-query)"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"it needs an Ampere GPU or newer, and this is a {torch.cuda.get_device_name(device)}"
    return None


def _reference(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], options: AttentionOptions) -> Tensor:
    """Compute softmax over the masked scores of all tokens with all tokens: the oracle for the other backends."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    sequence = torch.arange(len(lengths), device=q.device).repeat_interleave(
        torch.tensor(lengths, device=q.device), output_size=q.shape[0]
    )
    allowed = sequence[:, None] == sequence[None, :]
    if options.causal:
        allowed = allowed.tril()
    for start, stop in options.spans:
        allowed[start:stop, start:stop] = True
    if options.window:
        allowed = allowed.triu(1 - options.window)
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * scale
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], options: AttentionOptions) -> Tensor:
    """Call torch's dense kernel once for each distinct length, without padding or masks.

    One masked call over sequences padded to equal length measured slower on a CPU, forward and backward together.
    """
    layout = _buckets_by_length(lengths, q.device)
    if layout.order is not None:
        q, k, v = (x.index_select(0, layout.order) for x in (q, k, v))
    bucket_tokens = [length * count for length, count in layout.buckets]
    qs, ks, vs = (torch.split(x, bucket_tokens) for x in (q, k, v))
    outputs = [
        _sdpa_bucket(bucket_q, bucket_k, bucket_v, num_sequences, options)
        for (_, num_sequences), bucket_q, bucket_k, bucket_v in zip(layout.buckets, qs, ks, vs, strict=True)
    ]
    out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return out if layout.inverse is None else out.index_select(0, layout.inverse)


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


def _replace_spans(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], options: AttentionOptions
) -> Tensor:
    """Compute the rows of `out` that belong to spans again, with the later tokens of their span among their keys.

    The keys of a span are consecutive: from the window of its first token, or from the start of its sequence, to its
    own end. So no kernel needs a mask of (T, T): one call for each span reads its keys where they lie.
    """
    rows = _span_rows(options.spans, q.device)
    queries_of_spans = torch.split(q.index_select(0, rows), [stop - start for start, stop in options.spans])
    first_keys = _first_keys(lengths, options.spans, options.window)
    outputs = []
    for span_q, first_key, (_, stop) in zip(queries_of_spans, first_keys, options.spans, strict=True):
        span_k, span_v = k[first_key:stop], v[first_key:stop]
        mask = _window_mask(len(span_q), len(span_k), options.window, q.device)
        queries, keys, values = (x.transpose(0, 1)[None] for x in (span_q, span_k, span_v))
        span_out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(span_out[0].transpose(0, 1))
    return out.index_put((rows,), torch.cat(outputs))  # `index_copy` would keep the new rows for backward


def _first_keys(lengths: tuple[int, ...], spans: Spans, window: int) -> list[int]:
    """Return the first token that the first token of each span attends to."""
    ends = [*itertools.accumulate(lengths)]
    first_keys = []
    for start, stop in spans:
        sequence = bisect.bisect_right(ends, start)
        assert stop <= ends[sequence], f"the span [{start}, {stop}) leaves its sequence"
        first_of_sequence = ends[sequence] - lengths[sequence]
        first_keys.append(max(first_of_sequence, start - window + 1) if window else first_of_sequence)
    return first_keys


@lru_cache(maxsize=64)
def _window_mask(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor | None:
    """Return which of the keys are in the window of each query, (queries, keys); None if all are.

    The last key is that of the last query.
    """
    if not window or num_keys <= window:
        return None
    is_visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return is_visible.triu(num_keys - num_queries - window + 1)


@lru_cache(maxsize=64)
def _span_rows(spans: Spans, device: torch.device) -> Tensor:
    """Return the tokens of all spans, one after another."""
    return torch.cat([torch.arange(start, stop) for start, stop in spans]).to(device, non_blocking=True)


@dataclass(frozen=True)
class _LengthBuckets:
    """The sequences of a microbatch sorted by length."""

    buckets: tuple[tuple[int, int], ...]  # (length, number of sequences of this length)
    order: Tensor | None  # (T,) index of the token that moves to each position; None if no token moves
    inverse: Tensor | None  # (T,) the inverse permutation


@lru_cache(maxsize=64)  # all blocks of a stage attend to the same microbatch, one block after another
def _buckets_by_length(lengths: tuple[int, ...], device: torch.device) -> _LengthBuckets:
    sequence_order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    grouped = itertools.groupby(lengths[i] for i in sequence_order)
    buckets = tuple((length, len(list(equal_lengths))) for length, equal_lengths in grouped)
    if len(buckets) == 1:
        return _LengthBuckets(buckets, None, None)
    if len(buckets) == len(lengths):  # all lengths differ, so every sequence is a bucket where it lies
        return _LengthBuckets(tuple((length, 1) for length in lengths), None, None)
    starts = (0, *itertools.accumulate(lengths))
    order = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in sequence_order])
    return _LengthBuckets(buckets, order.to(device), torch.argsort(order).to(device))


@lru_cache(maxsize=64)
def _cumulative_lengths(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the start of each sequence and the end of the last one: (S + 1,) int32."""
    return torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32).to(device, non_blocking=True)


def _varlen(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], options: AttentionOptions) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens = _cumulative_lengths(lengths, q.device)
    max_length = max(lengths)
    out = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, max_length, max_length,
        window_size=_window_size(options),
        scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], options: AttentionOptions) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    cu_seqlens = _cumulative_lengths(lengths, q.device)
    max_length = max(lengths)
    out: Tensor = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_length,
        max_length,
        causal=options.causal,
        window_size=_window_size(options),
    )
    return out


def _window_size(options: AttentionOptions) -> tuple[int, int]:
    """Return how many tokens before and behind itself a token attends to; -1 stands for all."""
    return options.window - 1, 0 if options.causal else -1
