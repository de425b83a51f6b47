"""Post-balancing (OrchMLLM, arXiv 2503.23830): given what each rank has sampled, decide who computes which sample.

Slips in the published pseudo-code, corrected here: the padded search must start at the longest length, its upper bound
is the longest length times ceil(n / d), and the batches are those of the final bound, not of the last probe; the
comparator of the two-key algorithm is cyclic, so a key takes its place; the algorithm for convolutions opens at most d
batches in descending order.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.check_lengths import check_lengths
from mmtrain.balance.dispatch.rearrangement import Rearrangement, slots, stable_order

MIN_RANKS_TO_VECTORIZE = 64  # with fewer, one sample at a time on a heap is faster than many at once
MIN_ROUND_SHARE = 1 / 20  # of the ranks; a round that serves fewer takes longer than a heap (64 to 2,560 ranks)
SAMPLES_PER_HEAP_RUN = 4096  # one by one, before a round is tried again
SAMPLES_PER_RANK_RUN = 2**15  # of one rank that is far below the others


@dataclass(frozen=True)
class BatchCost:
    """What one rank's batch of lengths l costs, which decides which algorithm balances it.

    kind "packed": linear * sum(l) + quadratic * sum(l^2), sequences side by side without padding.
    kind "two_key": the same cost; long samples compare sums in steps of a tolerance, then sums of squares.
    kind "padded": linear * L + quadratic * L^2 / b with L = b * max(l), b the batch's size.
    kind "convolution": sum(l) + padding * b * max(l)^2, convolutions without padding before padded attention.

    "packed" is what encoders and the LLM compute, which lay sequences side by side, with attention's squares in its
    cost; "padded" is the LLM with `data.pad`. Nothing here needs the others: "two_key" was never cheaper than "packed",
    and the audio encoder packs the frames that its convolutions see.
    """

    kind: Literal["packed", "two_key", "padded", "convolution"] = "packed"
    linear: float = 1.0
    quadratic: float = 0.0
    padding: float = 0.0

    def of_ranks(self, lengths: IntArray, rank: IntArray, num_ranks: int) -> FloatArray:
        """Return (num_ranks,) the cost of each rank's batch; rank: (n,) of each sample."""
        size = np.bincount(rank, minlength=num_ranks).astype(np.float64)
        total = np.bincount(rank, weights=lengths, minlength=num_ranks)
        if self.kind in ("padded", "convolution"):
            longest = np.zeros(num_ranks)
            np.maximum.at(longest, rank, lengths)
        if self.kind == "padded":
            return self.linear * size * longest + self.quadratic * size * longest**2
        if self.kind == "convolution":
            return total + self.padding * size * longest**2
        costs: FloatArray = np.multiply(total, self.linear, dtype=np.float64)
        if self.quadratic:
            squares = lengths.astype(np.float64) ** 2
            costs += self.quadratic * np.bincount(rank, weights=squares, minlength=num_ranks)
        return costs

    def of_samples(self, lengths: IntArray) -> FloatArray:
        """Return (n,) the cost of each sample in a batch of its own."""
        return self.of_ranks(lengths, np.arange(len(lengths)), len(lengths))


def rebalance(lengths: IntArray, source_rank: IntArray, num_ranks: int, cost: BatchCost) -> Rearrangement:
    """Spread samples over ranks so that the most expensive rank is as cheap as the kind's algorithm finds.

    lengths: (n,) tokens. source_rank: (n,) where each sample lies now. The result never costs more than leaving every
    sample where it is. On its new rank a sample keeps its order among the others. Raises ValueError for lengths that
    are not whole numbers from 0 to 2^40.
    """
    check_lengths("lengths of samples", lengths)
    by_kind = {"packed": _packed, "two_key": _two_key, "padded": _padded, "convolution": _convolution}
    candidates = [by_kind[cost.kind](lengths, num_ranks, cost), source_rank]
    rank = min(candidates, key=lambda rank: float(cost.of_ranks(lengths, rank, num_ranks).max(initial=0.0)))
    return Rearrangement(source_rank, rank, slots(rank))


def _packed(lengths: IntArray, num_ranks: int, cost: BatchCost) -> IntArray:
    """Assign longest first to the least loaded rank: at most 4/3 - 1/(3 d) of the optimum, since costs add up."""
    return assign_greedily(cost.of_samples(lengths), stable_order(lengths)[::-1], num_ranks)


