"""A mixture of experts in the place of a block's MLP (arXiv 1701.06538), on tokens packed as (T, 1, features).

A router scores all experts for each token, and the `top_k` best compute it; no token is dropped. Tokens are copied in
the order of their experts, so that each expert computes consecutive rows, and what it makes goes back to its token.

Tensor parallelism splits every expert as it splits a dense MLP. Its ranks route the same tokens alike; what lies
between the gather before and the reduction behind the mixture has gradients of which each rank holds a summand.

With expert parallelism (GShard, arXiv 2006.16668) a rank holds consecutive experts, and an all-to-all brings it the
tokens of the whole group that have any of them, each once (see `expert_exchange`). Ranks without rows take part in it
too. The ranks of a TP group route the same tokens, so each exchanges its columns of the rows alone, and they put these
together where the rows arrive. Rows are weighted before an expert's last linear, which is the same as behind it: so
nothing that comes back is kept for gradients of the weights, and a rank sums what its experts make of a token.
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

from mmtrain.models.attention.packed_sequences import PackedSequences
from mmtrain.models.kernels.grouped_gemm import expert_linear
from mmtrain.models.megatron.expert_exchange import (
    Columns,
    ExpertExchange,
    RowCopies,
    copy_rows,
    labels_here,
    sum_copies,
)
from mmtrain.models.megatron.lora import ColumnLinear, RowLinear
from mmtrain.models.megatron.parallel_groups import ParallelGroups
from mmtrain.models.megatron.router import Router, RouterLosses
from mmtrain.models.shapes.layer_shape import MoeMlp


class RowCounts(NamedTuple):
    """How many rows the ranks of an expert-parallel group have for its experts, on the host: int64."""

    of_experts: Tensor  # (ranks, experts): tokens of each rank that an expert computes
    of_ranks: Tensor  # (senders, receivers, copies + 1): tokens with no expert on the receiver, with one, two and so on
    of_tokens: Tensor  # (ranks, ranks + 1): tokens of each rank that go to no rank, to one, two and so on

    @classmethod
    def of(cls, experts: Tensor, num_experts: int, ep_group: dist.ProcessGroup | None) -> "RowCounts":
        """Count those of (T, top_k) experts, and gather what the other ranks of the group count."""
        ep = 1 if ep_group is None else ep_group.size()
        num_tokens, top_k = experts.shape
        most = min(top_k, num_experts // ep)
        token = torch.arange(num_tokens, device=experts.device).unsqueeze(1)
        pairs = (token * ep + experts // (num_experts // ep)).flatten()
        on_ranks = torch.bincount(pairs, minlength=num_tokens * ep).view(num_tokens, ep)
        receiver = torch.arange(ep, device=experts.device)
        counts = (
            torch.bincount(experts.flatten(), minlength=num_experts),
            torch.bincount((receiver * (most + 1) + on_ranks).flatten(), minlength=ep * (most + 1)),
            torch.bincount((on_ranks > 0).sum(dim=1), minlength=ep + 1),
        )
        own = torch.cat(counts)
        of_ranks = own.unsqueeze(0)
        if ep_group is not None:
            of_ranks = own.new_empty(ep, len(own))
            dist.all_gather_into_tensor(of_ranks.view(-1), own, group=ep_group)
        of_experts, rows, tokens = torch.split(of_ranks.cpu(), [len(count) for count in counts], dim=1)
        return cls(of_experts, rows.reshape(ep, ep, most + 1), tokens)

    @property
    def sent(self) -> Tensor:
        """Return how many rows ranks send to others, (senders, receivers)."""
        return self.of_ranks[:, :, 1:].sum(dim=2)

    def arriving(self, rank: int) -> Tensor:
        """Return of how many rows that arrive at a rank it makes no copy, one, two and so on."""
        numbers = self.of_ranks[:, rank].sum(dim=0)
        numbers[0] = 0  # these are not sent
        return numbers


class Routing(NamedTuple):
    """Which rows the experts of this rank compute, and where these came from."""

    weights: Tensor  # (rows, 1) fp32: of the rows, the first expert's first
    of_experts: Tensor  # see `RowCounts`
    sent_rows: Tensor  # (senders, receivers) int64, on the host; empty without expert parallelism
    copies: RowCopies  # for experts, of the rows that arrived, or of this rank's tokens
    sent: RowCopies  # of this rank's tokens, which went to the ranks of the group; empty without one

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, which travel from one piece of a block to the next."""
        return (*self[:3], *self.copies, *self.sent)

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor]) -> "Routing":
        """Return what `tensors` gave."""
        weights, of_experts, sent_rows, *copies = tensors
        return cls(weights, of_experts, sent_rows, RowCopies(*copies[:3]), RowCopies(*copies[3:]))


