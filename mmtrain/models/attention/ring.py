"""Ring attention (arXiv 2310.01889): keys and values go round the ranks that share sequences.

Every rank has an early and a late chunk of each sequence (zig-zag), so that all have equally much to compute in every
step, and no block needs a mask but the causal one of a rank's own keys: of a rank before this one, all queries see the
early chunk; of a rank behind it, the late queries see both chunks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.attention.block_kernels import attend_to_block, block_gradients


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
