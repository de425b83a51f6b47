"""Mixers of tokens whose sequences lie on several ranks.

Sequences that are whole on a rank need no other rank. Of those that are cut, by `ulysses` (arXiv 2309.14509) an
all-to-all gives every rank all tokens for some of the heads; by `ring` keys and values go round. Mixers whose heads
have a state that passes from token to token can only exchange heads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mmtrain.models.attention.backends import attend
from mmtrain.models.attention.index_tables import HostTables
from mmtrain.models.attention.options import AttentionBackend, AttentionOptions
from mmtrain.models.attention.ring import Ring, attend_in_ring
from mmtrain.models.attention.sequence_layout import SequenceLayout, Spans


@dataclass(frozen=True)
class RowExchange:
    """Rows that the ranks of a group send each other: each sends some of those that it has to those that need them."""

    sent: Tensor  # (R,) int64 rows of this rank, in the order of the ranks that receive them
    num_sent: tuple[int, ...]  # by receiving rank
    num_received: tuple[int, ...]  # by sending rank


@dataclass(frozen=True)
class ContextShare:
    """This rank's tokens: those of its whole sequences and, behind them, its pieces of sequences that are cut."""

    rank: int  # in the context-parallel group
    method: Literal["ulysses", "ring"]
    starts: tuple[int, ...]  # of each of `TextInput.lengths`: the position of its first token in its sequence
    whole_lengths: tuple[int, ...]  # of the sequences that are whole here
    cut_lengths: tuple[int, ...]  # of all sequences that are cut, wherever their tokens are
    pieces: tuple[tuple[int, ...], ...]  # by rank: tokens of each of its pieces, for `ring` two of each cut sequence
    sequences: tuple[int, ...] = ()  # of each of `TextInput.lengths`: its sequence in the whole microbatch
    num_sequences: int = 0  # of the whole microbatch
    whole_spans: Spans = ()  # `TextInput.image_spans` of the whole sequences
    cut_spans: Spans = ()  # likewise of the cut sequences, laid one after another
    # Encoder unit -> how rows that it sent to ranks without the tokens they belong to get there; absent: all are there.
    features: Mapping[str, RowExchange] = field(default_factory=dict)

    @property
    def num_whole_tokens(self) -> int:
        """Return the tokens of the sequences that are whole here."""
        return sum(self.whole_lengths)

    @property
    def num_cut_tokens(self) -> tuple[int, ...]:
        """Return by rank the tokens of cut sequences."""
        return tuple(map(sum, self.pieces))


