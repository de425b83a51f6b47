"""The arrays that balancing reads and writes: lengths of samples in, the layout of one global batch out.

They hold lengths and places, never payload. So every rank computes the same layout and nobody has to negotiate shapes,
and the planner computes it for a cluster that does not exist.
"""

from dataclasses import dataclass

import numpy as np

from mmtrain.balance.check_lengths import check_lengths
from mmtrain.balance.columns import FloatArray as FloatArray
from mmtrain.balance.columns import IntArray as IntArray
from mmtrain.balance.columns import LengthColumn, Lengths, SampleValues, block_slices


@dataclass(frozen=True)
class ItemLengths:
    """The items (images, clips) of all samples for one encoder; [first[s], first[s + 1]) belong to sample s.

    A clip is a grid of one column: its rows are log-mel frames, two of which make a token. Raises ValueError for
    lengths that are not whole numbers from 0 to 2^40.
    """

    first: Lengths  # (S + 1,)
    rows: Lengths  # (I,) patch rows of the grid
    cols: Lengths  # (I,) patch columns of the grid
    tokens: Lengths  # (I,) tokens the encoder's blocks see (rows * cols plus a class token; half a clip's frames)
    features: Lengths  # (I,) LLM tokens the item becomes after downsampling

    def __post_init__(self) -> None:
        for name in ("first", "rows", "cols", "tokens", "features"):
            _check_array(f"{name} of items", getattr(self, name))


def _check_array(name: str, lengths: Lengths) -> None:
    """Check lengths in memory; those of a column were checked when it was made."""
    if not isinstance(lengths, LengthColumn):
        check_lengths(name, lengths)


def item_rows(items: ItemLengths, samples: IntArray) -> tuple[IntArray, IntArray]:
    """Find the items of `samples` (k,), sample by sample.

    Returns (n,) the place of each item's sample in `samples`, and (n,) the item's row in `items`.
    """
    counts = items.first[samples + 1] - items.first[samples]
    owner = np.repeat(np.arange(len(samples), dtype=np.int64), counts)
    within = np.arange(len(owner), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, items.first[samples[owner]] + within


@dataclass(frozen=True)
class SampleLengths:
    """Lengths of every usable sample of a dataset.

    Raises ValueError for lengths that are not whole numbers from 0 to 2^40.
    """

    tokens: Lengths  # (S,) LLM tokens, image tokens included
    targets: Lengths  # (S,) tokens that count in the loss
    items: dict[str, ItemLengths]  # encoder unit -> its items
    uses: SampleValues | None = None  # (S,) how often training uses each sample, in proportion; None: all alike

    def __post_init__(self) -> None:
        _check_array("tokens of samples", self.tokens)
        _check_array("targets of samples", self.targets)

    def __len__(self) -> int:
        return len(self.tokens)


class SampleTokens:
    """The tokens of samples under each unit, the LLM's first, summed over a sample's items when they are asked for."""

    def __init__(self, lengths: SampleLengths, most: IntArray | None = None, counts_items: bool = False) -> None:
        """Sum `lengths`; a sample has at most `most` (m,). counts_items: count items instead of their tokens."""
        self._lengths = lengths
        self._most = most
        self._counts_items = counts_items

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of samples, and of units."""
        return len(self._lengths), 1 + len(self._lengths.items)

    def __getitem__(self, samples: IntArray) -> IntArray:
        """Return (k, units) of `samples` (k,)."""
        columns = [self._lengths.tokens[samples]]
        for _, items in sorted(self._lengths.items.items()):
            counts = items.first[samples + 1] - items.first[samples]
            if not self._counts_items:
                ends = np.cumsum(counts)
                tokens_before = np.concatenate([[0], np.cumsum(items.tokens[item_rows(items, samples)[1]])])
                counts = tokens_before[ends] - tokens_before[ends - counts]
            columns.append(counts)
        tokens = np.stack(columns, axis=1).astype(np.int64)
        return tokens if self._most is None else np.minimum(tokens, self._most)


def mean_tokens(lengths: SampleLengths) -> FloatArray:
    """Return (units,) the mean tokens of a sample under each unit, the LLM's first, as often as training uses it."""
    units = [lengths.tokens, *(items.tokens for _, items in sorted(lengths.items.items()))]
    if lengths.uses is None:
        return np.array([float(column.sum()) for column in units]) / max(len(lengths), 1)
    tokens, totals, total_uses = SampleTokens(lengths), np.zeros(len(units)), 0.0
    for rows in block_slices(len(lengths)):
        uses = lengths.uses[rows]
        totals += (tokens[np.arange(rows.start, rows.stop)] * uses[:, None]).sum(axis=0)
        total_uses += float(uses.sum())
    return totals / total_uses


@dataclass(frozen=True)
class ItemTable:
    """The items of one global batch that one encoder processes; one row per item.

    Rows are ordered by (replica, index, order inside the microbatch), which is the order of features in the encoder's
    microbatch. Items of one sample keep their order through `position`.
    """

    sample: IntArray  # (I,) row of `BatchMeta.sample_id` the item belongs to
    position: IntArray  # (I,) which of the sample's items it is, from 0
    rows: IntArray  # (I,)
    cols: IntArray  # (I,)
    tokens: IntArray  # (I,)
    features: IntArray  # (I,)
    replica: IntArray  # (I,) encoder replica
    index: IntArray  # (I,) encoder microbatch index

    def microbatch(self, replica: int, index: int) -> IntArray:
        """Return the rows of the items in one encoder microbatch, in feature order."""
        return np.flatnonzero((self.replica == replica) & (self.index == index)).astype(np.int64)


@dataclass(frozen=True)
class BatchMeta:
    """One global batch: its samples, where each goes, and its items per encoder; identical on every rank.

    Rows are ordered by (replica, index, order inside the group), which is the order of sequences in the packed LLM
    microbatch.
    """

    step: int  # optimizer step this batch belongs to, from 0
    epoch: int  # epoch of its first group
    sample_id: IntArray  # (S,) index into the dataset
    tokens: IntArray  # (S,) that the LLM computes
    targets: IntArray  # (S,)
    replica: IntArray  # (S,) LLM replica
    index: IntArray  # (S,) LLM microbatch index
    items: dict[str, ItemTable]  # encoder unit -> its items
    padding: IntArray | None = None  # (S,) how many of `tokens` stand behind a sample to pad it; None: none of any
    stream_group: IntArray | None = None  # (S,) in which group of the stream's step it is; None: not of the stream

    @property
    def sample_tokens(self) -> IntArray:
        """Return (S,) the tokens of the samples themselves."""
        return self.tokens if self.padding is None else self.tokens - self.padding

    @property
    def total_targets(self) -> int:
        """Count the target tokens of the whole global batch: the loss's denominator."""
        return int(self.targets.sum())

    def microbatch(self, replica: int, index: int) -> IntArray:
        """Return the rows of the samples in one LLM microbatch, in packing order."""
        return np.flatnonzero((self.replica == replica) & (self.index == index)).astype(np.int64)
