"""Post-balancing (OrchMLLM, arXiv 2503.23830): given what each rank has sampled, decide who computes which sample.

Slips in the published pseudo-code, corrected here: the padded search must start at the longest length, its upper bound
is the longest length times ceil(n / d), and the batches are those of the final bound, not of the last probe.
"""

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.check_lengths import check_lengths

MIN_RANKS_TO_VECTORIZE = 64  # with fewer, one sample at a time on a heap is faster than many at once
MIN_ROUND_SHARE = 1 / 20  # of the ranks; a round that serves fewer takes longer than a heap (64 to 2,560 ranks)
SAMPLES_PER_HEAP_RUN = 4096  # one by one, before a round is tried again
SAMPLES_PER_RANK_RUN = 2**15  # of one rank that is far below the others


@dataclass(frozen=True)
class BatchCost:
    """What one rank's batch of lengths l costs, which decides which algorithm balances it.

    kind "packed": linear * sum(l) + quadratic * sum(l^2), sequences side by side without padding, as encoders and the
        LLM compute them.
    kind "padded": linear * L + quadratic * L^2 / b with L = b * max(l), b the batch's size: the LLM with `data.pad`.
    """

    kind: Literal["packed", "padded"] = "packed"
    linear: float = 1.0
    quadratic: float = 0.0

    def of_ranks(self, lengths: IntArray, rank: IntArray, num_ranks: int) -> FloatArray:
        """Return (num_ranks,) the cost of each rank's batch; rank: (n,) of each sample."""
        if self.kind == "padded":
            size = np.bincount(rank, minlength=num_ranks).astype(np.float64)
            longest = np.zeros(num_ranks)
            np.maximum.at(longest, rank, lengths)
            return self.linear * size * longest + self.quadratic * size * longest**2
        total = np.bincount(rank, weights=lengths, minlength=num_ranks)
        costs: FloatArray = np.multiply(total, self.linear, dtype=np.float64)
        if self.quadratic:
            squares = lengths.astype(np.float64) ** 2
            costs += self.quadratic * np.bincount(rank, weights=squares, minlength=num_ranks)
        return costs

    def of_samples(self, lengths: IntArray) -> FloatArray:
        """Return (n,) the cost of each sample in a batch of its own."""
        return self.of_ranks(lengths, np.arange(len(lengths)), len(lengths))


def rebalance(lengths: IntArray, source_rank: IntArray, num_ranks: int, cost: BatchCost) -> IntArray:
    """Spread samples over ranks so that the most expensive rank is as cheap as the kind's algorithm finds.

    Return (n,) the rank that computes each sample. The result never costs more than leaving every sample where it is.
    A sample keeps its order among the others of its rank. Raises ValueError for lengths that are not whole numbers from
    0 to 2^40.

    lengths: (n,) tokens. source_rank: (n,) where each sample lies now.
    """
    check_lengths("lengths of samples", lengths)
    by_kind = {"packed": _packed, "padded": _padded}
    candidates = [by_kind[cost.kind](lengths, num_ranks, cost), source_rank]
    return min(candidates, key=lambda rank: float(cost.of_ranks(lengths, rank, num_ranks).max(initial=0.0)))


def _packed(lengths: IntArray, num_ranks: int, cost: BatchCost) -> IntArray:
    """Assign longest first to the least loaded rank: at most 4/3 - 1/(3 d) of the optimum, since costs add up."""
    return assign_greedily(cost.of_samples(lengths), stable_order(lengths)[::-1], num_ranks)


def assign_greedily(sizes: FloatArray, order: IntArray, num_ranks: int) -> IntArray:
    """Assign samples in `order`, each to the rank with the least load; return (n,) ranks.

    sizes: (n,) what each sample adds to the load of its rank.

    With many ranks, whole rounds of samples are assigned at once. Where a few ranks are far below the others, rounds
    are short; what the lowest one takes in a row is then assigned at once, and a run of samples goes through a heap.
    """
    rank = np.zeros(len(sizes), dtype=np.int64)
    loads = np.zeros(num_ranks)
    num_assigned = 0
    while num_assigned < len(order):
        if num_ranks >= MIN_RANKS_TO_VECTORIZE:
            ranks = np.argsort(loads, kind="stable")[: len(order) - num_assigned]
            samples = order[num_assigned : num_assigned + len(ranks)]
            new_loads = loads[ranks] + sizes[samples]
            # The i-th sample goes to the i-th rank as long as no rank served before it has the least load again.
            least_again = np.flatnonzero(loads[ranks][1:] > np.minimum.accumulate(new_loads)[:-1])
            count = int(least_again[0]) + 1 if len(least_again) else len(ranks)
            rank[samples[:count]] = ranks[:count]
            loads[ranks[:count]] = new_loads[:count]
            num_assigned += count
            if count >= MIN_ROUND_SHARE * num_ranks:
                continue
        samples = order[num_assigned : num_assigned + SAMPLES_PER_RANK_RUN]
        lowest, count = _run_of_lowest_rank(sizes[samples], loads)
        rank[samples[:count]] = lowest
        num_assigned += count
        samples = order[num_assigned : num_assigned + SAMPLES_PER_HEAP_RUN]
        rank[samples] = _assign_one_by_one(sizes[samples], loads)
        num_assigned += len(samples)
    return rank


