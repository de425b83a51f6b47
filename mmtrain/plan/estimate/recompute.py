"""Which layers to recompute: as few seconds as memory allows (OmniBal's adaptive recomputation, solved exactly).

Layers of one kind cost and save the same. Of each kind some layers are recomputed; together they must save the excess
bytes in the least time. That is a knapsack with few kinds of items, so all numbers of layers of all kinds but the most
frequent are tried at once, and of that kind the least number that is still needed.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mmtrain.plan.budget import DEFAULT_BUDGET

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


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
        _take_by_ratio(numbers, kinds, saved_bytes, seconds, counts, excess_bytes)
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


def _take_by_ratio(
    numbers: IntArray,
    kinds: Sequence[int],
    saved: Sequence[float],
    seconds: Sequence[float],
    counts: Sequence[int],
    excess: float,
) -> None:
    """Recompute the layers that save most bytes a second, then stop recomputing those that are not needed after all."""
    missing = excess
    by_ratio = sorted(kinds, key=lambda k: seconds[k] / saved[k])
    for k in by_ratio:
        numbers[k] = min(counts[k], max(int(np.ceil(missing / saved[k] - 1e-9)), 0))
        missing -= numbers[k] * saved[k]
    for k in reversed(by_ratio):
        spare = min(int(numbers[k]), int(-missing / saved[k] + 1e-9)) if missing < 0 else 0
        numbers[k] -= spare
        missing += spare * saved[k]


def span_recompute(
    saved_bytes: FloatArray, seconds: FloatArray, counts: FloatArray, excess_bytes: FloatArray
) -> FloatArray:
    """Return (n,) seconds of recomputation that spans of layers need, nearly the least; infinite where impossible.

    saved_bytes: (n, K) of one layer of each kind; seconds: (K,); counts: (n, K) layers of each kind; excess_bytes:
    (n,). Kinds are used in the order of their ratio, the last one to the layer.
    """
    missing = np.maximum(excess_bytes, 0.0)
    total = np.zeros_like(missing)
    usable = [k for k in range(len(seconds)) if saved_bytes[:, k].max(initial=0.0) > 0]
    for k in sorted(usable, key=lambda k: seconds[k] / saved_bytes[:, k].max()):
        saved = np.maximum(saved_bytes[:, k], 1e-300)
        # Where a kind before this one saved too much, the number is negative, and must not be taken back.
        numbers = np.maximum(np.minimum(np.ceil(missing / saved - 1e-9), counts[:, k]), 0.0)
        total += numbers * seconds[k]
        missing -= numbers * saved
    total[missing > 1e-6] = np.inf
    return total
