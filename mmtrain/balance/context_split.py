"""Divide the sequences of a microbatch among the ranks of a context-parallel group, from their lengths alone.

Whole sequences cost no communication, so as few are cut as balance asks for, the longest first. Every rank computes the
same split in microseconds to milliseconds, and the program never changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

# The fullest rank over the mean, in tokens and in attention work, above which `auto` cuts one more sequence. More cuts
# cost communication for all ranks; less balance makes all ranks wait for one.
MAX_IMBALANCE = 1.02


class SequencePiece(NamedTuple):
    """Consecutive tokens [start, stop) of one sequence; none where both are equal."""

    sequence: int  # its place in the microbatch
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return self.stop - self.start


Pieces = tuple[SequencePiece, ...]


@dataclass(frozen=True)
class ContextSplit:
    """Which tokens of a microbatch each rank of a context-parallel group computes.

    A rank's tokens lie in the order of its whole sequences and, behind these, of its pieces of those that are cut.
    """

    lengths: tuple[int, ...]  # (S,) of the sequences
    cut: tuple[int, ...]  # sequences that are cut, ascending
    whole_pieces: tuple[Pieces, ...]  # by rank
    cut_pieces: tuple[Pieces, ...]  # by rank, ascending; by `ring` an early and a late one of every sequence
    work: tuple[float, ...]  # by rank, query-key pairs of causal attention as squared lengths of whole sequences

    @property
    def cp(self) -> int:
        """Return the number of ranks."""
        return len(self.work)

    def pieces(self, rank: int) -> Pieces:
        """Return all pieces of a rank, in the order of its tokens."""
        return self.whole_pieces[rank] + self.cut_pieces[rank]

    @cached_property
    def num_tokens(self) -> tuple[int, ...]:
        """Return the tokens of each rank."""
        return tuple(sum(piece.num_tokens for piece in self.pieces(rank)) for rank in range(self.cp))

    @cached_property
    def num_cut_tokens(self) -> tuple[int, ...]:
        """Return the tokens of cut sequences on each rank."""
        return tuple(sum(piece.num_tokens for piece in pieces) for pieces in self.cut_pieces)

    @property
    def imbalance(self) -> float:
        """Return the fullest rank over the mean, of tokens or of attention work, whichever is less even."""
        return max(_imbalance(self.num_tokens), self.work_over_mean)

    @property
    def work_over_mean(self) -> float:
        """Return the attention work of the fullest rank over the mean."""
        return _imbalance(self.work)


def split_sequences(
    lengths: Sequence[int], cp: int, method: Literal["ulysses", "ring"], split: Literal["auto", "even"]
) -> ContextSplit:
    """Split the sequences of a microbatch among `cp` ranks; `split` and `method` are those of the plan.

    `even` cuts every sequence. `auto` cuts the longest, one more at a time (more once there are many), until tokens and
    attention work of the ranks differ by no more than `MAX_IMBALANCE`. If they never do, it takes the most even split
    that it saw.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if split == "even":
        return _cut_longest(lengths, longest_first, len(lengths), cp, method)
    best: ContextSplit | None = None
    num_cut = 0
    while num_cut <= len(lengths):
        candidate = _cut_longest(lengths, longest_first, num_cut, cp, method)
        if best is None or candidate.imbalance < best.imbalance:
            best = candidate
        if best.imbalance <= MAX_IMBALANCE or num_cut == len(lengths):
            break
        num_cut = min(num_cut + max(1, num_cut // 4), len(lengths))
    assert best is not None
    return best


def _cut_longest(
    lengths: Sequence[int], longest_first: Sequence[int], num_cut: int, cp: int, method: Literal["ulysses", "ring"]
) -> ContextSplit:
    """Cut so many of the longest sequences, and put each of the others on one rank."""
    cut = tuple(sorted(longest_first[:num_cut]))
    tokens, work = [0] * cp, [0.0] * cp
    shared_work = sum(lengths[i] ** 2 for i in cut) / cp
    whole: list[list[SequencePiece]] = [[] for _ in range(cp)]
    mean_tokens = max(sum(lengths) / cp, 1.0)
    mean_work = max(sum(n * n for n in lengths) / cp, 1.0)
    for i in longest_first[num_cut:]:
        rank = min(range(cp), key=lambda r: (max(tokens[r] / mean_tokens, work[r] / mean_work), tokens[r]))
        whole[rank].append(SequencePiece(i, 0, lengths[i]))
        tokens[rank] += lengths[i]
        work[rank] += lengths[i] ** 2
    if method == "ulysses":  # each rank takes as many heads of them, whoever computes their tokens
        pieces = _contiguous_pieces(lengths, cut, tokens)
        work = [of_rank + shared_work for of_rank in work]
    else:
        pieces = _zigzag_pieces(lengths, cut, tokens, work)
        for rank, of_rank in enumerate(pieces):
            work[rank] += sum(piece.stop**2 - piece.start**2 for piece in of_rank)
    return ContextSplit(
        tuple(lengths),
        cut,
        tuple(tuple(sorted(of_rank)) for of_rank in whole),
        tuple(map(tuple, pieces)),
        tuple(work),
    )


def _contiguous_pieces(lengths: Sequence[int], cut: Sequence[int], tokens: list[int]) -> list[list[SequencePiece]]:
    """Deal the cut sequences, laid one after another, out to ranks that hold `tokens` already, so that all get even."""
    room = _fill_evenly(tokens, sum(lengths[i] for i in cut))
    pieces: list[list[SequencePiece]] = [[] for _ in tokens]
    rank = 0
    for i in cut:
        start = 0
        while start < lengths[i]:
            if not room[rank]:
                rank += 1
                continue
            taken = min(room[rank], lengths[i] - start)
            pieces[rank].append(SequencePiece(i, start, start + taken))
            room[rank] -= taken
            start += taken
    return pieces


def _fill_evenly(loads: Sequence[int], amount: int) -> list[int]:
    """Return how much of `amount` to add to each load, so that the largest becomes as small as it can."""
    order = sorted(range(len(loads)), key=lambda r: loads[r])
    filled, level = 1, loads[order[0]]
    left = amount
    while filled < len(order) and (loads[order[filled]] - level) * filled <= left:
        left -= (loads[order[filled]] - level) * filled
        level = loads[order[filled]]
        filled += 1
    each, rest = divmod(left, filled)
    added = [0] * len(loads)
    for place, rank in enumerate(order[:filled]):
        added[rank] = level - loads[rank] + each + (place < rest)
    return added


def _zigzag_pieces(
    lengths: Sequence[int], cut: Sequence[int], tokens: list[int], work: list[float]
) -> list[list[SequencePiece]]:
    """Cut each sequence into 2 * cp chunks; rank i takes chunks i and 2 * cp - 1 - i, so that causal work is even.

    Tokens that the chunks do not share go to ranks that hold the fewest, to their early chunks first.
    """
    cp = len(tokens)
    tokens = list(tokens)
    pieces: list[list[SequencePiece]] = [[] for _ in range(cp)]
    for i in cut:
        each, rest = divmod(lengths[i], 2 * cp)
        sizes = [each] * (2 * cp)
        by_load = sorted(range(cp), key=lambda r: (tokens[r], work[r]))
        for chunk in [*by_load, *(2 * cp - 1 - r for r in by_load)][:rest]:
            sizes[chunk] += 1
        stops = [sum(sizes[: k + 1]) for k in range(2 * cp)]
        for rank in range(cp):
            for chunk in (rank, 2 * cp - 1 - rank):
                pieces[rank].append(SequencePiece(i, stops[chunk] - sizes[chunk], stops[chunk]))
                tokens[rank] += sizes[chunk]
    return pieces


def _imbalance(loads: Sequence[float]) -> float:
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