class RoutedTokens(NamedTuple):
    """Tokens whose experts are chosen."""

    tokens: Tensor  # (T, hidden)
    weights: Tensor  # (T, top_k)
    experts: Tensor  # (T, top_k)
    counts: RowCounts
    losses: RouterLosses | None  # of the router, whose gradients have not entered yet


class RecordedLoads:
    """How many rows the experts of a mixture computed in the passes of a step that train, as numbers to be summed.

    Sums over the ranks of a run weigh each pass by its rows.
    """

    def __init__(self, num_experts: int) -> None:
        self._sums = torch.zeros(num_experts + 3, dtype=torch.float64)

    def add(self, counts: Tensor, rank: int) -> None:
        """Add a pass of this rank, from `RowCounts.of_experts`; one that is run again for its backward counts once."""
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
            # Halves of an adapter that all ranks hold have summands of gradients, as the router's weight has.
            linear.sequence_parallel = groups.tp_size > 1


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
        self.columns = Columns(config.hidden_size, mlp.column_ranks(config.hidden_size, groups.tp_size), groups.tp)
        self.gather = TokenGather(config, groups)
        self.router = Router(mlp, config)
        self.shared = Expert(mlp.shared_ffn, config, groups) if mlp.shared_ffn else None
        self.shared_gate = SharedGate(config) if mlp.shared_gate else None
        held = held_experts(mlp.experts, groups)
        self.experts = Experts({number: Expert(mlp.expert_ffn, config, groups) for number in held})
        self.reduction = TokenReduction(config, groups)
        self.loads = RecordedLoads(mlp.experts)
        self.max_rows: int | None = None  # for which a rank has room at once; None: for any number
        self.anchor: Tensor | None = None  # see `join_backward`

    def join_backward(self) -> None:
        """Let this rank, none of whose experts trains, take part in every backward of the group: others' do.

        Else it would leave out the exchanges of a backward in which nothing below the mixture trains.
        """
        device = next(self.experts.parameters()).device
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    @property
    def trained(self) -> list[Tensor]:
        """Return what of the mixture has a gradient."""
        anchors = [] if self.anchor is None else [self.anchor]
        return [*(weight for weight in self.parameters() if weight.requires_grad), *anchors]

    def route(self, hidden: Tensor, packing: PackedSequences | None) -> RoutedTokens:
        """Choose the experts of tokens (T, 1, hidden).

        packing: of the tokens, if they are all of a microbatch; None for chunks of it, whose router has no losses.
        """
        tokens = self.gather(hidden).squeeze(1)
        weights, experts, losses = self.router(tokens, packing)
        return RoutedTokens(tokens, weights, experts, self._count_rows(experts), losses)

    def _count_rows(self, experts: Tensor) -> RowCounts:
        return RowCounts.of(experts, self.num_experts, self.ep_group)

    def num_chunks(self, counts: RowCounts, max_tokens: int | None) -> int:
        """Return in how many chunks of tokens the mixture must run, which is equal on all ranks of the group.

        Dropless routing may bring one rank the rows of all others. In chunks it never has more than `max_rows` of them
        at once, if every chunk is routed as all tokens are; nor has a rank more than `max_tokens` of its own.
        """
        of_experts = counts.of_experts
        fullest = int(of_experts.sum(dim=0).view(len(of_experts), -1).sum(dim=1).max())
        most_tokens = int(of_experts.sum(dim=1).max()) // self.top_k
        by_rows = 1 if self.max_rows is None else -(-fullest // self.max_rows)
        return max(1, by_rows, 1 if max_tokens is None else -(-most_tokens // max_tokens))

    def up(self, routed: RoutedTokens) -> tuple[Tensor, Routing, SharedInner]:
        """Compute the inner widths (rows, 2 * ffn / tp) of tokens, in the order of their experts."""
        tokens, weights, experts, counts, losses = routed
        if losses is not None:
            weights = losses.enter(weights)
        rank = 0 if self.ep_group is None else self.ep_group.rank()
        self.loads.add(counts.of_experts, rank)
        sent_rows = counts.sent.new_empty(0)
        sent = RowCopies(*(experts.new_empty(0),) * 2, sent_rows)
        if self.ep_group is None:
            rows, labels = tokens, labels_here(weights, experts)
        else:
            sent_rows = counts.sent
            exchange = ExpertExchange(sent_rows, self.ep_group)
            own = self.columns.own(tokens)
            rows, labels, sent = exchange.send(own, weights, experts, counts.of_experts, counts.of_tokens[rank])
            rows = self.columns.gather(rows)
        order = labels.experts.argsort(stable=True)
        copies = RowCopies.of(labels.rows[order], counts.arriving(rank))
        rows = copy_rows(rows, copies)  # one name for all, so that none outlives its use
        if self.anchor is not None:
            rows = cast(Tensor, _Anchored.apply(rows, self.anchor))  # type: ignore[no-untyped-call]
        routing = Routing(labels.weights[order].unsqueeze(1), counts.of_experts, sent_rows, copies, sent)
        return self._run("linear_fc1", rows, counts.of_experts), routing, self._up_shared(tokens)

    def down(self, activated: Tensor, routing: Routing) -> Tensor:
        """Return the sums (T, 1, hidden) of what the experts make of weighted rows (rows, ffn / tp), on this rank."""
        rows = self._run("linear_fc2", activated, routing.of_experts)
        rows = sum_copies(rows, routing.copies)
        if self.ep_group is not None:
            rows = self.columns.reduce(rows)
            rows = ExpertExchange(routing.sent_rows, self.ep_group).send_back(rows)
            rows = sum_copies(rows, routing.sent)
        return self.columns.beside_zeros(rows.unsqueeze(1))

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

    def _run(self, linear: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Let each expert compute its rows, with its adapter if they have one.

        What an adapter makes of a shard of the inner width is a summand, so that its halves need no exchange between.
        """
        sizes = counts[:, self.experts.numbers].sum(dim=0).tolist()
        linears = [getattr(expert, linear) for expert in self.experts.held()]
        out = expert_linear(rows, [module.weight for module in linears], sizes)
        adapters = [module.lora for module in linears if module.lora is not None]
        if not adapters:
            return out
        low = expert_linear(rows, [adapter.a for adapter in adapters], sizes)
        return out + expert_linear(low * adapters[0].scale, [adapter.b for adapter in adapters], sizes)


def held_experts(num_experts: int, groups: ParallelGroups) -> range:
    """Return the experts that this rank holds: consecutive ones, as many as each other rank of its group."""
    if groups.ep is None:
        return range(num_experts)
    num_held = num_experts // groups.ep.size()
    first = groups.ep.rank() * num_held
    return range(first, first + num_held)


class _Anchored(torch.autograd.Function):
    """Pass rows on; they have a gradient because an anchor has one, which is zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_zeros(())