def _two_key(lengths: IntArray, num_ranks: int, cost: BatchCost) -> IntArray:
    """Assign longest first; sums are compared in steps of a tolerance, and within a step the sums of squares.

    A step is one mean sample. A sample shorter than that does not lift a rank by a step, so by the two keys one rank
    would take many of them in a row. Short samples go to the rank with the least cost instead, which evens out the
    differences that the tolerance left.
    """
    if not len(lengths):
        return np.empty(0, dtype=np.int64)
    descending = stable_order(lengths)[::-1]
    step = max(float(lengths.mean()), 1.0)
    num_long = int((lengths >= step).sum())
    is_long, is_short = descending[:num_long], descending[num_long:]
    squares = lengths.astype(np.float64) ** 2
    steps = SteppedLoads(lengths.astype(np.float64), step)
    rank = assign_greedily(squares / (squares.sum() + 1.0), is_long, num_ranks, steps)
    loads = cost.of_ranks(lengths[is_long], rank[is_long], num_ranks)
    rank[is_short] = assign_greedily(cost.of_samples(lengths), is_short, num_ranks, initial_loads=loads)[is_short]
    return rank


@dataclass(frozen=True)
class SteppedLoads:
    """Loads that greedy assignment compares first, in whole steps."""

    sizes: FloatArray  # (n,) what each sample adds
    step: float


def assign_greedily(
    sizes: FloatArray,
    order: IntArray,
    num_ranks: int,
    stepped: SteppedLoads | None = None,
    initial_loads: FloatArray | None = None,
) -> IntArray:
    """Assign samples in `order`, each to the rank with the least load; return (n,) ranks.

    sizes: (n,) what each sample adds to the load of its rank; below 1 in sum where `stepped` loads are compared first.
    initial_loads: (num_ranks,) by default 0. Samples that are not in `order` get rank 0.

    With many ranks, whole rounds of samples are assigned at once. Where a few ranks are far below the others, rounds
    are short; what the lowest one takes in a row is then assigned at once, and a run of samples goes through a heap.
    """
    rank = np.zeros(len(sizes), dtype=np.int64)
    loads = np.zeros(num_ranks) if initial_loads is None else initial_loads.astype(np.float64)
    coarse, step = np.zeros(num_ranks), 1.0
    coarse_sizes = np.zeros(len(sizes))
    if stepped is not None:
        coarse_sizes, step = stepped.sizes, stepped.step
    num_assigned = 0
    while num_assigned < len(order):
        if num_ranks >= MIN_RANKS_TO_VECTORIZE:
            key = np.floor(coarse / step) + loads
            ranks = np.argsort(key, kind="stable")[: len(order) - num_assigned]
            samples = order[num_assigned : num_assigned + len(ranks)]
            new_coarse, new_loads = coarse[ranks] + coarse_sizes[samples], loads[ranks] + sizes[samples]
            new_key = np.floor(new_coarse / step) + new_loads
            # The i-th sample goes to the i-th rank as long as no rank served before it has the least key again.
            least_again = np.flatnonzero(key[ranks][1:] > np.minimum.accumulate(new_key)[:-1])
            count = int(least_again[0]) + 1 if len(least_again) else len(ranks)
            rank[samples[:count]] = ranks[:count]
            coarse[ranks[:count]], loads[ranks[:count]] = new_coarse[:count], new_loads[:count]
            num_assigned += count
            if count >= MIN_ROUND_SHARE * num_ranks:
                continue
        samples = order[num_assigned : num_assigned + SAMPLES_PER_RANK_RUN]
        lowest, count = _run_of_lowest_rank(coarse_sizes[samples], sizes[samples], coarse, loads, step)
        rank[samples[:count]] = lowest
        num_assigned += count
        samples = order[num_assigned : num_assigned + SAMPLES_PER_HEAP_RUN]
        rank[samples] = _assign_one_by_one(coarse_sizes[samples], sizes[samples], coarse, loads, step)
        num_assigned += len(samples)
    return rank


def _run_of_lowest_rank(
    coarse_sizes: FloatArray, sizes: FloatArray, coarse: FloatArray, loads: FloatArray, step: float
) -> tuple[int, int]:
    """Return the rank with the least load and how many samples it takes before another has less; add them in place.

    Sums run from the rank's load in the order of the samples, so they are those of adding one by one.
    """
    key = np.floor(coarse / step) + loads
    lowest = int(key.argmin())
    others = np.delete(key, lowest)
    second = float(others.min(initial=np.inf))
    wins_ties = lowest <= int(others.argmin()) if len(others) else True
    coarse_after, load_after = (
        np.cumsum(np.concatenate([[total[lowest]], added])) for total, added in ((coarse, coarse_sizes), (loads, sizes))
    )
    key_before = (np.floor(coarse_after / step) + load_after)[:-1]
    count = int(np.searchsorted(key_before, second, side="right" if wins_ties else "left"))
    coarse[lowest], loads[lowest] = coarse_after[count], load_after[count]
    return lowest, count


