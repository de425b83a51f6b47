"""The router of a mixture of experts: scores of all experts for each token, and the choice of the best.

It may have losses of its own. Their gradients enter where the weights of a token's experts leave the router, and the
loss that a stage reports does not have them (Megatron-core does so too). There the values of these losses are summed,
and the tokens of each expert counted: a backward runs once for each token, however often a forward is repeated.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mmtrain.models.attention.packed_sequences import PackedSequences, TokenSamples
from mmtrain.models.shapes.layer_shape import MoeMlp
from mmtrain.recipe.settings.llm_settings import EXPERTS_THAT_SCORE_A_GROUP

_LEAST_SUM = 1e-20  # of sigmoids, which may all be 0; the value of DeepSeek-V3 and of GLM-4.5


class SelectionBias(nn.Module):
    """What is added to the scores of experts where they are chosen. It has no gradient: see `SelectionBiases`."""

    keeps_precision = True  # also where other weights are gathered in bf16: see `shard_stage`

    def __init__(self, num_experts: int) -> None:
        """Create it uninitialized, in fp32: its steps would be lost in bf16."""
        super().__init__()
        self.bias = nn.Parameter(torch.empty(num_experts, dtype=torch.float32), requires_grad=False)

    def forward(self, scores: Tensor) -> Tensor:
        """Return the scores (T, experts) by which experts are chosen."""
        return scores + self.bias


class Router(nn.Module):
    """Scores of all experts for each token, and the choice of the best."""

    def __init__(self, mlp: MoeMlp, config: TransformerConfig) -> None:
        """Create an uninitialized matrix, which every rank of the TP group holds."""
        super().__init__()
        self.top_k, self.num_experts, self.rules = mlp.top_k, mlp.experts, mlp.router
        self.tp_size = config.tensor_model_parallel_size
        self.weight = nn.Parameter(torch.empty(mlp.experts, config.hidden_size, dtype=config.params_dtype))
        # Outputs of experts, and so gradients of their weights, are summands on each rank of the group.
        self.weight.sequence_parallel = self.tp_size > 1  # type: ignore[attr-defined]
        self.selection = SelectionBias(mlp.experts) if self.rules.has_bias else None
        self.expert_tokens: Tensor | None = None  # (experts,) int64 since `SelectionBiases.reset`, on this replica
        self._loss_sums: Tensor | None = None  # see `take_losses`

    def forward(self, tokens: Tensor, packing: PackedSequences | None) -> tuple[Tensor, Tensor, "RouterLosses | None"]:
        """Choose the experts of tokens (T, hidden): those of the best scores, of equals the first ones.

        Scores are computed in fp32; weights have the precision of the tokens.

        Returns:
            Weights (T, top_k) and numbers (T, top_k) of each token's experts; with `packing`, the losses that training
            adds.
        """
        if self.rules.scores == "softmax":
            logits = F.linear(tokens, self.weight)
            scores = logits.softmax(dim=-1, dtype=torch.float32)
        else:
            logits = _linear_in_fp32(tokens, self.weight)
            scores = logits.sigmoid()
        experts = self._choose(scores.detach())
        weights = scores.gather(1, experts)
        if self.rules.normalizes:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total if self.rules.scores == "softmax" else total + _LEAST_SUM)
        if self.rules.weight_scale != 1.0:
            weights = weights * self.rules.weight_scale
        losses: RouterLosses | None = None
        if packing is not None and self.rules.reads_samples and weights.requires_grad:
            samples = packing.samples(tokens.device)
            values = self._losses(logits, scores, experts, samples)
            loss = self.rules.balance_loss * values[0] + self.rules.z_loss * values[1]
            losses = RouterLosses(loss, values.detach(), experts, samples, self)
        return weights.to(tokens.dtype), experts, losses

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the numbers (T, top_k) of the experts with the best of scores (T, experts)."""
        if self.selection is not None:
            scores = self.selection(scores)
        if self.rules.groups > 1:
            of_groups = scores.view(len(scores), self.rules.groups, scores.shape[1] // self.rules.groups)
            best = of_groups.sort(dim=-1, descending=True).values[..., :EXPERTS_THAT_SCORE_A_GROUP].sum(dim=-1)
            chosen = torch.zeros_like(best, dtype=torch.bool)
            chosen.scatter_(1, _best(best, self.rules.top_groups), True)
            scores = of_groups.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1)
        return _best(scores, self.top_k)

    def _losses(self, logits: Tensor, scores: Tensor, experts: Tensor, samples: TokenSamples) -> Tensor:
        """Return this rank's part of the losses of the global batch, (2,): for balance, and of the logits (z-loss).

        They lack their coefficients; one without is 0. Ranks of a TP group share them evenly.
        """
        rules = self.rules
        balance = logit_squares = scores.new_zeros(len(scores))
        if rules.z_loss:
            logit_squares = logits.float().logsumexp(dim=-1).square()
        if rules.balance_loss:
            load = expert_load(experts, scores.shape[1], samples)
            shares = scores / scores.sum(dim=-1, keepdim=True) if rules.scores == "sigmoid" else scores
            balance = (shares * load[samples.numbers]).sum(dim=-1)
        of_tokens = torch.stack([balance, logit_squares]) * samples.is_real
        losses: Tensor = of_tokens.sum(dim=1) * (samples.token_weight / self.tp_size)
        return losses

    def take_losses(self) -> Tensor | None:
        """Return the sums of `_losses`, (2,), over the backwards since the last call; None if there was none."""
        taken, self._loss_sums = self._loss_sums, None
        return taken

    def add_losses(self, values: Tensor) -> None:
        """Add the losses of a microbatch, (2,), which its backward has reached."""
        self._loss_sums = values if self._loss_sums is None else self._loss_sums + values

    def count(self, experts: Tensor, samples: TokenSamples) -> None:
        """Count the tokens of each expert, if an update of the selection bias will read them."""
        if self.expert_tokens is not None:
            real = experts[samples.is_real].flatten()
            self.expert_tokens += torch.bincount(real, minlength=len(self.expert_tokens))


