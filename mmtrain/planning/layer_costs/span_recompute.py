"""What a span of layers must recompute so that a model chunk fits into memory, worked out for the spans in question."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mmtrain.planning.layer_costs.recompute import kinds_by_ratio, span_recompute

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

ROUNDING = 1e-9  # relative slack for sums of floats in another order
# Spans that are worked out together: some ten arrays of so many numbers, 2 MB each, are alive at once.
MAX_SPANS_AT_ONCE = 2**18


@dataclass(frozen=True, eq=False)
class SpanRecompute:
    """Bytes of the layers of a chain in each of its chunks, as sums over the layers before: see `recompute_to_fit`."""

    limit_bytes: float  # of a chunk
    kept_until: FloatArray  # (chunks, L + 1) of all microbatches in flight, without recomputation
    saved_until: FloatArray  # (chunks, L + 1) of that, what recomputation saves
    state_until: FloatArray  # (L + 1,)
    working: FloatArray  # (L + 1, L + 1) of spans [lo, hi), if their rank holds one chunk
    recompute_working: FloatArray  # (L + 1, L + 1) the same with recomputation
    vpp: int  # chunks of a rank, which share that
    saved_of_kind: FloatArray  # (chunks, K) by one layer of each kind
    seconds_of_kind: FloatArray  # (K,) of recomputing one layer of each kind
    num_of_kind_until: FloatArray  # (L + 1, K) layers of each kind

    def seconds(self, chunk: IntArray, lo: IntArray, hi: IntArray) -> FloatArray:
        """Return the seconds of recomputation that chunks need with layers [lo, hi) to fit; infinite if they cannot.

        The arrays are broadcast to one shape, which the result has. Empty spans, with lo of hi or more, need none.
        """
        shape = np.broadcast_shapes(chunk.shape, lo.shape, hi.shape)
        num_rows = max(1, MAX_SPANS_AT_ONCE // max(1, math.prod(shape[1:])))
        if not shape or shape[0] <= num_rows:
            return self._seconds(chunk, lo, hi)
        seconds = np.empty(shape)
        for first in range(0, shape[0], num_rows):
            rows = slice(first, first + num_rows)
            seconds[rows] = self._seconds(*(_rows_of(of_each, rows, len(shape)) for of_each in (chunk, lo, hi)))
        return seconds

    def _seconds(self, chunk: IntArray, lo: IntArray, hi: IntArray) -> FloatArray:
        """Do as `seconds`, for all spans at once."""
        # What depends on the span alone is worked out before spans are repeated for each chunk.
        lo, hi = np.broadcast_arrays(lo, hi)
        state = self.state_until[hi] - self.state_until[lo] - self.limit_bytes
        excess = self.kept_until[chunk, hi] - self.kept_until[chunk, lo] + state
        needs_some = (excess + self.working[lo, hi] / self.vpp > 0) & (lo < hi)
        seconds = np.where(needs_some, np.inf, 0.0)
        some = np.nonzero(needs_some)
        chunk, lo, hi = (np.broadcast_to(of_each, needs_some.shape)[some] for of_each in (chunk, lo, hi))
        excess = excess[some] + self.recompute_working[lo, hi] / self.vpp
        # Few of these fit with recomputation; only for them the seconds are worked out.
        fits = excess <= self.saved_until[chunk, hi] - self.saved_until[chunk, lo]
        chunk, lo, hi = (of_each[fits] for of_each in (chunk, lo, hi))
        seconds[tuple(of_axis[fits] for of_axis in some)] = span_recompute(
            self.saved_of_kind.T.take(chunk, axis=1),
            self.seconds_of_kind,
            self.num_of_kind_until.T.take(hi, axis=1) - self.num_of_kind_until.T.take(lo, axis=1),
            excess[fits],
            self._order_of_kinds,
        )
        return seconds

    @cached_property
    def _order_of_kinds(self) -> list[int]:
        """Kinds in the order in which layers are recomputed: the same for all spans, whichever are asked about."""
        return kinds_by_ratio(self.saved_of_kind.T, self.seconds_of_kind)

    def may_fit(self) -> BoolArray:
        """Return (L + 1, L + 1) whether the layers [lo, hi) may fit into some chunk: no other span does."""
        kept = np.diff(self.kept_until - self.saved_until, axis=1).min(axis=0)
        least_until = prefix_sums(kept) + self.state_until
        working = np.minimum(self.working, self.recompute_working) / self.vpp
        least = least_until[None, :] - least_until[:, None] + working
        return np.asarray(least <= self.limit_bytes * (1 + ROUNDING))

    def of_partitions(self, partitions: IntArray) -> FloatArray:
        """Return (n, chunks) seconds of recomputation of each chunk under n partitions, (n, chunks + 1).

        Partitions near an anchor have few bounds of each chunk, so that seconds are worked out for pairs of bounds.
        """
        chunk, num_layers = np.arange(partitions.shape[1] - 1), len(self.state_until) - 1
        first, last = partitions.min(axis=0, initial=num_layers), partitions.max(axis=0, initial=0)
        width = int((last - first).max()) + 1
        if not 0 < width * width <= len(partitions):
            return self.seconds(chunk, partitions[:, :-1], partitions[:, 1:])
        shifts = np.arange(width)
        lo = np.minimum(first[:-1, None, None] + shifts[:, None], num_layers)
        hi = np.minimum(first[1:, None, None] + shifts, num_layers)
        shift = partitions - first
        of_pairs = self.seconds(chunk[:, None, None], lo, hi)
        return np.asarray(of_pairs[chunk, shift[:, :-1], shift[:, 1:]])


def _rows_of(values: IntArray, rows: slice, num_axes: int) -> IntArray:
    """Return some rows of what is broadcast to `num_axes` axes; all of it where it has one row for all."""
    with_axes = values.reshape((1,) * (num_axes - values.ndim) + values.shape)
    return with_axes if len(with_axes) == 1 else with_axes[rows]


def prefix_sums(values: FloatArray) -> FloatArray:
    """Return (..., L + 1) sums of the values before each, of values (..., L)."""
    return np.concatenate([np.zeros_like(values[..., :1]), np.cumsum(values, axis=-1)], axis=-1)
