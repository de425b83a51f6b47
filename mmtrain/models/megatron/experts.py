"""A mixture of experts in the place of a block's MLP (arXiv 1701.06538), on tokens packed as (T, 1, features).

A router scores all experts for each token, and the `top_k` best compute it; no token is dropped. Tokens are copied in
the order of their experts, so that each expert computes consecutive rows, and what it makes goes back to its token.

Tensor parallelism splits every expert as it splits a dense MLP. Its ranks route the same tokens alike; what lies
between the gather before and the reduction behind the mixture has gradients of which each rank holds a summand.

With expert parallelism (GShard, arXiv 2006.16668) a rank holds consecutive experts, and an all-to-all brings it their
rows of the whole group. Ranks without rows take part in it too. The ranks of a TP group route the same tokens, so each
exchanges its columns of the rows alone, and they put these together where the rows arrive.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
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

from mmtrain.models.attention.packed_sequences import PackedSequences
from mmtrain.models.kernels.grouped_gemm import expert_linear
from mmtrain.models.megatron.lora import ColumnLinear, RowLinear
from mmtrain.models.megatron.parallel_groups import ParallelGroups
from mmtrain.models.megatron.router import Router, RouterLosses
from mmtrain.models.shapes.layer_shape import MoeMlp


class Routing(NamedTuple):
    """Which rows the experts compute, as tensors that travel from one piece of a block to the next."""

    weights: Tensor  # (T, top_k) of each token's experts
    order: Tensor  # (T * top_k,) int64: the place in `weights`, flattened, that each row belongs to
    counts: Tensor  # (ranks of the expert-parallel group, experts) int64, on the host: rows of each rank
    arrival: Tensor  # int64: places of rows that arrived from the group, those of the first expert first; else empty


class RoutedTokens(NamedTuple):
    """Tokens whose experts are chosen."""

    tokens: Tensor  # (T, hidden)
    weights: Tensor  # (T, top_k)
    experts: Tensor  # (T, top_k)
    counts: Tensor  # see `Routing`
    losses: RouterLosses | None  # of the router, whose gradients have not entered yet


class RecordedLoads:
    """How many rows the experts of a mixture computed in the passes of a step that train, as numbers to be summed.

    Sums over the ranks of a run weigh each pass by its rows.
    """

    def __init__(self, num_experts: int) -> None:
        self._sums = torch.zeros(num_experts + 3, dtype=torch.float64)

    def add(self, counts: Tensor, rank: int) -> None:
        """Add a pass of this rank, from `Routing.counts`; passes that are run again for their backward count once."""
        if not torch.is_grad_enabled() or not counts.any():
            return
        of_experts = counts.sum(dim=0).double()
        relative, num_rows = of_experts / of_experts.mean(), counts[rank].sum()
        of_ranks = relative.view(len(counts), -1).mean(dim=1)
        self._sums[:-3] += counts[rank]
        self._sums[-3:] += num_rows * torch.stack([torch.ones(()).double(), relative.var(correction=0), of_ranks.max()])

    def take(self) -> Tensor:
        """Return the sums, (experts + 3,), and start anew.

        They are each expert's rows, all rows, and these times the squared relative deviation of the experts' rows, and
        times the rows of the fullest rank over the mean.
        """
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return taken


class SharedInner(NamedTuple):
    """What the shared expert makes of tokens before its last linear, empty where there is none."""

    inner: Tensor  # (T, 2 * ffn / tp); behind the activation function (T, ffn / tp)
    gate: Tensor  # (T, 1) the score whose sigmoid multiplies its output; empty without a gate


class Expert(nn.Module):
    """The two linears of an expert. Its caller communicates what they need of other ranks."""

    def __init__(self, ffn: int, config: TransformerConfig, groups: ParallelGroups) -> None:
        """Create uninitialized weights, or this rank's shard of them, for an inner width of `ffn`."""
        super().__init__()
        arguments = {"config": config, "init_method": None, "bias": False, "tp_group": groups.tp}
        self.linear_fc1 = ColumnLinear(config.hidden_size, 2 * ffn, **arguments)  # gates and values
        self.linear_fc2 = RowLinear(ffn, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **arguments)
        for linear in (self.linear_fc1, self.linear_fc2):
            linear.explicit_expert_comm = True