def exchange_rows(
    rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send rows (R, ...) to all ranks of the group and return those that they send, both in the order of the ranks.

    All ranks call this together, and again in backward. num_sent, num_received: rows to and from each of them.
    """
    exchanged: Tensor = _RowExchange.apply(  # type: ignore[no-untyped-call]
        rows, tuple(num_sent), tuple(num_received), group
    )
    return exchanged


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, num_sent: tuple[int, ...], num_received: tuple[int, ...], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.num_sent, ctx.num_received, ctx.group = num_sent, num_received, group
        return _exchange(rows, num_sent, num_received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        return _exchange(gradient, ctx.num_received, ctx.num_sent, ctx.group), None, None, None


def _exchange(
    rows: Tensor, num_sent: tuple[int, ...], num_received: tuple[int, ...], group: dist.ProcessGroup
) -> Tensor:
    received = rows.new_empty(sum(num_received), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), list(num_received), list(num_sent), group=group)
    return received


@dataclass(frozen=True, eq=False)
class SharedMixing:
    """Mixes a rank's share of the tokens of a microbatch; all blocks of a stage use one object."""

    share: ContextShare
    group: dist.ProcessGroup  # of the ranks that share the sequences
    tables: Mapping[str, Tensor] | None = field(default=None, repr=False)  # `host_tables` that came to the device

    @cached_property
    def whole_layout(self) -> SequenceLayout:
        """Return the sequences that are whole on this rank."""
        return SequenceLayout(self.share.whole_lengths, self.share.whole_spans, "whole sequences", self.tables)

    @cached_property
    def cut_layout(self) -> SequenceLayout:
        """Return the sequences that are cut, with the tokens of all ranks."""
        return SequenceLayout(self.share.cut_lengths, self.share.cut_spans, "cut sequences", self.tables)

    def host_tables(self, backend: AttentionBackend) -> HostTables:
        """Compute the tables that a backend needs of these sequences on the device."""
        tables = self.whole_layout.host_tables(backend) if self.whole_layout.num_tokens else {}
        if self.share.method == "ulysses" and self.cut_layout.num_tokens:
            tables |= self.cut_layout.host_tables(backend)
        return tables

    def host_chunk_tables(self) -> HostTables:
        """Compute the tables that the gated delta rule needs of these sequences on the device."""
        tables = self.whole_layout.host_chunk_tables() if self.whole_layout.num_tokens else {}
        return tables | (self.cut_layout.host_chunk_tables() if self.cut_layout.num_tokens else {})

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Attend: q (T, heads, d), k and v (T, kv_heads, d) -> (T, heads, d); T may count rows of padding at the end.

        All ranks of the group call this together where any sequence is cut, also those without tokens of one.
        """
        num_whole, num_cut = self.share.num_whole_tokens, self.share.num_cut_tokens[self.share.rank]
        parts = []
        if num_whole:
            parts.append(attend(q[:num_whole], k[:num_whole], v[:num_whole], self.whole_layout, options))
        if self.cut_layout.num_tokens:
            of_cut = slice(num_whole, num_whole + num_cut)
            attend_cut = self._attend_by_heads if self.share.method == "ulysses" else self._attend_in_ring
            parts.append(attend_cut(q[of_cut], k[of_cut], v[of_cut], options))
        parts.append(torch.zeros_like(q[num_whole + num_cut :]))
        if num_whole + num_cut == 0:
            parts.append((q[:0].sum() + k[:0].sum() + v[:0].sum()) * q[:0])  # projections get a gradient of zero
        return torch.cat(parts)

    def mix(self, x: Tensor, mix_heads: Callable[[Tensor, SequenceLayout, slice], Tensor]) -> Tensor:
        """Mix tokens by each head alone: x (T, heads, d) -> (T, heads, d'); T may count rows of padding at the end.

        All ranks of the group call this together where any sequence is cut, also those without tokens of one.

        mix_heads: of n tokens of some heads (n, h, d), how their sequences lie and which heads these are, (n, h, d').
        """
        assert self.share.method == "ulysses", "the recipe's checks allow no ring for states of heads"
        num_heads, rank = x.shape[1], self.share.rank
        num_whole, num_cut = self.share.num_whole_tokens, self.share.num_cut_tokens[rank]
        parts = []
        has_cut = self.cut_layout.num_tokens > 0
        if num_whole or not has_cut:  # of no tokens at all, so that weights get a gradient of zero
            # A slice beside copies of other tokens would keep these too until backward.
            whole = x[:num_whole].clone() if has_cut else x[:num_whole]
            parts.append(mix_heads(whole, self.whole_layout, slice(0, num_heads)))
        if has_cut:
            num_own = num_heads // self.group.size()
            own_heads = slice(rank * num_own, (rank + 1) * num_own)
            heads = self._exchange_for_heads(x[num_whole : num_whole + num_cut])
            parts.append(self._exchange_for_tokens(mix_heads(heads, self.cut_layout, own_heads)))
        num_padding_rows = len(x) - num_whole - num_cut
        return F.pad(torch.cat(parts), (0, 0, 0, 0, 0, num_padding_rows))

    def _attend_by_heads(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Exchange tokens for heads, attend inside whole sequences, and exchange back."""
        cp = self.group.size()
        if k.shape[1] < cp:  # several ranks need the same head
            k, v = (x.repeat_interleave(cp // x.shape[1], dim=1) for x in (k, v))
        num_heads, num_kv_heads = q.shape[1] // cp, k.shape[1] // cp
        heads = self._exchange_for_heads(q, k, v)
        own_q, own_k, own_v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        return self._exchange_for_tokens(attend(own_q, own_k, own_v, self.cut_layout, options))

    def _exchange_for_heads(self, *tensors: Tensor) -> Tensor:
        """Exchange this rank's tokens of cut sequences, (n, heads, d), for all tokens of its heads of each tensor.

        Returns (N, heads of all tensors / cp, d).
        """
        cp = self.group.size()
        by_rank = torch.cat([_by_rank(x, cp) for x in tensors], dim=2).transpose(0, 1).flatten(0, 1)
        # Ranks hold consecutive runs of the cut sequences, so what they send, in their order, are these sequences.
        return exchange_rows(by_rank, (len(tensors[0]),) * cp, self.share.num_cut_tokens, self.group)

    def _exchange_for_tokens(self, heads: Tensor) -> Tensor:
        """Exchange all tokens of this rank's heads, (N, heads / cp, d), for all heads of its tokens, (n, heads, d)."""
        cp, counts = self.group.size(), self.share.num_cut_tokens
        num_tokens = counts[self.share.rank]
        returned = exchange_rows(heads, counts, (num_tokens,) * cp, self.group)
        return returned.view(cp, num_tokens, *heads.shape[1:]).transpose(0, 1).flatten(1, 2)

    def _attend_in_ring(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        assert options.causal, "the recipe's checks allow rings for causal attention alone"
        assert not options.window, "nor with windows"
        assert not self.share.cut_spans, "nor with spans"
        scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
        ring = Ring(self.group, self.share.rank, self.share.pieces, scale, options.backend == "reference")
        return attend_in_ring(q, k, v, ring)


def _by_rank(x: Tensor, cp: int) -> Tensor:
    """Divide the heads of (T, heads, d) among ranks: (T, cp, heads / cp, d)."""
    return x.view(x.shape[0], cp, x.shape[1] // cp, x.shape[2])
