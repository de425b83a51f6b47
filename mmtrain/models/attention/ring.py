"""Ring attention (arXiv 2310.01889): keys and values go round the ranks that share sequences.

Every rank has an early and a late chunk of each sequence (zig-zag), so all have the same work in every step. No block
needs a mask but the causal one of a rank's own keys: all queries see the early chunk of a rank before this one, and the
late queries see both chunks of a rank behind it.

Blocks of keys give outputs with their log-sum-exp, by which they are put together.
The kernels are torch's own, called below autograd, since only there they return the log-sum-exp and take that of all
blocks for the backward, as torch's own context parallelism does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_HALF_PRECISIONS = (torch.float16, torch.bfloat16)
_HEAD_ALIGNMENT = 8  # features; of the kernel on GPUs


@dataclass(frozen=True)
class Ring:
    """The ranks of a group, and how many tokens of each sequence each of them holds."""

    group: dist.ProcessGroup
    rank: int
    pieces: tuple[
        tuple[int, ...], ...
    ]  # by rank: tokens of the early and late chunk of each sequence, one after another
    scale: float
    by_definition: bool = False  # compute blocks without fused kernels

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.pieces)

    def num_tokens(self, rank: int) -> int:
        """Return the tokens of a rank."""
        return sum(self.pieces[rank])

    def source(self, step: int) -> int:
        """Return the rank whose keys and values this rank computes with in a step."""
        return (self.rank - step) % self.size

    def blocks(self, source: int) -> Iterator["_Block"]:
        """Yield, sequence by sequence, which queries of this rank see which keys of another."""
        mine, theirs = self.pieces[self.rank], self.pieces[source]
        q_first = k_first = 0
        for sequence in range(0, len(mine), 2):
            q_early, q_late = mine[sequence : sequence + 2]
            k_early, k_late = theirs[sequence : sequence + 2]
            q_stop, k_stop = q_first + q_early + q_late, k_first + k_early + k_late
            if source == self.rank:
                block = _Block(slice(q_first, q_stop), slice(k_first, k_stop), causal=True)
            elif source < self.rank:
                block = _Block(slice(q_first, q_stop), slice(k_first, k_first + k_early))
            else:
                block = _Block(slice(q_first + q_early, q_stop), slice(k_first, k_stop))
            if block.queries.start < block.queries.stop and block.keys.start < block.keys.stop:
                yield block
            q_first, k_first = q_stop, k_stop

    def pass_on(self, rows: Tensor, num_received: int) -> "_Passing":
        """Start to send rows to the next rank, and to receive so many from the one before.

        All ranks do this in one order, so that messages of one communicator meet.
        """
        received = rows.new_empty(num_received, *rows.shape[1:])
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = []
        if len(rows):
            operations.append(dist.P2POp(dist.isend, rows, group=self.group, group_peer=after))
        if num_received:
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=before))
        return _Passing(rows, received, dist.batch_isend_irecv(operations) if operations else [])


class _Block(NamedTuple):
    """Queries of this rank that see consecutive keys of another, all of one sequence."""

    queries: slice
    keys: slice
    causal: bool = False


class _Passing(NamedTuple):
    sent: Tensor  # must not be freed before it has left
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Wait until both messages are through; return what was received."""
        for work in self.works:
            work.wait()
        return self.received


def attend_in_ring(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Attend causally inside the sequences that the ranks share: q (T, heads, d), k and v (T, kv_heads, d).

    All ranks call this together, and again in backward.
    """
    kv = torch.stack((k, v), dim=1)
    out: Tensor = _RingAttention.apply(q, kv, ring)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, ring: Ring) -> Tensor:
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
        held = kv.contiguous()
        for step in range(ring.size):
            source = ring.source(step)
            passing = None
            if step + 1 < ring.size:
                passing = ring.pass_on(held, ring.num_tokens(ring.source(step + 1)))
            for block in ring.blocks(source):
                k, v = held[block.keys].unbind(1)
                partial = attend_to_block(q[block.queries], k, v, block.causal, ring.scale, ring.by_definition)
                _merge(out[block.queries], lse[block.queries], *partial)
            if passing is not None:
                held = passing.wait()
        rounded = out.to(q.dtype)
        ctx.save_for_backward(q, kv, rounded, lse)
        ctx.ring = ring
        return rounded

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        q, kv, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        held = kv.contiguous()
        summed: _Passing | None = None  # gradients of the keys and values in hand, from the ranks that had them before
        for step in range(ring.size):
            passing = None
            if step + 1 < ring.size:
                passing = ring.pass_on(held, ring.num_tokens(ring.source(step + 1)))
            dkv = torch.zeros(held.shape, dtype=torch.float32, device=q.device)
            for queries, keys, causal in ring.blocks(ring.source(step)):
                k, v = held[keys].unbind(1)
                of_q, of_k, of_v = block_gradients(
                    gradient[queries], (q[queries], k, v), out[queries], lse[queries], causal, ring.scale,
                    ring.by_definition,
                )  # fmt: skip
                dq[queries] += of_q
                dkv[keys, 0] += of_k
                dkv[keys, 1] += of_v
            if summed is not None:
                dkv += summed.wait()
            summed = ring.pass_on(dkv, ring.num_tokens(ring.source(step + 1)))
            if passing is not None:
                held = passing.wait()
        assert summed is not None, "a ring has a rank"
        return dq.to(q.dtype), summed.wait().to(kv.dtype), None


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Put the output (n, heads, d) of one more block to that of the blocks before, in place."""
    both = torch.logaddexp(lse, block_lse)
    out.mul_(torch.exp(lse - both)[..., None]).add_(block_out * torch.exp(block_lse - both)[..., None])
    lse.copy_(both)


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
