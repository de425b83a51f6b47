"""How rows of tokens get to the ranks of their experts and back, with their gradients.

A token goes once to a rank that holds any of its experts, as in DeepEP (github.com/deepseek-ai/DeepEP), with a label
for each of these experts. There the row is copied for them, what they make of it is summed, and one row goes back.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmtrain.models.shapes.layer_shape import COPIES_SUMMED_AT_ONCE


class RowCopies(NamedTuple):
    """Which copies are made of rows, as tensors that travel from one piece of a block to the next."""

    source: Tensor  # (copies,) int64: the row that each is a copy of
    by_row: Tensor  # (copies,) int64: places of copies, those of a row together, rows with fewest copies first
    numbers: Tensor  # int64, on the host: how many rows have no copy, one, two and so on

    @classmethod
    def of(cls, source: Tensor, numbers: Tensor) -> "RowCopies":
        """Return the copies of rows, from the row of each copy and how many rows have how many of them."""
        num_rows = int(numbers.sum())
        num_copies = torch.zeros(num_rows, dtype=torch.int64, device=source.device)
        num_copies.index_add_(0, source, torch.ones_like(source))
        return cls(source, (num_copies[source] * num_rows + source).argsort(stable=True), numbers)


class Labels(NamedTuple):
    """Which experts of a rank compute the rows that it has, row after row."""

    weights: Tensor  # (labels,) fp32: by which the expert's output is multiplied
    rows: Tensor  # (labels,) int64
    experts: Tensor  # (labels,) int64, counted from the first one of the rank


def labels_here(weights: Tensor, experts: Tensor) -> Labels:
    """Return the labels of tokens on a rank that holds all experts, from their weights and experts (T, top_k)."""
    rows = torch.arange(len(experts), device=experts.device).repeat_interleave(experts.shape[1])
    return Labels(weights.float().flatten(), rows, experts.flatten())


class ExpertExchange:
    """The exchange of rows in an expert-parallel group."""

    def __init__(self, rows: Tensor, group: dist.ProcessGroup) -> None:
        """Take the numbers (sender, receiver), on the host, of rows that ranks of the group send each other."""
        self._group = group
        self._sent: list[int] = rows[group.rank()].tolist()
        self._received: list[int] = rows[:, group.rank()].tolist()

    def send(
        self, tokens: Tensor, weights: Tensor, experts: Tensor, counts: Tensor, numbers: Tensor
    ) -> tuple[Tensor, Labels, RowCopies]:
        """Send each token once to each rank that holds experts of it.

        Args:
            tokens: (T, hidden), or a share of the columns.
            weights: (T, top_k) of the tokens' experts.
            experts: (T, top_k) their numbers.
            counts: (ranks, experts) on the host: how many tokens of each rank each expert computes.
            numbers: on the host: how many of the tokens go to no rank, one, two and so on.

        Returns:
            The rows that arrive, sender after sender, their labels, and which rows were sent.
        """
        size, rank = len(counts), self._group.rank()
        held = counts.shape[1] // size
        receiver = experts.flatten() // held
        order = receiver.argsort(stable=True)  # receiver after receiver, token after token
        token = order // experts.shape[1]
        row = receiver[order] * len(tokens) + token
        begins = row.diff(prepend=row.new_full((1,), -1)) != 0  # where a row has its first label
        source = token.new_empty(sum(self._sent)).scatter_(0, begins.cumsum(0) - 1, token)
        copies = RowCopies.of(source, numbers)
        codes = (experts.flatten()[order] % held * 2 + begins).to(torch.int32)
        of_ranks = counts.view(size, size, held).sum(dim=2)
        sizes = (self._sent, self._received), (of_ranks[rank].tolist(), of_ranks[:, rank].tolist())
        weights = weights.float().flatten()[order]
        rows, weights, codes = _SendRows.apply(copy_rows(tokens, copies), weights, codes, sizes, self._group)  # type: ignore[no-untyped-call]
        return rows, Labels(weights, (codes % 2).cumsum(0) - 1, (codes // 2).to(torch.int64)), copies

    def send_back(self, rows: Tensor) -> Tensor:
        """Return rows in the order in which they arrived to their senders; return the rank's own."""
        return cast(Tensor, _AllToAll.apply(rows, self._received, self._sent, self._group))  # type: ignore[no-untyped-call]


class _SendRows(torch.autograd.Function):
    """Send rows (N, hidden), and the weight and code of each label; gradients of rows and weights come back.

    `sizes` are how many rows are sent to each rank and received from it, and how many labels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        codes: Tensor,
        sizes: tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]],
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.sizes, ctx.group = sizes, group
        (sent, received), (labels_sent, labels_received) = sizes
        arrived = _all_to_all(rows, sent, received, group)
        labels = torch.stack([weights.view(torch.int32), codes], dim=1)
        labels = _all_to_all(labels, labels_sent, labels_received, group)
        codes = labels[:, 1].contiguous()
        ctx.mark_non_differentiable(codes)
        return arrived, labels[:, 0].contiguous().view(torch.float32), codes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, weights: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        needs_rows, needs_weights = ctx.needs_input_grad[:2]
        (sent, received), (labels_sent, labels_received) = ctx.sizes
        rows_grad = weights_grad = None
        if needs_rows:
            rows_grad = _all_to_all(rows, received, sent, ctx.group)
        if needs_weights:
            weights_grad = _all_to_all(weights.unsqueeze(1), labels_received, labels_sent, ctx.group).squeeze(1)
        return rows_grad, weights_grad, None, None, None


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


def copy_rows(rows: Tensor, copies: RowCopies) -> Tensor:
    """Return copies of rows (N, hidden)."""
    return cast(Tensor, _CopyRows.apply(rows, *copies))  # type: ignore[no-untyped-call]


def sum_copies(rows: Tensor, copies: RowCopies) -> Tensor:
    """Return for each row the sum of what its copies became (copies, hidden): the way back of `copy_rows`."""
    return cast(Tensor, _SumCopies.apply(rows, *copies))  # type: ignore[no-untyped-call]


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, by_row: Tensor, numbers: Tensor) -> Tensor:
        ctx.save_for_backward(source, by_row)
        ctx.numbers = numbers
        return rows.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source, by_row = ctx.saved_tensors
        return _summed(grad, source, by_row, ctx.numbers), None, None, None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, by_row: Tensor, numbers: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        return _summed(rows, source, by_row, numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (source,) = ctx.saved_tensors
        return grad.index_select(0, source), None, None, None


def _summed(rows: Tensor, source: Tensor, by_row: Tensor, numbers: Tensor) -> Tensor:
    """Return the sums of `RowCopies`, each added up in fp32 and in the order of the copies, and rounded once."""
    sums = rows.new_zeros(int(numbers.sum()), rows.shape[1])
    parts = torch.split(by_row, [number * num_rows for number, num_rows in enumerate(numbers.tolist())])
    for number, part in enumerate(parts):
        if not len(part):
            continue
        for some in torch.split(part, max(1, COPIES_SUMMED_AT_ONCE // number) * number):
            of_rows = rows.index_select(0, some)
            if number > 1:
                of_rows = of_rows.view(-1, number, rows.shape[1]).sum(dim=1)
            sums[source[some[::number]]] = of_rows
    return sums


class Columns:
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
