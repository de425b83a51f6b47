"""What a rank of a context-parallel group computes of a microbatch whose sequences it shares with the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from mmtrain.models.attention.sequence_layout import Spans


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
