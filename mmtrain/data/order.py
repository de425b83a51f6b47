"""The endless stream of groups: which samples train together and when, whatever plan, rank or worker asks."""

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from mmtrain.balance import BatchMeta, Groups, IntArray, SampleLengths, assign, pack
from mmtrain.data.index import DataIndex
from mmtrain.errors import DataError


class GroupStream:
    """Groups over epochs, a pure function of (seed, epoch, position).

    An epoch uses a sample of weight w exactly w times; the fraction of a broken weight decides by chance, anew each
    epoch. Groups never mix epochs. Reaching into epoch e counts the groups of every epoch before it once.
    """

    def __init__(
        self,
        lengths: SampleLengths,
        seq_len: int,
        window: int,
        seed: int,
        weights: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Group samples of at most `seq_len` LLM tokens together; `window` bounds how far one may move."""
        self._lengths, self._seq_len, self._window, self._seed = lengths, seq_len, window, seed
        self._weights = np.ones(len(lengths)) if weights is None else weights
        self._starts = [0]  # place in the stream at which each known epoch starts
        self._cached: tuple[int, Groups] | None = None

    def groups(self, first: int, count: int) -> list[IntArray]:
        """Sample numbers of groups [first, first + count) of the stream."""
        return [self._group(place)[1] for place in range(first, first + count)]

    def batch(self, step: int, global_batch: int, dp: Mapping[str, int], num_microbatches: int) -> BatchMeta:
        """Groups [step, step + 1) * global_batch, laid out over `dp["llm"] * num_microbatches` places."""
        epochs, groups = zip(*(self._group(step * global_batch + i) for i in range(global_batch)), strict=True)
        return assign(step, epochs[0], groups, self._lengths, dp, num_microbatches)

    def epoch(self, epoch: int) -> Groups:
        """All groups of one epoch."""
        if self._cached is None or self._cached[0] != epoch:
            rng = np.random.default_rng([self._seed, epoch])
            times = np.floor(self._weights + rng.random(len(self._weights))).astype(np.int64)
            order = rng.permutation(np.repeat(np.arange(len(times), dtype=np.int64), times))
            self._cached = epoch, pack_sequences(self._lengths, self._seq_len, order, self._window)
        return self._cached[1]

    def epochs_done(self, num_groups: int) -> float:
        """Passes over the data that the first `num_groups` groups of the stream make."""
        if num_groups == 0:
            return 0.0
        epoch, _ = self._group(num_groups - 1)
        return epoch + (num_groups - self._starts[epoch]) / len(self.epoch(epoch))

    def _group(self, place: int) -> tuple[int, IntArray]:
        """Epoch and sample numbers of the group at `place`."""
        while place >= self._starts[-1]:
            self._starts.append(self._starts[-1] + len(self.epoch(len(self._starts) - 1)))
        epoch = bisect_right(self._starts, place) - 1
        return epoch, self.epoch(epoch)[place - self._starts[epoch]]


def pack_sequences(lengths: SampleLengths, seq_len: int, order: IntArray, window: int) -> Groups:
    """Pack samples into sequences of at most `seq_len` LLM tokens, the one budget there is."""
    return pack(lengths.tokens[:, None], np.array([seq_len]), order, window)


def validation_batches(
    index: DataIndex, seq_len: int, window: int, dp: Mapping[str, int], num_microbatches: int, limit: int
) -> list[BatchMeta]:
    """At most `limit` global batches of held-out groups, always the same ones; `step` counts them from 0.

    When they fit into fewer, every sample is used exactly once: groups are halved until their number fills the last
    batch. Raises `DataError` if there are fewer samples than one batch has groups.
    """
    per_batch = dp["llm"] * num_microbatches
    order = np.random.default_rng(0).permutation(len(index.lengths))
    packed = pack_sequences(index.lengths, seq_len, order, window)
    groups = [packed[i] for i in range(len(packed))][: limit * per_batch]
    while len(groups) % per_batch:
        largest = max(range(len(groups)), key=lambda i: len(groups[i]))
        whole = groups[largest]
        if len(whole) == 1:
            raise DataError(
                f"data.validation: {len(index.lengths)} usable samples, but a global batch needs {per_batch} groups: "
                "add samples or lower train.global_batch"
            )
        groups[largest : largest + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return [
        assign(i, 0, groups[i * per_batch : (i + 1) * per_batch], index.lengths, dp, num_microbatches)
        for i in range(len(groups) // per_batch)
    ]
