"""Cross-entropy over a vocabulary that tensor parallelism splits, with few copies of the logits, or of a part of them.

The softmax is computed in fp32, for some rows at a time. Between forward and backward one number is kept for each
logit, in the type of the hidden states: its exponential, which then becomes its gradient. Where `LossSizes.uses_chunks`
says that this takes more memory than gradients do, forward computes these, chunk by chunk, and backward scales them:
the same GEMMs in another order. Megatron-core's loss keeps the softmax of all rows in fp32, and calls collectives even
where nothing is split.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mmtrain.models.kernels.weight_gradient import weight_gradient_problem
from mmtrain.models.shapes.loss_chunks import CHUNK_LOGITS, CHUNK_TOKENS, LossSizes


@dataclass(frozen=True)
class LogitRules:
    """What holds for the next tokens of S sequences."""

    rows: Tensor  # (N,) int64, a sequence
    ids: Tensor  # (N,) int64, a token that it holds; each pair once
    penalty: float  # by which positive logits of these are divided, and negative ones multiplied
    suppressed: Tensor  # (M,) int64, tokens that are never picked

    def apply(self, logits: Tensor, first_id: int) -> Tensor:
        """Return the logits (T, n) of the ids from `first_id` on, changed; those of other ids are on other ranks."""
        changed = logits.clone()
        is_here = (self.ids >= first_id) & (self.ids < first_id + logits.shape[1])
        rows, ids = self.rows[is_here], self.ids[is_here] - first_id
        seen = changed[rows, ids]
        changed[rows, ids] = torch.where(seen < 0, seen * self.penalty, seen / self.penalty)
        suppressed = self.suppressed - first_id
        changed[:, suppressed[(suppressed >= 0) & (suppressed < logits.shape[1])]] = float("-inf")
        return changed


def vocab_parallel_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    logit_cap: float | None = None,
) -> Tensor:
    """Return the cross-entropy of each row of `hidden @ weight.T` against its target: (N,) fp32, equal on all ranks.

    The sum of all losses, or of parts of them, may be differentiated: all of them must have one gradient.

    Args:
        hidden: (N, hidden) normalized hidden states of the tokens that have a target. Its gradient is this rank's part
            of a sum over the group.
        weight: (vocab / tp, hidden) this rank's rows of the padded vocabulary. Where it has a `main_grad`, a loss by
            chunks adds its gradient there and leaves none for autograd.
        targets: (N,) int64 ids below `vocab_size`.
        vocab_size: rows of the whole vocabulary from here on are padding: they take no part in the softmax, and their
            gradient is zero.
        tp_group: the ranks that share the vocabulary, in the order of their rows.
        logit_cap: logits x become `logit_cap` * tanh(x / `logit_cap`) first; at most `MAX_LOGIT_CAP`.
    """
    num_ids, width = weight.shape
    sizes = LossSizes(len(hidden), num_ids, width, hidden.element_size(), weight.requires_grad)
    compute = losses_by_chunks if sizes.uses_chunks else losses_at_once
    return compute(hidden, weight, targets, vocab_size, tp_group, logit_cap)


def losses_at_once(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    logit_cap: float | None = None,
) -> Tensor:
    """Compute what `vocab_parallel_losses` does, with all logits."""
    losses: Tensor = _VocabParallelLoss.apply(hidden, weight, targets, vocab_size, tp_group, logit_cap)  # type: ignore[no-untyped-call]
    return losses


def losses_by_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    logit_cap: float | None = None,
) -> Tensor:
    """Compute what `vocab_parallel_losses` does, with the logits of `CHUNK_TOKENS` tokens at a time."""
    is_training = torch.is_grad_enabled()  # inside of a function of autograd it is always off
    losses: Tensor = _ChunkedLoss.apply(hidden, weight, targets, vocab_size, tp_group, logit_cap, is_training)  # type: ignore[no-untyped-call]
    return losses


class _VocabParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        tp_group: dist.ProcessGroup,
        logit_cap: float | None,
    ) -> Tensor:
        first_id = tp_group.rank() * len(weight)
        exponentials, sums, largest = _exponentials(
            hidden, weight, targets - first_id, vocab_size - first_id, tp_group, logit_cap
        )
        denominators, target_logits = sums
        kept = hidden if ctx.needs_input_grad[1] else None  # only the weight's gradient reads it
        ctx.save_for_backward(kept, weight, targets, exponentials, denominators, largest)
        ctx.first_id, ctx.logit_cap = first_id, logit_cap
        losses: Tensor = denominators.log() - target_logits
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, exponentials, denominators, largest = ctx.saved_tensors
        cap = None if ctx.logit_cap is None else (ctx.logit_cap, largest)
        logits_grad = _logits_gradient(exponentials, denominators, targets - ctx.first_id, loss_grads, cap)
        hidden_grad = logits_grad @ weight if ctx.needs_input_grad[0] else None
        weight_grad = logits_grad.T @ hidden if ctx.needs_input_grad[1] else None
        return hidden_grad, weight_grad, None, None, None, None


class _ChunkedLoss(torch.autograd.Function):
    """Computes gradients in forward, as liger-kernel does (arXiv 2410.10989): logits need not be kept or made again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        tp_group: dist.ProcessGroup,
        logit_cap: float | None,
        is_training: bool,
    ) -> Tensor:
        first_id = tp_group.rank() * len(weight)
        needs_hidden, needs_weight = (is_training and needed for needed in ctx.needs_input_grad[:2])
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        losses = torch.empty(len(hidden), device=hidden.device)
        for first in range(0, len(hidden), CHUNK_TOKENS):
            rows = slice(first, first + CHUNK_TOKENS)
            ids = targets[rows] - first_id
            logits, (denominators, target_logits), largest = _exponentials(
                hidden[rows], weight, ids, vocab_size - first_id, tp_group, logit_cap
            )
            losses[rows] = denominators.log() - target_logits
            if needs_hidden or needs_weight:
                cap = None if logit_cap is None else (logit_cap, largest)
                logits_grad = _logits_gradient(logits, denominators, ids, torch.ones_like(denominators), cap)
                if hidden_grad is not None:
                    torch.mm(logits_grad, weight, out=hidden_grad[rows])
                if weight_grad is not None:
                    _add_product(weight_grad, logits_grad, hidden[rows])
                del logits_grad
            del logits  # before the next chunk makes its own
        ctx.save_for_backward(hidden_grad, weight_grad, weight if needs_weight else None)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad, weight = ctx.saved_tensors
        scale = loss_grads[0]
        # The sum over tokens is made; none of them can be scaled apart. On a GPU the host does not wait for this.
        torch._assert_async((loss_grads == scale).all(), "losses that are computed by chunks must have one gradient")
        if hidden_grad is not None:
            hidden_grad.mul_(scale)
        if weight_grad is not None:
            weight_grad = _scaled_or_added(weight, weight_grad, scale)
        return hidden_grad, weight_grad, None, None, None, None, None


