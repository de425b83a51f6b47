"""Divide a line of layers into consecutive chunks so that the most expensive chunk costs least: an exact solution."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

OPTIMUM_TOLERANCE = 1e-12  # relative slack for sums of floats that are equal on paper


def min_max_partition(
    costs: Sequence[float], num_chunks: int, allowed: BoolArray | None = None
) -> tuple[int, ...] | None:
    """Divide `costs` into non-empty runs so that the most expensive run costs least.

    Of the partitions that reach that optimum, the one with the least sum of squares is returned: the most even one.
    allowed: (chunks, L + 1, L + 1), whether chunk p may hold layers [lo, hi). Returns the num_chunks + 1 bounds, from 0
    to L, or None if no partition is allowed. An exact dynamic program in O(chunks * L^2); the "balanced" baseline of
    Optimus (arXiv 2408.03505).

        >>> min_max_partition([1, 1, 4, 2], 2)
        (0, 2, 4)
    """
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    return min_max_span_partition(prefix[None, None, :] - prefix[None, :, None], num_chunks, allowed)


def min_max_span_partition(
    spans: FloatArray, num_chunks: int, allowed: BoolArray | None = None, evened: FloatArray | None = None
) -> tuple[int, ...] | None:
    """Do the same where the cost of a run is no sum over its layers, or depends on the chunk.

    spans: (1 or chunks, L + 1, L + 1) cost of layers [lo, hi) in chunk p; infinite where it cannot hold them.
    evened: the same shape, whose squares are least among the partitions of least cost; None: those of `spans`.
    """
    if not 1 <= num_chunks < spans.shape[1]:
        return None
    costs = _allowed_spans(spans, num_chunks, allowed)
    largest, _ = _solve(costs, num_chunks, np.maximum)
    optimum = largest[-1, -1]
    if not np.isfinite(optimum):
        return None
    squares = (costs if evened is None else evened) ** 2
    squares_within = np.where(costs <= optimum * (1 + OPTIMUM_TOLERANCE), squares, np.inf)
    _, last_starts = _solve(squares_within, num_chunks, np.add)
    return _read_bounds(last_starts)


def _allowed_spans(spans: FloatArray, num_chunks: int, allowed: BoolArray | None) -> FloatArray:
    """Return (1 or chunks, L + 1, L + 1) the cost of chunk p over [lo, hi); infinite where empty or not allowed."""
    width = spans.shape[1]
    costs = np.where(np.tri(width, dtype=np.bool_), np.inf, spans)
    if allowed is None:
        return costs
    return np.where(allowed, np.broadcast_to(costs, (num_chunks, width, width)), np.inf)


def _solve(costs: FloatArray, num_chunks: int, combine: np.ufunc) -> tuple[FloatArray, IntArray]:
    """Return the best value of the first p chunks over the first j layers, and where chunk p starts then.

    combine: how costs of chunks make a value, their maximum or their sum. Both arrays: (chunks + 1, L + 1).
    """
    width = costs.shape[1]
    best = np.full((num_chunks + 1, width), np.inf)
    best[0, 0] = 0.0
    last_starts = np.zeros((num_chunks + 1, width), dtype=np.int64)
    for chunk, chunk_costs in enumerate(np.broadcast_to(costs, (num_chunks, width, width))):
        values = combine(best[chunk][:, None], chunk_costs)
        last_starts[chunk + 1] = values.argmin(axis=0)
        best[chunk + 1] = values.min(axis=0)
    return best, last_starts


def _read_bounds(last_starts: IntArray) -> tuple[int, ...]:
    """Follow the starts of chunks back from the last layer."""
    num_chunks, num_layers = last_starts.shape[0] - 1, last_starts.shape[1] - 1
    bounds = [num_layers]
    for chunk in range(num_chunks, 0, -1):
        bounds.append(int(last_starts[chunk, bounds[-1]]))
    return tuple(reversed(bounds))
