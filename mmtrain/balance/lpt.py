"""Longest processing time first (LPT): the assignment that several balancing methods build on."""

import heapq

import numpy as np

from mmtrain.balance.batch_meta import IntArray


def longest_first(sizes: IntArray, num_bins: int) -> IntArray:
    """Put each size into one of `num_bins`, longest first onto the least loaded; return (n,) bins.

    The largest load is at most 4/3 - 1/(3 * num_bins) of the best possible one (Graham 1969). Among equally loaded bins
    the one with fewer sizes comes first.
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    heap = [(0, 0, number) for number in range(num_bins)]  # load, count, bin
    for i in np.argsort(-sizes, kind="stable"):
        load, count, number = heapq.heappop(heap)
        bins[i] = number
        heapq.heappush(heap, (load + int(sizes[i]), count + 1, number))
    return bins