def _run_of_lowest_rank(sizes: FloatArray, loads: FloatArray) -> tuple[int, int]:
    """Return the rank with the least load and how many samples it takes before another has less; add them in place.

    Sums run from the rank's load in the order of the samples, so they are those of adding one by one.
    """
    lowest = int(loads.argmin())
    others = np.delete(loads, lowest)
    wins_ties = lowest <= int(others.argmin()) if len(others) else True
    load_after = np.cumsum(np.concatenate([[loads[lowest]], sizes]))
    second = float(others.min(initial=np.inf))
    count = int(np.searchsorted(load_after[:-1], second, side="right" if wins_ties else "left"))
    loads[lowest] = load_after[count]
    return lowest, count


def _assign_one_by_one(sizes: FloatArray, loads: FloatArray) -> list[int]:
    """Assign a run of samples by a heap; return their ranks, and add them to the loads (num_ranks,) in place."""
    chosen = []
    heap = list(zip(loads.tolist(), range(len(loads)), strict=True))
    heapq.heapify(heap)
    for size in sizes.tolist():
        load, r = heap[0]
        chosen.append(r)
        heapq.heapreplace(heap, (load + size, r))
    for load, r in heap:
        loads[r] = load
    return chosen


def _padded(lengths: IntArray, num_ranks: int, cost: BatchCost) -> IntArray:
    """Fill batches in ascending order under the least bound that needs no more than `num_ranks` of them: the optimum.

    A batch of b samples up to length l costs b * (linear * l + quadratic * l^2), so batches of neighbours in sorted
    order are as good as any. The bisection runs from the most expensive single sample to that times ceil(n / d), which
    always suffices. No rank is left without samples where there are enough of them.
    """
    if not len(lengths):
        return np.empty(0, dtype=np.int64)
    order = stable_order(lengths)
    costs = cost.of_samples(lengths)[order].tolist()
    low = costs[-1]
    high = low * -(-len(costs) // num_ranks)
    ends = _batch_ends(costs, low, num_ranks)
    if ends is None:
        ends = _batch_ends(costs, high * (1 + 1e-9), num_ranks)
        assert ends is not None, "ceil(n / d) samples, none above the most expensive one, fit under the upper bound"
        while high - low > 1e-6 * high:  # invariant: high suffices, low does not
            middle = (low + high) / 2
            middle_ends = _batch_ends(costs, middle, num_ranks)
            if middle_ends is None:
                low = middle
            else:
                high = middle
                ends = middle_ends
    sizes = _halved_to_count(np.diff([0, *ends]).tolist(), min(num_ranks, len(costs)))
    rank = np.empty(len(costs), dtype=np.int64)
    rank[order] = np.repeat(np.arange(len(sizes)), sizes)
    return rank


def _halved_to_count(sizes: list[int], count: int) -> list[int]:
    """Halve the batches of these sizes, those with most samples first, until there are `count`."""
    largest_first = [(-size, place, size) for place, size in enumerate(sizes)]
    heapq.heapify(largest_first)
    parts: dict[int, list[int]] = {place: [size] for place, size in enumerate(sizes)}
    for _ in range(count - len(sizes)):
        _, place, size = heapq.heappop(largest_first)
        parts[place].remove(size)
        for half in (size // 2, size - size // 2):
            parts[place].append(half)
            heapq.heappush(largest_first, (-half, place, half))
    return [size for place in range(len(sizes)) for size in parts[place]]


def _batch_ends(costs: list[float], bound: float, num_ranks: int) -> list[int] | None:
    """Where batches end that are filled, cheapest first, up to `bound`; None if it takes more than `num_ranks`.

    Batches shrink as samples grow, so the size of each is searched downwards from the one before it.
    """
    ends: list[int] = []
    start, size, num = 0, len(costs), len(costs)
    allowed = bound * (1 + 1e-12)
    while start < num:
        if len(ends) == num_ranks:
            return None
        fits, size, step = 1, min(size, num - start), 1
        too_many = size + 1
        while size > fits:
            if size * costs[start + size - 1] <= allowed:
                fits = size
            else:
                too_many = size
            if fits == 1 and size - step > 1:
                size, step = size - step, 2 * step
            else:
                size = (fits + too_many) // 2
        start += fits
        size = fits
        ends.append(start)
    return ends


def stable_order(values: IntArray) -> IntArray:
    """Sort non-negative integers; return the stable ascending order.

    Where 16 bits hold the values numpy sorts by radix, which is ten times faster.
    """
    fits_16_bits = len(values) > 0 and int(values.max()) < 2**16
    order: IntArray = np.argsort(values.astype(np.uint16) if fits_16_bits else values, kind="stable")
    return order
