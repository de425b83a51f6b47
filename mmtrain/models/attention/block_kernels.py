"""Attention of some queries to one block of keys: outputs with their log-sum-exp, by which blocks are put together.

The kernels are torch's own, called below autograd, since only there they return the log-sum-exp and take that of all
blocks for the backward, as torch's own context parallelism does.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF_PRECISIONS = (torch.float16, torch.bfloat16)
_HEAD_ALIGNMENT = 8  # features; of the kernel on GPUs


def attend_to_block(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, by_definition: bool = False
) -> tuple[Tensor, Tensor]:
    """Attend from q (n, heads, d) to k and v (m, kv_heads, d); return (n, heads, d) and (n, heads) log-sum-exp in fp32.

    causal: only for n = m. by_definition: compute all scores, in fp32.
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (q, *_repeated(k, v, q.shape[1])))
    if q.device.type == "cpu" and not by_definition:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    elif q.dtype in _HALF_PRECISIONS and not by_definition:
        out, lse, *_ = _flash_on_gpu(q, k, v, causal, scale)
        out = out[..., : v.shape[-1]]
    else:
        scores = _scores(q, k, causal, scale)
        lse = scores.logsumexp(dim=-1)
        out = (torch.exp(scores - lse[..., None]) @ v.float()).to(q.dtype)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def block_gradients(
    gradient: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    by_definition: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the queries, keys and values of one block.

    Args:
        gradient: (n, heads, d) of the output over all blocks.
        qkv: what `attend_to_block` got.
        out: (n, heads, d) the output over all blocks.
        lse: (n, heads) the log-sum-exp over all blocks.
        causal: as there.
        scale: as there.
        by_definition: as there.
    """
    q, k, v = qkv
    num_groups = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, *_repeated(k, v, q.shape[1])))
    gradient, out, lse = (x.transpose(0, 1)[None] for x in (gradient, out, lse))
    if q.device.type == "cpu" and not by_definition:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(gradient.to(q.dtype), q, k, v, out, lse, 0.0, causal, scale=scale)
    elif q.dtype in _HALF_PRECISIONS and not by_definition:
        dq, dk, dv = _flash_gradients_on_gpu(gradient.to(q.dtype), (q, k, v), out, lse, causal, scale)
    else:
        weights = torch.exp(_scores(q, k, causal, scale) - lse[..., None])
        gradient = gradient.float()
        dv = weights.transpose(-1, -2) @ gradient
        of_weights = gradient @ v.float().transpose(-1, -2)
        of_scores = weights * (of_weights - (gradient * out.float()).sum(dim=-1, keepdim=True)) * scale
        dq, dk = of_scores @ k.float(), of_scores.transpose(-1, -2) @ q.float()
    dk, dv = (x[0].unflatten(0, (-1, num_groups)).sum(dim=1) for x in (dk, dv))
    return dq[0].transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)


def _repeated(k: Tensor, v: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Give each query head keys and values of its own."""
    repeats = num_heads // k.shape[1]
    return (k, v) if repeats == 1 else (k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1))


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if not causal:
        return scores
    is_later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(is_later, float("-inf"))


def _aligned(x: Tensor) -> Tensor:
    padding = -x.shape[-1] % _HEAD_ALIGNMENT
    return F.pad(x, (0, padding)) if padding else x


def _flash_on_gpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Any, ...]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    results: tuple[Any, ...] = flash(_aligned(q), _aligned(k), _aligned(v), 0.0, causal, False, scale=scale)
    return results


def _flash_gradients_on_gpu(
    gradient: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = map(_aligned, qkv)
    width = qkv[0].shape[-1]
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # without dropout there is no random state
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        _aligned(gradient), q, k, v, _aligned(out), lse.contiguous(), None, None, q.shape[-2], k.shape[-2], 0.0, causal,
        unused, unused, scale=scale,
    )  # fmt: skip
    return dq[..., :width], dk[..., :width], dv[..., :width]
