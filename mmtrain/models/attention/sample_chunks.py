"""Packed samples cut into chunks of tokens, none of which holds tokens of two samples.

The chunks of all samples that are the n-th of theirs lie together, those of samples with most chunks first. So a state
that passes from chunk to chunk of each sample advances in as many steps as the longest sample has chunks, and the
samples that are left at a step are the first ones.

    samples of 5, 2 and 3 tokens, chunks of 2:   [0 1] [2 3] [4]   [5 6]   [7 8] [9]
    in order:                                    [0 1] [7 8] [5 6]   [2 3] [9 .]   [4 .]
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mmtrain.models.attention.index_tables import HostTable
from mmtrain.models.shapes.layer_shape import DELTA_CHUNK_TOKENS


@dataclass(frozen=True, eq=False)
class SampleChunks:
    """Where the tokens of S packed samples lie in N chunks."""

    num_samples: tuple[int, ...]  # that have a first chunk, a second one, and so on
    size: int  # tokens of a chunk
    slots: Tensor  # (T,) int64: the place of each token among those of all chunks
    places: Tensor  # (T,) int64: the place of each token in its sample

    @property
    def num_chunks(self) -> int:
        """Return N."""
        return sum(self.num_samples)


def samples_by_chunks(lengths: tuple[int, ...], size: int = DELTA_CHUNK_TOKENS) -> tuple[tuple[int, ...], HostTable]:
    """Return the number of samples with an n-th chunk, for each n, and the order (S,) in which samples lie there."""
    counts = -(-np.asarray(lengths, dtype=np.int64) // size)
    order = np.argsort(-counts, kind="stable")
    num_steps = int(counts.max(initial=0))
    # Of samples in this order, those with more than n chunks come first.
    num_samples = np.searchsorted(-counts[order], -np.arange(num_steps), side="left")
    return tuple(map(int, num_samples)), order


def chunk_tables(lengths: tuple[int, ...], size: int = DELTA_CHUNK_TOKENS) -> tuple[HostTable, HostTable]:
    """Return `slots` and `places` of samples of these lengths."""
    num_samples, order = samples_by_chunks(lengths, size)
    of_samples = np.asarray(lengths, dtype=np.int64)
    starts = np.cumsum(of_samples) - of_samples
    places = np.arange(of_samples.sum()) - np.repeat(starts, of_samples)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    firsts = np.cumsum((0, *num_samples), dtype=np.int64)  # chunks before those of each step
    slots = (firsts[places // size] + np.repeat(rank, of_samples)) * size + places % size
    return slots, places
