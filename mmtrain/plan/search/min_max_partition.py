"""Cutting a line of layers into consecutive parts, exactly."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

OPTIMUM_TOLERANCE = 1e-12  # relative slack for sums of floats that are equal on paper


def min_max_partition(costs: Sequence[float], parts: int, allowed: BoolArray | None = None) -> tuple[int, ...] | None:
    """Cut `costs` into `parts` non-empty runs so that the dearest run is as cheap as possible.

    Among the cuts that reach that optimum, the one with the least sum of squares is taken: the evenest.
    allowed: (parts, L + 1, L + 1), whether part p may hold layers [lo, hi). Returns the parts + 1 boundaries, from 0
    to L, or None if no cut is allowed. An exact dynamic program in O(parts * L^2), the "balanced" baseline of Optimus.

        >>> min_max_partition([1, 1, 4, 2], 2)
        (0, 2, 4)
    """
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    return min_max_span_partition(prefix[None, None, :] - prefix[None, :, None], parts, allowed)


def min_max_span_partition(spans: FloatArray, parts: int, allowed: BoolArray | None = None) -> tuple[int, ...] | None:
    """The same, where what a run costs depends on it as a whole, or on its part.

    spans: (1 or parts, L + 1, L + 1) cost of [lo, hi), in part p; infinite where it cannot be.
    """
    if not 1 <= parts < spans.shape[1]:
        return None
    segment = _segments(spans, parts, allowed)
    least, _ = _solve(segment, parts, np.maximum)
    optimum = least[-1, -1]
    if not np.isfinite(optimum):
        return None
    within = np.where(segment <= optimum * (1 + OPTIMUM_TOLERANCE), segment**2, np.inf)
    _, choice = _solve(within, parts, np.add)
    return _boundaries(choice)


def _segments(spans: FloatArray, parts: int, allowed: BoolArray | None) -> FloatArray:
    """(1 or parts, L + 1, L + 1) cost of part p over [lo, hi); infinite where empty or not allowed."""
    width = spans.shape[1]
    segment = np.where(np.tri(width, dtype=np.bool_), np.inf, spans)
    return segment if allowed is None else np.where(allowed, np.broadcast_to(segment, (parts, width, width)), np.inf)


def _solve(segment: FloatArray, parts: int, join: np.ufunc) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """Best value of the first p parts over the first j layers, (parts + 1, L + 1), and the start of the last."""
    width = segment.shape[1]
    best = np.full((parts + 1, width), np.inf)
    best[0, 0] = 0.0
    choice = np.zeros((parts + 1, width), dtype=np.int64)
    for p, own in enumerate(np.broadcast_to(segment, (parts, width, width))):
        values = join(best[p][:, None], own)
        choice[p + 1] = values.argmin(axis=0)
        best[p + 1] = values.min(axis=0)
    return best, choice


def _boundaries(choice: npt.NDArray[np.int64]) -> tuple[int, ...]:
    parts, last = choice.shape[0] - 1, choice.shape[1] - 1
    cuts = [last]
    for p in range(parts, 0, -1):
        cuts.append(int(choice[p, cuts[-1]]))
    return tuple(reversed(cuts))