def expert_load(experts: Tensor, num_experts: int, samples: TokenSamples) -> Tensor:
    """Return the load of experts in each sample, (samples + 1, experts): 1 if all have equally many of its tokens.

    experts: (T, top_k) numbers of each token's experts. The last row is that of padding. All ranks that share samples
    call this together.
    """
    ones = torch.ones_like(experts, dtype=torch.float32)
    chosen = torch.zeros(len(experts), num_experts, device=experts.device).scatter_(1, experts, ones)
    counts = torch.zeros(samples.count + 1, num_experts, device=experts.device)
    counts.index_add_(0, samples.numbers, chosen)  # whole numbers, so that no order of sums changes them
    if samples.group is not None:
        dist.all_reduce(counts, group=samples.group)
    return counts * num_experts / counts.sum(dim=-1, keepdim=True).clamp(min=1.0)


@dataclass(frozen=True)
class RouterLosses:
    """The losses of a router in a microbatch, and the choices that a backward counts."""

    loss: Tensor  # this rank's part of that of the global batch, a scalar
    values: Tensor  # (2,) of each loss before its coefficient, without a gradient
    experts: Tensor  # (T, top_k)
    samples: TokenSamples
    router: Router

    def enter(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the block's forward; when its gradient comes, those of the losses enter."""
        arguments = (tensor, self.loss, self.values, self.experts, self.samples, self.router)
        return cast(Tensor, _EnterLosses.apply(*arguments))  # type: ignore[no-untyped-call]


class _EnterLosses(torch.autograd.Function):
    """Pass on a tensor; in backward add the gradient of the router's losses and their values, and count tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        loss: Tensor,
        values: Tensor,
        experts: Tensor,
        samples: TokenSamples,
        router: Router,
    ) -> Tensor:
        ctx.save_for_backward(experts, loss, values)
        ctx.samples, ctx.router = samples, router
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        experts, loss, values = ctx.saved_tensors
        ctx.router.count(experts, ctx.samples)
        ctx.router.add_losses(values)
        return grad, torch.ones_like(loss), None, None, None, None


def _best(scores: Tensor, number: int) -> Tensor:
    """Return which (T, number) of scores (T, n) are the best ones.

    Unlike `topk`, a stable sort takes the same one of equals on every rank and device.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :number].contiguous()


def _linear_in_fp32(tokens: Tensor, weight: Tensor) -> Tensor:
    return cast(Tensor, _LinearInFp32.apply(tokens, weight))  # type: ignore[no-untyped-call]


class _LinearInFp32(torch.autograd.Function):
    """Multiply tokens (T, hidden) with a weight in fp32, and keep both as they are for backward."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return F.linear(tokens.float(), weight.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        tokens, weight = ctx.saved_tensors
        needs_tokens, needs_weight = ctx.needs_input_grad
        tokens_grad = (grad @ weight.float()).to(tokens.dtype) if needs_tokens else None
        weight_grad = (grad.T @ tokens.float()).to(weight.dtype) if needs_weight else None
        return tokens_grad, weight_grad
