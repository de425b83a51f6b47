"""The loads of all microbatches of the drawn batches as arrays, and what they cost, priced a few at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mmtrain.balance import BatchMeta
from mmtrain.costs import TokenLoad
from mmtrain.program.ir.graph import LLM

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_EXACT_LOADS = 256  # different loads that are priced one by one; of more, these nodes stand for all:
NUM_TOKEN_NODES = 24  # numbers of tokens; costs are nearly linear between them (errors below 0.1% on the presets)


@dataclass(frozen=True)
class LoadArrays:
    """`TokenLoad`s of a unit: arrays of (batches, dp, microbatches)."""

    tokens: IntArray
    sum_sq: IntArray
    max_len: IntArray
    num_sequences: IntArray

    def largest(self) -> TokenLoad:
        """The load with most tokens."""
        return self._at(int(self.tokens.argmax()))

    def total(self, batch: int) -> TokenLoad:
        """All loads of a batch together."""
        tokens, squares, longest, count = (x[batch] for x in self._columns)
        return TokenLoad(int(tokens.sum()), int(squares.sum()), int(longest.max()), int(count.sum()))

    @cached_property
    def distinct(self) -> tuple[list[TokenLoad], IntArray]:
        """Every load that occurs, and for each microbatch which it is."""
        rows, index = np.unique(np.stack([x.ravel() for x in self._columns], axis=1), axis=0, return_inverse=True)
        return [TokenLoad(*map(int, row)) for row in rows], index.reshape(self.tokens.shape)

    @property
    def _columns(self) -> tuple[IntArray, ...]:
        return self.tokens, self.sum_sq, self.max_len, self.num_sequences

    def _at(self, place: int) -> TokenLoad:
        return TokenLoad(*(int(x.flat[place]) for x in self._columns))


def load_arrays(unit: str, metas: Sequence[BatchMeta], dp: int, num_microbatches: int) -> LoadArrays:
    """Sum up what each microbatch of a unit holds in every batch."""
    columns = []
    for meta in metas:
        sizes = meta if unit == LLM else meta.items[unit]
        slot, lengths = sizes.replica * num_microbatches + sizes.index, sizes.tokens
        longest = np.zeros(dp * num_microbatches, dtype=np.int64)
        np.maximum.at(longest, slot, lengths)
        sums = [np.zeros_like(longest) for _ in range(3)]
        for total, values in zip(sums, (lengths, lengths * lengths, np.ones_like(lengths)), strict=True):
            np.add.at(total, slot, values)
        columns.append((sums[0], sums[1], longest, sums[2]))
    return LoadArrays(
        *(np.stack(rows).reshape(len(metas), dp, num_microbatches) for rows in zip(*columns, strict=True))
    )


def seconds_of_loads(seconds: Callable[[TokenLoad], float], loads: LoadArrays) -> FloatArray:
    """Ask for the cost of every load; of very many different ones, between nodes.

    Between nodes the cost is a line in tokens, with the slopes in squared lengths and in sequences apart.
    """
    distinct, index = loads.distinct
    if len(distinct) <= MAX_EXACT_LOADS:
        return np.array([seconds(load) for load in distinct])[index]
    tokens, squares, count = (x.astype(np.float64) for x in (loads.tokens, loads.sum_sq, loads.num_sequences))
    nodes = np.unique(np.linspace(max(tokens[tokens > 0].min(), 1), tokens.max(), NUM_TOKEN_NODES).astype(np.int64))
    per_token = squares.sum() / tokens.sum(), count.sum() / tokens.sum()
    longest = int(loads.max_len.max())
    base, by_square, by_sequence = [], [], []
    for node in nodes.tolist():
        square, sequences = max(int(node * per_token[0]), 2), max(int(node * per_token[1]), 2)
        here = seconds(TokenLoad(node, square, min(longest, node), sequences))
        base.append(here)
        by_square.append((seconds(TokenLoad(node, 2 * square, min(longest, node), sequences)) - here) / square)
        by_sequence.append((seconds(TokenLoad(node, square, min(longest, node), 2 * sequences)) - here) / sequences)
    sequences_at, squares_at = (np.maximum(np.floor(tokens * x), 2) for x in (per_token[1], per_token[0]))
    found = np.interp(tokens, nodes, base)
    found += np.interp(tokens, nodes, by_square) * (squares - squares_at)
    found += np.interp(tokens, nodes, by_sequence) * (count - sequences_at)
    return np.where(tokens > 0, np.maximum(found, 0.0), 0.0)