class Experts(nn.Module):
    """The experts that a rank holds, by their numbers; `fully_shard` takes no ModuleDict before torch 2.13.

    Where they are sharded over other ranks than the rest of their block, `fully_shard` gathers them when this module is
    called, and not when an expert is. So the block calls it once, with all that it computes.
    """

    def __init__(self, experts: Mapping[int, Expert]) -> None:
        """Hold some of a mixture's experts."""
        super().__init__()
        self.numbers = list(experts)
        for number, expert in experts.items():
            self.add_module(str(number), expert)

    def held(self) -> list[Expert]:
        """Return the experts in the order of `numbers`."""
        return [cast(Expert, expert) for expert in self.children()]

    def forward(self, run: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Compute `run` of the inputs, which may read the experts' weights meanwhile."""
        return run(*inputs)


class SharedGate(nn.Module):
    """The linear that scores how much a token needs of the shared expert."""

    def __init__(self, config: TransformerConfig) -> None:
        """Create an uninitialized matrix of one row, which every rank of the TP group holds."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.tensor_model_parallel_size > 1  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor) -> Tensor:
        """Score tokens (T, hidden): (T, 1)."""
        return F.linear(tokens, self.weight)


class _TokenCommunication(nn.Module):
    """What a TP group communicates at an end of a mixture, unless `explicit_expert_comm` leaves it to the caller."""

    def __init__(self, config: TransformerConfig, groups: ParallelGroups) -> None:
        super().__init__()
        self.tp_group, self.sequence_parallel = groups.tp, config.sequence_parallel
        self.explicit_expert_comm = False


class TokenGather(_TokenCommunication):
    """The communication before a mixture."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all ranks, of which `tokens` is a shard under sequence parallelism."""
        if self.explicit_expert_comm:
            return tokens
        if self.sequence_parallel:
            return cast(Tensor, gather_from_sequence_parallel_region(tokens, group=self.tp_group))
        return cast(Tensor, copy_to_tensor_model_parallel_region(tokens, group=self.tp_group))


class TokenReduction(_TokenCommunication):
    """The communication behind a mixture."""

    late_bias: Tensor | None = None

    def forward(self, summand: Tensor) -> Tensor:
        """Return the sum over the ranks, of all tokens or of this rank's shard under sequence parallelism."""
        if self.explicit_expert_comm:
            return summand
        if self.sequence_parallel:
            return cast(Tensor, reduce_scatter_to_sequence_parallel_region(summand, group=self.tp_group))
        return cast(Tensor, reduce_from_tensor_model_parallel_region(summand, group=self.tp_group))


class ExpertMlp(nn.Module):
    """The mixture: router, experts and a shared expert. A block calls `up`, then `down`, then `reduction`."""

    def __init__(self, mlp: MoeMlp, config: TransformerConfig, groups: ParallelGroups) -> None:
        """Build uninitialized modules."""
        super().__init__()
        self.top_k, self.num_experts, self.ep_group = mlp.top_k, mlp.experts, groups.ep
        self.columns = _Columns(config.hidden_size, mlp.column_ranks(config.hidden_size, groups.tp_size), groups.tp)
        self.gather = TokenGather(config, groups)
        self.router = Router(mlp, config)
        self.shared = Expert(mlp.shared_ffn, config, groups) if mlp.shared_ffn else None
        self.shared_gate = SharedGate(config) if mlp.shared_gate else None
        held = held_experts(mlp.experts, groups)
        self.experts = Experts({number: Expert(mlp.expert_ffn, config, groups) for number in held})
        self.reduction = TokenReduction(config, groups)
        self.loads = RecordedLoads(mlp.experts)
        self.max_rows: int | None = None  # for which a rank has room at once; None: for any number

    def route(self, hidden: Tensor, packing: PackedSequences | None) -> RoutedTokens:
        """Choose the experts of tokens (T, 1, hidden).

        packing: of the tokens, if they are all of a microbatch; None for chunks of it, whose router has no losses.
        """
        tokens = self.gather(hidden).squeeze(1)
        weights, experts, losses = self.router(tokens, packing)
        return RoutedTokens(tokens, weights, experts, self._count_rows(experts), losses)

    def num_chunks(self, counts: Tensor, max_tokens: int | None) -> int:
        """Return in how many chunks of tokens the mixture must run, which is equal on all ranks of the group.

        Dropless routing may bring one rank the rows of all others. In chunks it never has more than `max_rows` of them
        at once, if every chunk is routed as all tokens are; nor has a rank more than `max_tokens` of its own.
        """
        fullest = int(counts.sum(dim=0).view(len(counts), -1).sum(dim=1).max())
        most_tokens = int(counts.sum(dim=1).max()) // self.top_k
        by_rows = 1 if self.max_rows is None else -(-fullest // self.max_rows)
        return max(1, by_rows, 1 if max_tokens is None else -(-most_tokens // max_tokens))

    def up(self, routed: RoutedTokens) -> tuple[Tensor, Routing, SharedInner]:
        """Compute the inner widths (rows, 2 * ffn / tp) of tokens, in the order of their experts."""
        tokens, weights, experts, counts, losses = routed
        if losses is not None:
            weights = losses.enter(weights)
        order = experts.flatten().argsort(stable=True)
        arrival = order.new_empty(0)
        self.loads.add(counts, 0 if self.ep_group is None else self.ep_group.rank())
        rows = _copy_rows(self.columns.own(tokens), order, self.top_k)
        if self.ep_group is not None:
            arrival = _arrival_order(counts, self.ep_group).to(rows.device)
            rows = _Exchange(counts, self.ep_group).send(rows)
            rows = self.columns.gather(_copy_rows(rows, arrival))
        inner = self._run("linear_fc1", rows, counts)
        return inner, Routing(weights, order, counts, arrival), self._up_shared(tokens)

    def down(self, activated: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sums (T, 1, hidden) of what the experts make of rows (rows, ffn / tp), on this rank."""
        rows = self._run("linear_fc2", activated, routing.counts)
        if self.ep_group is not None:
            rows = self.columns.reduce(rows)  # one name for all, so that none outlives its use
            rows = _return_rows(rows, routing.arrival)
            rows = _Exchange(routing.counts, self.ep_group).send_back(rows)
        rows = _return_rows(rows, routing.order)
        # Products that are summed inside a GEMM exist neither here nor in backward.
        sums = torch.bmm(routing.weights.unsqueeze(1), rows.view(-1, self.top_k, rows.shape[1]))
        return self.columns.beside_zeros(sums)

    def _up_shared(self, tokens: Tensor) -> SharedInner:
        inner = gate = tokens.new_empty(0)
        if self.shared is not None:
            inner = self.shared.linear_fc1(tokens)[0]
        if self.shared_gate is not None:
            gate = self.shared_gate(tokens)
        return SharedInner(inner, gate)

    def down_shared(self, activated: Tensor, gate: Tensor) -> Tensor:
        """Return what the shared expert makes of (T, ffn / tp), as (T, 1, hidden) on this rank."""
        assert self.shared is not None, "the caller asks where there is one"
        output: Tensor = self.shared.linear_fc2(activated)[0]
        if self.shared_gate is not None:
            output = output * gate.sigmoid()
        return output.unsqueeze(1)

    def _count_rows(self, experts: Tensor) -> Tensor:
        """Return how many rows each rank of the expert-parallel group has for each expert, on the host."""
        counts = torch.bincount(experts.flatten(), minlength=self.num_experts)
        if self.ep_group is None:
            return counts.unsqueeze(0).cpu()
        of_ranks = counts.new_empty(self.ep_group.size() * self.num_experts)
        dist.all_gather_into_tensor(of_ranks, counts, group=self.ep_group)
        return of_ranks.view(-1, self.num_experts).cpu()

    def _run(self, linear: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Let each expert compute its rows; those without rows take part, so that adapters meet on all ranks."""
        of_experts = counts[:, self.experts.numbers].sum(dim=0)
        linears = [getattr(expert, linear) for expert in self.experts.held()]
        if all(module.lora is None for module in linears):
            return expert_linear(rows, [module.weight for module in linears], of_experts.tolist())
        parts: Sequence[Tensor] = torch.split(rows, of_experts.tolist())
        return torch.cat([module(part)[0] for module, part in zip(linears, parts, strict=True)])


def held_experts(num_experts: int, groups: ParallelGroups) -> range:
    """Return the experts that this rank holds: consecutive ones, as many as each other rank of its group."""
    if groups.ep is None:
        return range(num_experts)
    num_held = num_experts // groups.ep.size()
    first = groups.ep.rank() * num_held
    return range(first, first + num_held)


def _arrival_order(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the places of rows, arrived sender after sender, in the order of their experts, from `Routing.counts`."""
    size = group.size()
    arriving = counts.view(size, size, -1)[:, group.rank()]
    expert_of_row = torch.arange(arriving.shape[1]).repeat(size).repeat_interleave(arriving.flatten())
    return expert_of_row.argsort(stable=True)


class _Exchange:
    """The exchange of rows in an expert-parallel group, from `Routing.counts` of its ranks."""

    def __init__(self, counts: Tensor, group: dist.ProcessGroup) -> None:
        self._group = group
        size, rank = counts.shape[0], group.rank()
        of_ranks = counts.view(size, size, -1)  # (sender, receiver, experts of the receiver)
        self._sent: list[int] = of_ranks[rank].sum(dim=1).tolist()
        self._received: list[int] = of_ranks[:, rank].sum(dim=1).tolist()

    def send(self, rows: Tensor) -> Tensor:
        """Send rows to the ranks of their experts; return what arrives, in the order of the senders."""
        return cast(Tensor, _AllToAll.apply(rows, self._sent, self._received, self._group))  # type: ignore[no-untyped-call]

    def send_back(self, rows: Tensor) -> Tensor:
        """Return rows in the order of `send`'s result to their senders; return the rank's own."""
        return cast(Tensor, _AllToAll.apply(rows, self._received, self._sent, self._group))  # type: ignore[no-untyped-call]


class _Columns:
    """The columns of rows that a rank of a TP group exchanges with other groups, out of `hidden`; all if it is alone.

    What lies between has gradients of which each rank holds a summand, and so has the part of a rank with zeros beside.
    """

    def __init__(self, hidden: int, num_ranks: int, tp_group: dist.ProcessGroup) -> None:
        self._hidden, self._width, self._group = hidden, hidden // num_ranks, tp_group
        self._first = tp_group.rank() * self._width if num_ranks > 1 else 0

    @property
    def _are_all(self) -> bool:
        return self._width == self._hidden

    def own(self, rows: Tensor) -> Tensor:
        """Return this rank's columns of rows (N, hidden), which all ranks have."""
        return rows if self._are_all else rows[:, self._first : self._first + self._width]

    def gather(self, rows: Tensor) -> Tensor:
        """Return rows (N, hidden) on every rank, of which each has its columns."""
        return self._exchanged(rows, gathers=True)

    def reduce(self, rows: Tensor) -> Tensor:
        """Return this rank's columns of the sum of rows (N, hidden), of which each rank has a summand."""
        return self._exchanged(rows, gathers=False)

    def _exchanged(self, rows: Tensor, *, gathers: bool) -> Tensor:
        if self._are_all:
            return rows
        return cast(Tensor, _ExchangeColumns.apply(rows, self._group, gathers))  # type: ignore[no-untyped-call]

    def beside_zeros(self, sums: Tensor) -> Tensor:
        """Return (..., hidden) with this rank's columns, and zero in those of others: a summand of all."""
        return sums if self._are_all else F.pad(sums, (self._first, self._hidden - self._first - self._width))


class _ExchangeColumns(torch.autograd.Function):
    """Gather columns (N, hidden / ranks) to rows (N, hidden), or sum such rows and keep a rank's columns.

    Each is the backward of the other, as in Megatron-core's mappings of the last dimension. Those would also start a
    collective where no row has arrived.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, gathers: bool) -> Tensor:
        ctx.group, ctx.gathers = group, gathers
        return _gather_columns(rows, group) if gathers else _reduce_columns(rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        given = _reduce_columns(grad, ctx.group) if ctx.gathers else _gather_columns(grad, ctx.group)
        return given, None, None


def _gather_columns(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    num_rows, width, size = *rows.shape, group.size()
    of_ranks = rows.new_empty(size * num_rows, width)
    if num_rows:  # as many on all ranks of the group
        dist.all_gather_into_tensor(of_ranks, rows.contiguous(), group=group)
    return of_ranks.view(size, num_rows, width).transpose(0, 1).reshape(num_rows, size * width)


def _reduce_columns(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    num_rows, width, size = len(rows), rows.shape[1] // group.size(), group.size()
    of_ranks = rows.reshape(num_rows, size, width).transpose(0, 1).reshape(size * num_rows, width)
    own = rows.new_empty(num_rows, width)
    if num_rows:
        dist.reduce_scatter_tensor(own, of_ranks, group=group)
    return own


class _AllToAll(torch.autograd.Function):
    """Exchange rows (N, hidden) in a group; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def _copy_rows(rows: Tensor, order: Tensor, num_copies: int = 1) -> Tensor:
    """Return in each place the row that `order` names there, of rows counted `num_copies` times each."""
    return cast(Tensor, _CopyToExperts.apply(rows, order, num_copies))  # type: ignore[no-untyped-call]


def _return_rows(rows: Tensor, order: Tensor) -> Tensor:
    """Bring each row to the place that `order` names: the way back of `_copy_rows`."""
    return cast(Tensor, _ReturnFromExperts.apply(rows, order))  # type: ignore[no-untyped-call]


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
