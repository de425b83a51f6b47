"""Cross-entropy over a vocabulary that tensor parallelism splits, with few copies of the logits.

Between forward and backward one number is kept for each logit, in the type of the hidden states: its exponential, which
then becomes its gradient. The softmax is computed in fp32, for some rows at a time. Megatron-core's loss keeps the
softmax of all rows in fp32, and calls collectives even where nothing is split.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = 1 << 24  # that are held in fp32 at once: 64 MiB


def vocab_parallel_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, tp_group: dist.ProcessGroup
) -> Tensor:
    """Sum the cross-entropy of `hidden @ weight.T` against `targets`: a scalar in fp32, equal on all ranks.

    Args:
        hidden: (N, hidden) normalized hidden states of the tokens that have a target. Its gradient is this rank's part
            of a sum over the group.
        weight: (vocab / tp, hidden) this rank's rows of the padded vocabulary.
        targets: (N,) int64 ids below `vocab_size`.
        vocab_size: rows of the whole vocabulary from here on are padding: they take no part in the softmax, and their
            gradient is zero.
        tp_group: the ranks that share the vocabulary, in the order of their rows.
    """
    loss: Tensor = _VocabParallelLoss.apply(hidden, weight, targets, vocab_size, tp_group)  # type: ignore[no-untyped-call]
    return loss


class _VocabParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, tp_group: dist.ProcessGroup
    ) -> Tensor:
        first_id = tp_group.rank() * len(weight)
        num_real = max(0, vocab_size - first_id)
        # GEMMs run over the padding too: it makes them fast.
        logits = hidden @ weight.T
        logits[:, num_real:] = float("-inf")
        # The largest logit and the sum of exponentials of each row, over the whole vocabulary.
        largest = logits.amax(dim=1).float()
        _reduce(largest, dist.ReduceOp.MAX, tp_group)
        sums = torch.zeros(2, len(hidden), device=hidden.device)
        for rows in _chunks(logits):  # the logits become their exponentials
            values = logits[rows].float().sub_(largest[rows, None])
            sums[1, rows] = _pick(values, targets[rows] - first_id)
            sums[0, rows] = values.exp_().sum(dim=1)
            _write_back(values, logits[rows])
        _reduce(sums, dist.ReduceOp.SUM, tp_group)
        denominators, target_logits = sums
        ctx.save_for_backward(hidden, weight, targets, logits, denominators)
        ctx.first_id = first_id
        loss: Tensor = (denominators.log() - target_logits).sum()
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, exponentials, denominators = ctx.saved_tensors
        logits_grad = exponentials
        for rows in _chunks(exponentials):
            values = exponentials[rows].float().mul_((loss_grad / denominators[rows])[:, None])
            _add_to_picked(values, targets[rows] - ctx.first_id, -loss_grad)
            _write_back(values, logits_grad[rows])
        hidden_grad = logits_grad @ weight if ctx.needs_input_grad[0] else None
        weight_grad = logits_grad.T @ hidden if ctx.needs_input_grad[1] else None
        return hidden_grad, weight_grad, None, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows with at most `CHUNK_LOGITS` logits each, or with one row."""
    num_rows, num_ids = logits.shape
    size = max(1, CHUNK_LOGITS // num_ids)
    return (slice(first, first + size) for first in range(0, num_rows, size))


def _write_back(values: Tensor, stored: Tensor) -> None:
    """Store values that were computed in fp32, unless they are those that are stored."""
    if values.dtype != stored.dtype:
        stored.copy_(values)


def _pick(values: Tensor, ids: Tensor) -> Tensor:
    """Return from each row of values (n, ids) that of its id, or 0 where another rank holds the id: (n,)."""
    num_ids = values.shape[1]
    picked = values.gather(1, ids.clamp(0, num_ids - 1)[:, None])[:, 0]
    return torch.where((ids >= 0) & (ids < num_ids), picked, 0.0)


def _add_to_picked(values: Tensor, ids: Tensor, summand: Tensor) -> None:
    """Add to what `_pick` picks."""
    num_ids = values.shape[1]
    is_here = (ids >= 0) & (ids < num_ids)
    values.scatter_add_(1, ids.clamp(0, num_ids - 1)[:, None], (is_here * summand)[:, None])


def _reduce(values: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(values, operation, group=group)