def _exponentials(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    num_real: int,
    tp_group: dist.ProcessGroup,
    logit_cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return exponentials of logits less their row's largest, two sums of rows over the whole vocabulary, the largest.

    Args:
        ids: (N,) rows of `weight` that are the targets; others are another rank's.
        num_real: rows of `weight` from here on are padding.

    Returns (N, vocab / tp) in the type of `hidden`, and (2, N) in fp32: sums of exponentials, and the targets' logits;
    then (N,) in fp32.
    """
    # GEMMs run over the padding too: it makes them fast.
    logits = hidden @ weight.T
    if logit_cap is not None:
        for rows in _rows_in_fp32(logits):
            _write_back(logits[rows].float().div_(logit_cap).tanh_().mul_(logit_cap), logits[rows])
    logits[:, max(0, num_real) :] = float("-inf")
    largest = logits.amax(dim=1).float()
    _reduce(largest, dist.ReduceOp.MAX, tp_group)
    sums = torch.zeros(2, len(hidden), device=hidden.device)
    for rows in _rows_in_fp32(logits):  # the logits become their exponentials
        values = logits[rows].float().sub_(largest[rows, None])
        sums[1, rows] = _pick(values, ids[rows])
        sums[0, rows] = values.exp_().sum(dim=1)
        _write_back(values, logits[rows])
    _reduce(sums, dist.ReduceOp.SUM, tp_group)
    return logits, sums, largest


def _logits_gradient(
    exponentials: Tensor,
    denominators: Tensor,
    ids: Tensor,
    loss_grads: Tensor,
    cap: tuple[float, Tensor] | None,
) -> Tensor:
    """Return the gradients of logits, written over their exponentials.

    cap: of capped logits, the cap and the largest logit of each row.
    """
    for rows in _rows_in_fp32(exponentials):
        slopes = None if cap is None else _slopes_of_cap(exponentials[rows], cap[0], cap[1][rows])
        values = exponentials[rows].float().mul_((loss_grads[rows] / denominators[rows])[:, None])
        _add_to_picked(values, ids[rows], -loss_grads[rows])
        if slopes is not None:
            values.mul_(slopes)
        _write_back(values, exponentials[rows])
    return exponentials


def _slopes_of_cap(exponentials: Tensor, cap: float, largest: Tensor) -> Tensor:
    """Return the derivatives of capped logits, made again from their exponentials, by what they were before: fp32.

    No exponential of a real id is 0, since logits differ by at most twice the cap; those of padding are.
    """
    shares = exponentials.float().log().add_(largest[:, None]).div_(cap)
    return shares.square_().neg_().add_(1.0).clamp_(min=0.0)


def _add_product(total: Tensor, logits_grad: Tensor, hidden: Tensor) -> None:
    """Add `logits_grad.T @ hidden` to a matrix in fp32."""
    if weight_gradient_problem(hidden.device, hidden.dtype) is not None:
        total.add_(logits_grad.T @ hidden)
    elif hidden.dtype == torch.float32:
        total.addmm_(logits_grad.T, hidden)
    else:
        torch.addmm(total, logits_grad.T, hidden, out_dtype=torch.float32, out=total)


def _scaled_or_added(weight: nn.Parameter, weight_grad: Tensor, scale: Tensor) -> Tensor | None:
    """Add a gradient times `scale` to `weight.main_grad`; where there is none, return it for autograd."""
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        return weight_grad.mul_(scale)
    main_grad.addcmul_(weight_grad, scale)
    return None


def _rows_in_fp32(logits: Tensor) -> Iterator[slice]:
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


def _add_to_picked(values: Tensor, ids: Tensor, summands: Tensor) -> None:
    """Add to what `_pick` picks."""
    num_ids = values.shape[1]
    is_here = (ids >= 0) & (ids < num_ids)
    values.scatter_add_(1, ids.clamp(0, num_ids - 1)[:, None], (is_here * summands)[:, None])


def _reduce(values: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(values, operation, group=group)
