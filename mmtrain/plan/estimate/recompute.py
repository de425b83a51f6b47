"""Which layers to recompute: as little time as memory allows (OmniBal's adaptive recomputation, solved exactly).

Layers that cost and save the same are one *lot*. Of each lot some layers are recomputed; together they must save what
is too much, and should cost as little time as possible. That is a knapsack with few kinds of things, so all
combinations of all lots but the largest are tried at once, and of that one the least number that is still needed.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_RECOMPUTE_COMBINATIONS = (
    50_000  # combinations; with more (many chunks of a rank) the best ratio of time to bytes decides
)


def least_recompute(
    saved_bytes: Sequence[float], seconds: Sequence[float], counts: Sequence[int], excess: float
) -> tuple[int, ...] | None:
    """How many layers of each lot to recompute so that `excess` bytes are saved in the least time; None if impossible.

    saved_bytes, seconds: of one layer of each lot. Exact up to `MAX_RECOMPUTE_COMBINATIONS` combinations.

        >>> least_recompute([4, 3], [1.0, 1.0], [2, 3], 7)
        (1, 1)
    """
    if excess <= 0:
        return (0,) * len(counts)
    lots = [i for i, (nbytes, count) in enumerate(zip(saved_bytes, counts, strict=True)) if nbytes > 0 and count]
    if not lots or sum(saved_bytes[i] * counts[i] for i in lots) < excess:
        return None
    found = np.zeros(len(counts), dtype=np.int64)
    lots.sort(key=lambda i: -counts[i])
    last, others = lots[0], lots[1:]
    if np.prod([counts[i] + 1 for i in others], dtype=np.float64) <= MAX_RECOMPUTE_COMBINATIONS:
        found[[*others, last]] = _all_tried(
            np.array([saved_bytes[i] for i in (*others, last)], dtype=np.float64),
            np.array([seconds[i] for i in (*others, last)], dtype=np.float64),
            np.array([counts[i] for i in (*others, last)], dtype=np.int64),
            excess,
        )
    else:
        _by_ratio(found, lots, saved_bytes, seconds, counts, excess)
    return tuple(found.tolist())


def _all_tried(saved: FloatArray, seconds: FloatArray, counts: IntArray, excess: float) -> IntArray:
    others = counts[:-1]
    grid = np.indices(tuple(others + 1)).reshape(len(others), -1).T if len(others) else np.zeros((1, 0), dtype=np.int64)
    missing = excess - grid @ saved[:-1]
    of_last = np.maximum(np.ceil(missing / saved[-1] - 1e-9), 0)
    cost = grid @ seconds[:-1] + of_last * seconds[-1]
    cost[of_last > counts[-1]] = np.inf
    best = int(np.lexsort((grid.sum(axis=1) + of_last, cost))[0])
    return np.append(grid[best], int(of_last[best]))


def _by_ratio(
    found: IntArray,
    lots: Sequence[int],
    saved: Sequence[float],
    seconds: Sequence[float],
    counts: Sequence[int],
    excess: float,
) -> None:
    """Recompute what saves most bytes a second, then stop recomputing what turned out not to be needed."""
    left = excess
    order = sorted(lots, key=lambda i: seconds[i] / saved[i])
    for i in order:
        found[i] = min(counts[i], max(int(np.ceil(left / saved[i] - 1e-9)), 0))
        left -= found[i] * saved[i]
    for i in reversed(order):
        spare = min(int(found[i]), int(-left / saved[i] + 1e-9)) if left < 0 else 0
        found[i] -= spare
        left += spare * saved[i]


def span_recompute(saved_bytes: FloatArray, seconds: FloatArray, counts: FloatArray, excess: FloatArray) -> FloatArray:
    """(n,) seconds of recomputation that spans of layers need, nearly the least; infinite where it cannot be.

    saved_bytes: (n, K) of one layer of each lot; seconds: (K,); counts: (n, K) layers of each lot; excess: (n,). Lots
    are used in the order of their ratio, the last one to the layer.
    """
    left = np.maximum(excess, 0.0)
    total = np.zeros_like(left)
    usable = [k for k in range(len(seconds)) if saved_bytes[:, k].max(initial=0.0) > 0]
    for k in sorted(usable, key=lambda k: seconds[k] / saved_bytes[:, k].max()):
        each = np.maximum(saved_bytes[:, k], 1e-300)
        # What a lot before this one saved too much must not be taken back.
        taken = np.maximum(np.minimum(np.ceil(left / each - 1e-9), counts[:, k]), 0.0)
        total += taken * seconds[k]
        left -= taken * each
    total[left > 1e-6] = np.inf
    return total
