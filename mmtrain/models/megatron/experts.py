"""A mixture of experts in the place of a block's MLP (arXiv 1701.06538), on tokens packed as (T, 1, features).

A router scores all experts for each token, and the `top_k` best compute it; no token is dropped. Tokens are copied in
the order of their experts, so that each expert computes consecutive rows, and what it makes goes back to its token.

Tensor parallelism splits every expert as it splits a dense MLP. Its ranks route the same tokens alike; what lies
between the gather before and the reduction behind the mixture has gradients of which each rank holds a summand.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mmtrain.models.megatron.lora import ColumnLinear, RowLinear
from mmtrain.models.megatron.parallel_groups import ParallelGroups
from mmtrain.models.shapes.layer_shape import MoeMlp


class Routing(NamedTuple):
    """Which rows the experts compute, as tensors that travel from one piece of a block to the next."""

    weights: Tensor  # (T, top_k) of each token's experts
    order: Tensor  # (T * top_k,) int64: the place in `weights`, flattened, that each row belongs to
    counts: Tensor  # (experts,) int64, on the host: rows of each expert


class Router(nn.Module):
    """Scores of all experts for each token, and the choice of the best."""

    def __init__(self, mlp: MoeMlp, config: TransformerConfig) -> None:
        """Create an uninitialized matrix, which every rank of the TP group holds."""
        super().__init__()
        self.top_k, self.normalizes = mlp.top_k, mlp.normalized_scores
        self.weight = nn.Parameter(torch.empty(mlp.experts, config.hidden_size, dtype=config.params_dtype))
        # Outputs of experts, and so gradients of their weights, are summands on each rank of the group.
        self.weight.sequence_parallel = config.tensor_model_parallel_size > 1  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor) -> Routing:
        """Choose the experts of tokens (T, hidden): the most probable, of equals the first ones.

        Probabilities are computed in fp32; weights have the precision of the tokens.
        """
        probabilities = F.linear(tokens, self.weight).softmax(dim=-1, dtype=torch.float32)
        # Unlike `topk`, a stable sort takes the same one of equals on every rank and device.
        sorted_weights, sorted_experts = probabilities.sort(dim=-1, descending=True, stable=True)
        weights, experts = sorted_weights[:, : self.top_k], sorted_experts[:, : self.top_k].flatten()
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        counts = torch.bincount(experts, minlength=len(self.weight))
        return Routing(weights.to(tokens.dtype), experts.argsort(stable=True), counts.cpu())


class Expert(nn.Module):
    """The two linears of an expert. Its caller communicates what they need of other ranks."""

    def __init__(self, mlp: MoeMlp, config: TransformerConfig, groups: ParallelGroups) -> None:
        """Create uninitialized weights, or this rank's shard of them."""
        super().__init__()
        arguments = {"config": config, "init_method": None, "bias": False, "tp_group": groups.tp}
        self.linear_fc1 = ColumnLinear(config.hidden_size, mlp.first_width, **arguments)
        self.linear_fc2 = RowLinear(
            mlp.expert_ffn, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **arguments
        )
        for linear in (self.linear_fc1, self.linear_fc2):
            linear.explicit_expert_comm = True


class TokenGather(nn.Module):
    """What a TP group communicates before a mixture, unless `explicit_expert_comm` leaves it to the caller."""

    def __init__(self, config: TransformerConfig, groups: ParallelGroups) -> None:
        super().__init__()
        self.tp_group, self.sequence_parallel = groups.tp, config.sequence_parallel
        self.explicit_expert_comm = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all ranks, of which `tokens` is a shard under sequence parallelism."""
        if self.explicit_expert_comm:
            return tokens
        if self.sequence_parallel:
            return cast(Tensor, gather_from_sequence_parallel_region(tokens, group=self.tp_group))
        return cast(Tensor, copy_to_tensor_model_parallel_region(tokens, group=self.tp_group))


class TokenReduction(nn.Module):
    """What a TP group communicates behind a mixture, unless `explicit_expert_comm` leaves it to the caller."""

    late_bias: Tensor | None = None

    def __init__(self, config: TransformerConfig, groups: ParallelGroups) -> None:
        super().__init__()
        self.tp_group, self.sequence_parallel = groups.tp, config.sequence_parallel
        self.explicit_expert_comm = False

    def forward(self, summand: Tensor) -> Tensor:
        """Return the sum over the ranks, of all tokens or of this rank's shard under sequence parallelism."""
        if self.explicit_expert_comm:
            return summand
        if self.sequence_parallel:
            return cast(Tensor, reduce_scatter_to_sequence_parallel_region(summand, group=self.tp_group))
        return cast(Tensor, reduce_from_tensor_model_parallel_region(summand, group=self.tp_group))


class ExpertMlp(nn.Module):
    """The mixture: router and experts. A block calls `route`, `up` and `down`."""

    def __init__(self, mlp: MoeMlp, config: TransformerConfig, groups: ParallelGroups) -> None:
        """Build uninitialized modules."""
        super().__init__()
        self.top_k = mlp.top_k
        self.gather = TokenGather(config, groups)
        self.router = Router(mlp, config)
        self.experts = nn.ModuleList(Expert(mlp, config, groups) for _ in range(mlp.experts))
        self.reduction = TokenReduction(config, groups)

    def up(self, hidden: Tensor) -> tuple[Tensor, Routing]:
        """Compute the inner widths (rows, 2 * ffn / tp) of tokens (T, 1, hidden), in the order of their experts."""
        tokens = self.gather(hidden).squeeze(1)
        routing = self.router(tokens)
        rows = cast(Tensor, _CopyToExperts.apply(tokens, routing.order, self.top_k))  # type: ignore[no-untyped-call]
        return self._run("linear_fc1", rows, routing.counts), routing

    def down(self, activated: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sums (T, 1, hidden) of what the experts make of rows (rows, ffn / tp)."""
        rows = self._run("linear_fc2", activated, routing.counts)
        of_tokens = cast(Tensor, _ReturnFromExperts.apply(rows, routing.order))  # type: ignore[no-untyped-call]
        outputs = (of_tokens.view(-1, self.top_k, of_tokens.shape[1]) * routing.weights.unsqueeze(-1)).sum(dim=1)
        return cast(Tensor, self.reduction(outputs.unsqueeze(1)))

    def _run(self, linear: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Let each expert compute its rows; those without rows take part, so that adapters meet on all ranks."""
        parts: Sequence[Tensor] = torch.split(rows, counts.tolist())
        outputs = [getattr(expert, linear)(part)[0] for expert, part in zip(self.experts, parts, strict=True)]
        return torch.cat(outputs)


class _CopyToExperts(torch.autograd.Function):
    """Copy tokens (T, hidden) to the rows of their experts. Gradients of a token's copies are summed in one order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return tokens.index_select(0, order // top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        of_tokens = torch.empty_like(grad)
        of_tokens[order] = grad
        return of_tokens.view(-1, ctx.top_k, grad.shape[1]).sum(dim=1), None, None


class _ReturnFromExperts(torch.autograd.Function):
    """Bring rows (T * top_k, hidden) from the order of experts into that of tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        of_tokens = torch.empty_like(rows)
        of_tokens[order] = rows
        return of_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None
