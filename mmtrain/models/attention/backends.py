"""The backends of attention: which of them run here, and the call of the chosen one."""

from collections.abc import Iterator
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.errors import UserError
from mmtrain.models.attention.fused import FUSED_KERNELS, attend_by_fused_kernel, fused_kernel_problem
from mmtrain.models.attention.options import AttentionBackend, AttentionOptions
from mmtrain.models.attention.sdpa import attend_by_sdpa
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
