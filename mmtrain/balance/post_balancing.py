"""Post-balancing (OrchMLLM): given what each rank has sampled, who should compute which sample."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.rearrangement import Rearrangement, slots, stable_order

Keys = Callable[[FloatArray], FloatArray]

FEW_BINS = 64  # below, one sample at a time on a heap is faster than many at once
TOLERANCE = 1.0  # of the two-key algorithm, in mean samples: sums this close count as equal


@dataclass(frozen=True)
class BatchCost:
    """What one rank's batch of lengths l costs, and by that which algorithm balances it.

    kind "packed": linear * sum(l) + quadratic * sum(l^2), sequences side by side without padding.
    kind "two_key": the same cost; sums within a tolerance count as equal and the sums of squares decide.
    kind "padded": linear * L + quadratic * L^2 / b with L = b * max(l), b the batch's size.
    kind "convolution": sum(l) + padding * b * max(l)^2, convolutions without padding before padded attention.
    """

    kind: Literal["packed", "two_key", "padded", "convolution"] = "packed"
    linear: float = 1.0
    quadratic: float = 0.0
    padding: float = 0.0

    def of_ranks(self, lengths: IntArray, rank: IntArray, num_ranks: int) -> FloatArray:
        """(num_ranks,) cost of each rank's batch."""
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
        """(n,) cost of each sample in a batch of its own."""
        return self.of_ranks(lengths, np.arange(len(lengths)), len(lengths))


def rebalance(lengths: IntArray, source_rank: IntArray, num_ranks: int, cost: BatchCost) -> Rearrangement:
    """Spread samples over ranks so that the most expensive rank is as cheap as can be found.

    lengths: (n,) tokens, source_rank: (n,) where each sample lies now. The answer never costs more than leaving
    everything where it is. On its new rank a sample keeps its order among the others.
    """
    by_kind = {"packed": _packed, "two_key": _two_key, "padded": _padded, "convolution": _convolution}
    found = by_kind[cost.kind](lengths, num_ranks, cost)
    candidates = [found, source_rank]
    rank = min(candidates, key=lambda rank: float(cost.of_ranks(lengths, rank, num_ranks).max(initial=0.0)))
    return Rearrangement(source_rank, rank, slots(rank))


def dominant_sample(lengths: IntArray, num_ranks: int, cost: BatchCost, rank: IntArray) -> int | None:
    """The sample that alone costs as much as the most expensive rank: "bound reached", no rearrangement can help.

    None if there is no such sample. The cure is to split the sample's images over ranks.
    """
    if not len(lengths):
        return None
    alone = cost.of_samples(lengths)
    largest = int(alone.argmax())
    return largest if alone[largest] >= cost.of_ranks(lengths, rank, num_ranks).max() * (1 - 1e-9) else None


def _packed(lengths: IntArray, num_ranks: int, cost: BatchCost) -> IntArray:
    """Longest first onto the least loaded: at most 4/3 - 1/(3 d) of the optimum, since costs of samples add up."""
    alone = cost.of_samples(lengths)
    return assign_greedily(alone[:, None], stable_order(lengths)[::-1], num_ranks, lambda loads: loads[:, 0])


def _two_key(lengths: IntArray, num_ranks: int, cost: BatchCost) -> IntArray:
    """Longest first; sums are compared in steps of a tolerance, and within a step the sums of squares.

    A step is one mean sample. The two keys are one number: the step, and the squares as a fraction of all squares.
    """
    sizes = np.stack([lengths, lengths.astype(np.float64) ** 2], axis=1)
    step, squares = max(TOLERANCE * float(lengths.mean()), 1.0) if len(lengths) else 1.0, float(sizes[:, 1].sum()) + 1.0
    return assign_greedily(
        sizes,
        stable_order(lengths)[::-1],
        num_ranks,
        lambda loads: np.floor(loads[:, 0] / step) + loads[:, 1] / squares,
    )


def assign_greedily(sizes: FloatArray, order: IntArray, num_ranks: int, keys: Keys) -> IntArray:
    """Deal samples in `order`, each to the rank with the least key; returns (n,) ranks.

    keys: loads (d, k) -> (d,), growing with the loads.
    """
    if num_ranks < FEW_BINS:
        return _deal_one_by_one(sizes, order, num_ranks, keys)
    rank = np.empty(len(sizes), dtype=np.int64)
    loads = np.zeros((num_ranks, sizes.shape[1]))
    key = keys(loads)
    done = 0
    while done < len(order):
        bins = np.argsort(key, kind="stable")[: len(order) - done]
        samples = order[done : done + len(bins)]
        after = keys(loads[bins] + sizes[samples])
        # The i-th sample goes to the i-th rank as long as no rank served before it is the least again.
        again = np.flatnonzero(key[bins][1:] > np.minimum.accumulate(after)[:-1])
        count = int(again[0]) + 1 if len(again) else len(bins)
        bins, samples = bins[:count], samples[:count]
        rank[samples] = bins
        loads[bins] += sizes[samples]
        key[bins] = after[:count]
        done += count
    return rank


