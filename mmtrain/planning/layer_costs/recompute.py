"""Which layers to recompute: as few seconds as memory allows (OmniBal's adaptive recomputation, solved exactly).

Layers of one kind cost and save the same. Of each kind some layers are recomputed; together they must save the excess
bytes in the least time. That is a knapsack with few kinds of items. So all numbers of layers are tried at once for all
kinds but the most frequent, and of that kind the least number that is still needed.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mmtrain.planning.space.budget import DEFAULT_BUDGET

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def least_recompute(
    saved_bytes: Sequence[float],
    seconds: Sequence[float],
    counts: Sequence[int],
    excess_bytes: float,
    max_combinations: int = DEFAULT_BUDGET.evaluation.max_recompute_combinations,
) -> tuple[int, ...] | None:
    """Return how many layers of each kind to recompute to save `excess_bytes` in the least time; None if impossible.

    saved_bytes, seconds: of one layer of each kind. counts: layers of each kind. Exact up to `max_combinations` numbers
    of layers; beyond, kinds are taken by their ratio of seconds to bytes.

        >>> least_recompute([4, 3], [1.0, 1.0], [2, 3], 7)
        (1, 1)
    """
    if excess_bytes <= 0:
        return (0,) * len(counts)
    kinds = [k for k, (nbytes, count) in enumerate(zip(saved_bytes, counts, strict=True)) if nbytes > 0 and count]
    if not kinds or sum(saved_bytes[k] * counts[k] for k in kinds) < excess_bytes:
        return None
    numbers = np.zeros(len(counts), dtype=np.int64)
    kinds.sort(key=lambda k: -counts[k])
    most_frequent, others = kinds[0], kinds[1:]
    if np.prod([counts[k] + 1 for k in others], dtype=np.float64) <= max_combinations:
        in_order = [*others, most_frequent]
        numbers[in_order] = _try_all(
            np.array([saved_bytes[k] for k in in_order], dtype=np.float64),
            np.array([seconds[k] for k in in_order], dtype=np.float64),
            np.array([counts[k] for k in in_order], dtype=np.int64),
            excess_bytes,
        )
    else:
        columns = np.array([saved_bytes, counts], dtype=np.float64)[:, :, None]
        order = kinds_by_ratio(columns[0], np.asarray(seconds))
        by_ratio, _ = _take_by_ratio(columns[0], order, columns[1], np.array([float(excess_bytes)]))
        numbers[:] = by_ratio[:, 0]
    return tuple(numbers.tolist())


def _try_all(saved: FloatArray, seconds: FloatArray, counts: IntArray, excess: float) -> IntArray:
    """Return the best numbers of layers of each kind: (K,), the last one follows from the others."""
    others = counts[:-1]
    grid = np.zeros((1, 0), dtype=np.int64)
    if len(others):
        grid = np.indices(tuple(others + 1)).reshape(len(others), -1).T
    missing = excess - grid @ saved[:-1]
    num_last = np.maximum(np.ceil(missing / saved[-1] - 1e-9), 0)
    cost = grid @ seconds[:-1] + num_last * seconds[-1]
    cost[num_last > counts[-1]] = np.inf
    best = int(np.lexsort((grid.sum(axis=1) + num_last, cost))[0])
    return np.append(grid[best], int(num_last[best]))


def kinds_by_ratio(saved_bytes: FloatArray, seconds: FloatArray) -> list[int]:
    """Return the kinds of layers that save anything, those first that save most bytes a second.

    saved_bytes: (K, n) of one layer of each kind, of which the most counts; seconds: (K,).
    """
    most_saved = saved_bytes.max(axis=1, initial=0.0)
    return sorted(np.flatnonzero(most_saved > 0).tolist(), key=lambda k: seconds[k] / most_saved[k])


def span_recompute(
    saved_bytes: FloatArray,
    seconds: FloatArray,
    counts: FloatArray,
    excess_bytes: FloatArray,
    order: Sequence[int] | None = None,
) -> FloatArray:
    """Return (n,) seconds of recomputation that spans of layers need, nearly the least; infinite where impossible.

    saved_bytes: (K, n) of one layer of each kind; seconds: (K,); counts: (K, n) layers of each kind; excess_bytes:
    (n,). order: kinds as `kinds_by_ratio` orders them, by default for these spans alone.
    """
    order = kinds_by_ratio(saved_bytes, seconds) if order is None else order
    numbers, is_enough = _take_by_ratio(saved_bytes, order, counts, excess_bytes)
    # Added up kind by kind, so that the last bit of a span's seconds depends on no other span that is asked about.
    total_s = np.zeros(numbers.shape[1])
    for number, seconds_of_layer in zip(numbers, seconds, strict=True):
        total_s += number * seconds_of_layer
    return np.where(is_enough, total_s, np.inf)


def _take_by_ratio(
    saved_bytes: FloatArray, order: Sequence[int], counts: FloatArray, excess_bytes: FloatArray
) -> tuple[FloatArray, BoolArray]:
    """Recompute the layers that save most bytes a second, then stop recomputing those that are not needed after all.

    Arguments as those of `span_recompute`. Returns (K, n) layers of each kind, and (n,) whether they save enough.
    """
    missing = np.maximum(excess_bytes, 0.0)
    numbers = np.zeros(counts.shape)
    for k in order:
        # Where kinds before this one saved enough, none of it is taken; most spans have layers of few kinds.
        lacking = np.flatnonzero((missing > 0) & (counts[k] > 0))
        saved = np.maximum(saved_bytes[k, lacking], 1e-300)
        taken = np.maximum(np.minimum(np.ceil(missing[lacking] / saved - 1e-9), counts[k, lacking]), 0.0)
        numbers[k, lacking] = taken
        missing[lacking] -= taken * saved
    for k in reversed(order):
        spared = np.flatnonzero((missing < 0) & (numbers[k] > 0))
        saved = np.maximum(saved_bytes[k, spared], 1e-300)
        spare = np.clip(np.floor(-missing[spared] / saved + 1e-9), 0.0, numbers[k, spared])
        numbers[k, spared] -= spare
        missing[spared] += spare * saved
    return numbers, missing <= 1e-6
