"""Divide a line of layers into consecutive chunks so that the most expensive chunk costs least: an exact solution."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

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

    If several partitions reach that optimum, return the most even one: that with the least sum of squares.
    allowed: (1 or chunks, L + 1, L + 1), whether chunk p may hold layers [lo, hi). Returns the num_chunks + 1 bounds,
    from 0 to L, or None if no partition is allowed. An exact dynamic program in O(chunks * L^2); the "balanced"
    baseline of Optimus (arXiv 2408.03505).

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
    costs = _allowed_spans(spans, allowed)
    longest = longest_span_within(costs, _cost_of_even_partition(costs, num_chunks))
    lo, hi = band(spans.shape[1] - 1, longest)
    in_band = np.where(lo < 0, np.inf, costs[:, lo, hi])
    return min_max_band_partition(in_band, num_chunks, in_band if evened is None else evened[:, lo, hi])


def min_max_band_partition(costs: FloatArray, num_chunks: int, evened: FloatArray) -> tuple[int, ...] | None:
    """Do the same for runs of at most B layers.

    costs, evened: (1 or chunks, L + 1, B) of the runs of `band`; costs are infinite where lo is negative.
    """
    lo, _ = band(costs.shape[1] - 1, costs.shape[2])
    starts = np.maximum(lo, 0)
    largest, _ = _solve(_of_chunks(costs, num_chunks), starts, np.maximum)
    optimum = largest[-1]
    if not np.isfinite(optimum):
        return None
    num_distinct = max(len(costs), len(evened))
    chunks = zip(_of_chunks(costs, num_distinct), _of_chunks(evened, num_distinct), strict=True)
    limit = optimum * (1 + OPTIMUM_TOLERANCE)
    distinct = (np.where(of_chunk <= limit, to_even**2, np.inf) for of_chunk, to_even in chunks)
    squares_within = repeat(next(distinct), num_chunks) if num_distinct == 1 else distinct
    _, last_starts = _solve(squares_within, starts, np.add)
    return _read_bounds(last_starts)


def band(num_layers: int, longest: int) -> tuple[IntArray, IntArray]:
    """Return lo and hi, (L + 1, longest) both, of the runs of at most so many layers; lo may be negative."""
    hi = np.arange(num_layers + 1)[:, None]
    lo = hi - longest + np.arange(longest)
    return lo, np.broadcast_to(hi, lo.shape)


def spans_of_partitions(is_open: BoolArray, num_chunks: int) -> Iterator[BoolArray]:
    """Yield for each chunk, (L + 1, B), which of its runs are part of a partition into runs that are all open.

    is_open: (1 or chunks, L + 1, B) of the runs of `band`; false where lo is negative.
    """
    _, width, longest = is_open.shape
    open_of_chunk = np.broadcast_to(is_open, (num_chunks, width, longest))
    lo, _ = band(width - 1, longest)
    starts = np.maximum(lo, 0)
    completed = np.zeros((num_chunks + 1, width), dtype=np.bool_)  # from where the chunks behind reach the end
    completed[-1, -1] = True
    for chunk in reversed(range(num_chunks)):
        completed[chunk, starts[open_of_chunk[chunk] & completed[chunk + 1, :, None]]] = True
    reached = np.zeros(width, dtype=np.bool_)  # where the chunks before may end
    reached[0] = True
    for chunk in range(num_chunks):
        of_chunk = open_of_chunk[chunk] & reached[starts] & completed[chunk + 1, :, None]
        yield of_chunk
        reached = of_chunk.any(axis=1)


def longest_span_within(costs: FloatArray, limit: float) -> int:
    """Return the layers of the longest run that costs at most `limit` in some chunk, and at least 1.

    Where a partition costs `limit`, no run of a best partition is longer, so that most runs need not be looked at.
    """
    _, lo, hi = np.nonzero((costs <= limit) & np.isfinite(costs))
    return int(np.max(hi - lo, initial=1))


def _allowed_spans(spans: FloatArray, allowed: BoolArray | None) -> FloatArray:
    """Return (1 or chunks, L + 1, L + 1) the cost of chunk p over [lo, hi); infinite where empty or not allowed."""
    width = spans.shape[1]
    costs = np.where(np.tri(width, dtype=np.bool_), np.inf, spans)
    return costs if allowed is None else np.where(allowed, costs, np.inf)


def _cost_of_even_partition(costs: FloatArray, num_chunks: int) -> float:
    """Return the cost of a partition by the layers' own costs: not the least, but near it."""
    num_layers = costs.shape[1] - 1
    layers = np.arange(num_layers)
    own = costs[0, layers, layers + 1]
    until = np.cumsum(np.where(np.isfinite(own), own, 0.0))
    shares = until[-1] * np.arange(1, num_chunks) / num_chunks
    bounds = [0]
    for number, cut in enumerate(np.searchsorted(until, shares).tolist(), start=1):
        bounds.append(min(max(cut, bounds[-1] + 1), num_layers - (num_chunks - number)))
    lo, hi = np.array(bounds), np.array([*bounds[1:], num_layers])
    chunks = np.arange(num_chunks) if len(costs) > 1 else np.zeros(num_chunks, dtype=np.int64)
    return float(costs[chunks, lo, hi].max())


def _of_chunks(costs: FloatArray, num_chunks: int) -> Iterator[FloatArray]:
    """Yield the costs of each chunk, (L + 1, B), of (1 or chunks, L + 1, B)."""
    yield from np.broadcast_to(costs, (num_chunks, *costs.shape[1:]))


def _solve(costs: Iterable[FloatArray], starts: IntArray, combine: np.ufunc) -> tuple[FloatArray, IntArray]:
    """Return the best value of all chunks over the first j layers, (L + 1,), and where chunk p starts then.

    costs: of one chunk after another, (L + 1, B) each, of runs that start at `starts`, (L + 1, B). combine: how costs
    of chunks make a value, their maximum or their sum. The starts returned: (chunks + 1, L + 1).
    """
    width = len(starts)
    best = np.full(width, np.inf)
    best[0] = 0.0
    rows = np.arange(width)
    last_starts = [np.zeros(width, dtype=np.int64)]
    for chunk_costs in costs:
        values = combine(best[starts], chunk_costs)
        least = values.argmin(axis=1)
        last_starts.append(starts[rows, least])
        best = values[rows, least]
    return best, np.stack(last_starts)


def _read_bounds(last_starts: IntArray) -> tuple[int, ...]:
    """Follow the starts of chunks back from the last layer."""
    num_chunks, num_layers = last_starts.shape[0] - 1, last_starts.shape[1] - 1
    bounds = [num_layers]
    for chunk in range(num_chunks, 0, -1):
        bounds.append(int(last_starts[chunk, bounds[-1]]))
    return tuple(reversed(bounds))