def _deal_one_by_one(sizes: FloatArray, order: IntArray, num_ranks: int, keys: Keys) -> IntArray:
    """The same deal on a heap."""
    rank = np.empty(len(sizes), dtype=np.int64)
    loads = np.zeros((num_ranks, sizes.shape[1]))
    heap = [(0.0, r) for r in range(num_ranks)]
    for i in order.tolist():
        _, r = heap[0]
        rank[i] = r
        loads[r] += sizes[i]
        heapq.heapreplace(heap, (float(keys(loads[r : r + 1])[0]), r))
    return rank


def _padded(lengths: IntArray, num_ranks: int, cost: BatchCost) -> IntArray:
    """Ascending first fit under the least bound that needs no more than `num_ranks` batches: the optimum.

    A batch of b samples up to length l costs b * (linear * l + quadratic * l^2), so batches of neighbours in sorted
    order are as good as any.
    """
    return _neighbours(lengths, cost.of_samples(lengths), np.zeros(len(lengths)), num_ranks)


def _neighbours(lengths: IntArray, padded: FloatArray, unpadded: FloatArray, num_ranks: int) -> IntArray:
    """Batches of neighbours in ascending order whose largest cost, size * max(padded) + sum(unpadded), is the least.

    The search runs from the dearest single sample to that times ceil(n / d), which always suffices.
    """
    if not len(lengths):
        return np.empty(0, dtype=np.int64)
    order = stable_order(lengths)
    alone, upto = padded[order].tolist(), [0.0, *np.cumsum(unpadded[order]).tolist()]
    low = float((padded + unpadded).max())
    high = low * -(-len(alone) // num_ranks)
    ends = _batches(alone, upto, low, num_ranks)
    if ends is None:
        ends = _batches(alone, upto, high * (1 + 1e-9), num_ranks)
        assert ends is not None, "ceil(n / d) samples, none dearer than the dearest, fit under the upper bound"
        while high - low > 1e-6 * high:  # invariant: high suffices, low does not
            middle = (low + high) / 2
            found = _batches(alone, upto, middle, num_ranks)
            low, high, ends = (middle, high, ends) if found is None else (low, middle, found)
    rank = np.empty(len(alone), dtype=np.int64)
    rank[order] = np.repeat(np.arange(len(ends)), np.diff([0, *ends]))
    return rank


def _batches(alone: list[float], upto: list[float], bound: float, num_ranks: int) -> list[int] | None:
    """Where batches end that are filled, cheapest first, up to `bound`; None if it takes more than `num_ranks`.

    Batches shrink as samples grow, so each is sought downwards from the size of the one before it.
    """
    ends: list[int] = []
    begin, size, num = 0, len(alone), len(alone)
    allowed = bound * (1 + 1e-12)
    while begin < num:
        if len(ends) == num_ranks:
            return None
        fits, size, step = 1, min(size, num - begin), 1
        too_many = size + 1
        while size > fits:
            if size * alone[begin + size - 1] + upto[begin + size] - upto[begin] <= allowed:
                fits = size
            else:
                too_many = size
            if fits == 1 and size - step > 1:
                size, step = size - step, 2 * step
            else:
                size = (fits + too_many) // 2
        begin, size = begin + fits, fits
        ends.append(begin)
    return ends


def _convolution(lengths: IntArray, num_ranks: int, cost: BatchCost) -> IntArray:
    """Descending batches while their padded size stays within the unpadded optimum's bound, the rest to the least sum.

    At most `num_ranks` batches are opened; each takes samples of near equal length, so that its padding is small.
    The plain deal, or neighbours under the true cost, are kept where they are cheaper.
    """
    plain = assign_greedily(
        lengths.astype(np.float64)[:, None], stable_order(lengths)[::-1], num_ranks, lambda loads: loads[:, 0]
    )
    bound = float(np.bincount(plain, weights=lengths, minlength=num_ranks).max(initial=0.0))
    order = stable_order(lengths)[::-1].tolist()
    rank = np.empty(len(lengths), dtype=np.int64)
    loads = [0.0] * num_ranks
    place, batch = 0, 0
    while place < len(order) and batch < num_ranks:
        size = max(int(bound // max(int(lengths[order[place]]), 1)), 1)
        members = order[place : place + size]
        rank[members] = batch
        loads[batch] = float(lengths[members].sum())
        place, batch = place + size, batch + 1
    heap = [(load, r) for r, load in enumerate(loads)]
    heapq.heapify(heap)
    for i in order[place:]:
        load, r = heap[0]
        rank[i] = r
        heapq.heapreplace(heap, (load + float(lengths[i]), r))
    squares = lengths.astype(np.float64) ** 2
    candidates = [rank, plain, _neighbours(lengths, cost.padding * squares, lengths.astype(np.float64), num_ranks)]
    return min(candidates, key=lambda found: float(cost.of_ranks(lengths, found, num_ranks).max(initial=0.0)))