def _assign_one_by_one(
    coarse_sizes: FloatArray, sizes: FloatArray, coarse: FloatArray, loads: FloatArray, step: float
) -> list[int]:
    """Assign a run of samples by a heap; return their ranks, and add them to the loads (num_ranks,) in place."""
    chosen = []
    coarse_of, load_of = coarse.tolist(), loads.tolist()
    heap = list(zip((np.floor(coarse / step) + loads).tolist(), range(len(loads)), strict=True))
    heapq.heapify(heap)
    for coarse_size, size in zip(coarse_sizes.tolist(), sizes.tolist(), strict=True):
        r = heap[0][1]
        chosen.append(r)
        coarse_of[r] += coarse_size
        load_of[r] += size
        heapq.heapreplace(heap, (math.floor(coarse_of[r] / step) + load_of[r], r))
    coarse[:], loads[:] = coarse_of, load_of
    return chosen


def _padded(lengths: IntArray, num_ranks: int, cost: BatchCost) -> IntArray:
    """Fill batches in ascending order under the least bound that needs no more than `num_ranks` of them: the optimum.

    A batch of b samples up to length l costs b * (linear * l + quadratic * l^2), so batches of neighbours in sorted
    order are as good as any.
    """
    return _batches_of_neighbors(lengths, cost.of_samples(lengths), np.zeros(len(lengths)), num_ranks)


def _batches_of_neighbors(lengths: IntArray, padded: FloatArray, unpadded: FloatArray, num_ranks: int) -> IntArray:
    """Form batches of neighbors in ascending order with the least largest cost, size * max(padded) + sum(unpadded).

    The bisection runs from the most expensive single sample to that times ceil(n / d), which always suffices. No rank
    is left without samples where there are enough of them.
    """
    if not len(lengths):
        return np.empty(0, dtype=np.int64)
    order = stable_order(lengths)
    padded_costs = padded[order].tolist()
    sums_before = [0.0, *np.cumsum(unpadded[order]).tolist()]
    low = float((padded + unpadded).max())
    high = low * -(-len(padded_costs) // num_ranks)
    ends = _batch_ends(padded_costs, sums_before, low, num_ranks)
    if ends is None:
        ends = _batch_ends(padded_costs, sums_before, high * (1 + 1e-9), num_ranks)
        assert ends is not None, "ceil(n / d) samples, none above the most expensive one, fit under the upper bound"
        while high - low > 1e-6 * high:  # invariant: high suffices, low does not
            middle = (low + high) / 2
            middle_ends = _batch_ends(padded_costs, sums_before, middle, num_ranks)
            if middle_ends is None:
                low = middle
            else:
                high = middle
                ends = middle_ends
    sizes = _halved_to_count(np.diff([0, *ends]).tolist(), min(num_ranks, len(padded_costs)))
    rank = np.empty(len(padded_costs), dtype=np.int64)
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


def _batch_ends(padded_costs: list[float], sums_before: list[float], bound: float, num_ranks: int) -> list[int] | None:
    """Where batches end that are filled, cheapest first, up to `bound`; None if it takes more than `num_ranks`.

    Batches shrink as samples grow, so the size of each is searched downwards from the one before it.
    """
    ends: list[int] = []
    start, size, num = 0, len(padded_costs), len(padded_costs)
    allowed = bound * (1 + 1e-12)
    while start < num:
        if len(ends) == num_ranks:
            return None
        fits, size, step = 1, min(size, num - start), 1
        too_many = size + 1
        while size > fits:
            if size * padded_costs[start + size - 1] + sums_before[start + size] - sums_before[start] <= allowed:
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


def _convolution(lengths: IntArray, num_ranks: int, cost: BatchCost) -> IntArray:
    """Form batches in descending order, each up to the largest load of the unpadded assignment; return (n,) ranks.

    At most `num_ranks` batches are opened; each takes samples of near equal length, so that its padding is small. The
    samples that are left go to the least loaded rank. Longest first without regard to padding, or batches of neighbors
    under the true cost, are taken where they are cheaper.
    """
    longest_first = assign_greedily(lengths.astype(np.float64), stable_order(lengths)[::-1], num_ranks)
    bound = float(np.bincount(longest_first, weights=lengths, minlength=num_ranks).max(initial=0.0))
    order = stable_order(lengths)[::-1].tolist()
    rank = np.empty(len(lengths), dtype=np.int64)
    loads = [0.0] * num_ranks
    start = 0
    for batch in range(num_ranks):
        if start >= len(order):
            break
        size = max(int(bound // max(int(lengths[order[start]]), 1)), 1)
        members = order[start : start + size]
        rank[members] = batch
        loads[batch] = float(lengths[members].sum())
        start += size
    heap = [(load, r) for r, load in enumerate(loads)]
    heapq.heapify(heap)
    for i in order[start:]:
        load, r = heap[0]
        rank[i] = r
        heapq.heapreplace(heap, (load + float(lengths[i]), r))
    squares = lengths.astype(np.float64) ** 2
    neighbors = _batches_of_neighbors(lengths, cost.padding * squares, lengths.astype(np.float64), num_ranks)
    candidates = [rank, longest_first, neighbors]
    return min(candidates, key=lambda ranks: float(cost.of_ranks(lengths, ranks, num_ranks).max(initial=0.0)))
