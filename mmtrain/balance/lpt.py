"""Longest processing time first (LPT): the assignment that several balancing methods build on."""

import heapq
from collections.abc import Sequence

import numpy as np

from mmtrain.balance.batch_meta import IntArray


def longest_first(sizes: IntArray, num_bins: int) -> IntArray:
    """Put each size into one of `num_bins`, longest first onto the least loaded; return (n,) bins.

    The largest load is at most 4/3 - 1/(3 * num_bins) of the best possible one (Graham 1969). Among equally loaded bins
    the one with fewer sizes comes first.
    """
    order = np.argsort(-sizes, kind="stable")
    bins = np.empty(len(sizes), dtype=np.int64)
    bins[order] = bins_of_sorted(sizes[order].tolist(), num_bins)
    return bins


def bins_of_sorted(sizes: Sequence[int], num_bins: int) -> list[int]:
    """Do the same for sizes that come longest first, which for a few of them is much faster in plain lists."""
    if len(sizes) <= num_bins:
        return list(range(len(sizes)))
    heap = [(0, 0, number) for number in range(num_bins)]  # load, count, bin
    bins = []
    for size in sizes:
        load, count, number = heap[0]
        bins.append(number)
        heapq.heapreplace(heap, (load + size, count + 1, number))
    return bins
