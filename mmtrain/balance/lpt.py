"""Longest first onto the least loaded: the deal that others are made of."""

import heapq

import numpy as np

from mmtrain.balance.batch_meta import IntArray


def longest_first(sizes: IntArray, bins: int, capacity: int | None = None) -> IntArray:
    """Put each size into one of `bins`, longest first onto the least loaded; returns (n,) bins.

    The largest load is at most 4/3 - 1/(3 * bins) of the best possible one (Graham 1969). With `capacity` no bin takes
    more than that many.
    """
    placed = np.empty(len(sizes), dtype=np.int64)
    heap = [(0, 0, b) for b in range(bins)]  # load, count, bin: among equal loads the emptier one
    for i in np.argsort(-sizes, kind="stable"):
        load, count, b = heapq.heappop(heap)
        placed[i] = b
        if capacity is None or count + 1 < capacity:
            heapq.heappush(heap, (load + int(sizes[i]), count + 1, b))
    return placed
