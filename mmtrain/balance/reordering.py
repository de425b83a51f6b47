"""Reordering (MMScale, arXiv 2408.04275): which replica gets which sample, and in what order microbatches run."""

from collections.abc import Callable

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.lpt import longest_first
from mmtrain.balance.makespan_1f1b import makespans_1f1b
from mmtrain.balance.uneven_stage import order_around_uneven_stage

SWAPS = 256  # candidates scored together in one round; the recurrence costs little more for many than for one
COMBINED = 24  # improving swaps that are tried on top of each other


def across_replicas(sizes: IntArray, num_replicas: int, equal_counts: bool) -> IntArray:
    """Deal the samples of a global batch to replicas, longest first to the least loaded; returns (n,) replicas.

    With `equal_counts` each replica gets exactly n / num_replicas samples; raises ValueError if that is no whole
    number. (The paper's listing sorts ascending, which is far worse.)
    """
    if equal_counts and len(sizes) % num_replicas:
        raise ValueError(f"{len(sizes)} samples cannot be dealt to {num_replicas} replicas in equal numbers")
    return longest_first(sizes, num_replicas, len(sizes) // num_replicas if equal_counts else None)


def reorder_microbatches(
    forward: FloatArray,
    backward: FloatArray,
    order: IntArray,
    rounds: int,
    rng: np.random.Generator,
    expired: Callable[[], bool] = lambda: False,
    score: Callable[[IntArray], FloatArray] | None = None,
) -> IntArray:
    """An order of microbatches that shortens a pipeline; never longer than `order`.

    forward, backward: (c, p, l) seconds of each microbatch on each of p stages, for c pipelines that run one order
    together (LLM replicas fed by the same encoder microbatches). order: (l,) the order given. Returns (l,).
    score: (k,) seconds under each of some orders (k, l), for a pipeline other than 1F1B (see `timetable`); forward and
    backward are then what its ranks do for each microbatch.

    Starts from the best of the given order, the constructed one and that of `order_around_uneven_stage`, and improves
    it by swaps: each of `rounds` rounds scores some random swaps by the pipeline recurrence, then the best of them
    combined.
    `expired` ends the search early; a search that all ranks must agree on leaves it out, since clocks differ.
    """
    constructed = construct_order(forward.mean(axis=0), backward.mean(axis=0), order)
    starts = np.stack([order, constructed, order_around_uneven_stage(forward, backward, order)])
    score = score or (lambda orders: makespans_1f1b(forward, backward, orders))
    spans = score(starts)
    best: IntArray = starts[spans.argmin()]
    span = float(spans.min())
    for _ in range(rounds):
        if expired():
            break
        pairs = rng.integers(0, len(order), (SWAPS, 2))
        each, (one, other) = np.arange(SWAPS), pairs.T
        swapped = np.tile(best, (SWAPS, 1))
        swapped[each, one], swapped[each, other] = best[other], best[one]
        spans = score(swapped)
        combined = _disjoint(pairs[np.argsort(spans, kind="stable")][: int((spans < span - 1e-12).sum())])
        if not combined:
            continue
        tried = np.stack([_swapped(best, combined[: k + 1]) for k in range(len(combined))])
        spans = score(tried)
        best, span = tried[spans.argmin()], float(spans.min())
    return best


def construct_order(forward: FloatArray, backward: FloatArray, order: IntArray) -> IntArray:
    """MMScale's rule for 1F1B with p stages: the smallest first, the p - 1 smallest last, the rest into intervals.

    forward, backward: (p, l). Interval 1 of the first stage, from the end of its first forward to the start of its
    first backward, takes p - 1 microbatches whose sum fits best; each later one, between two backwards, the microbatch
    whose forward fits best. Where there are too few microbatches for intervals (l < 2p), `order` is returned.
    """
    p, num = forward.shape
    if p < 2 or num < 2 * p:
        return order
    pool = np.argsort(forward[0], kind="stable").tolist()
    first, last, pool = pool[0], pool[1:p][::-1], pool[p:]
    warm_up = _window_of_sum(pool, forward[0], p - 1, float(forward[1:, first].sum() + backward[1:, first].sum()))
    chosen = [first, *warm_up]
    pool = [i for i in pool if i not in set(warm_up)]
    end = [0.0] * (p + 2)
    for t in range(2 * num + 2 * p - 2):
        now = list(end)
        for s in range(p - 1, -1, -1):  # the first stage last: what it waits for next decides its choice
            is_forward = (t - s) % 2 == 0
            i = (t - s) // 2 if is_forward else (t - 2 * p + 1 + s) // 2
            if not 0 <= i < num:
                continue
            if i == len(chosen):
                if not pool:
                    return np.array(chosen + last, dtype=np.int64)
                gap = now[2] - end[1]
                chosen.append(pool.pop(int(np.abs(forward[0, pool] - gap).argmin())))
            neighbour = s if is_forward else s + 2
            now[s + 1] = max(end[s + 1], end[neighbour]) + float((forward if is_forward else backward)[s, chosen[i]])
        end = now
    raise AssertionError("the pool empties before the pipeline does")


def makespan_lower_bound(forward: FloatArray, backward: FloatArray) -> float:
    """Seconds that no order of a pipeline (p, l) can pass below: a stage's whole work, and what must precede and
    follow it."""
    work = (forward + backward).sum(axis=1)
    before = np.concatenate([[0.0], np.cumsum(forward, axis=0).min(axis=1)[:-1]])
    behind = np.concatenate([[0.0], np.cumsum(backward, axis=0).min(axis=1)[:-1]])
    return float((work + before + behind).max())


def _window_of_sum(pool: list[int], seconds: FloatArray, count: int, target: float) -> list[int]:
    """The `count` neighbours of the ascending `pool` whose sum is nearest to `target`."""
    sums = np.convolve(seconds[pool], np.ones(count), mode="valid")
    begin = int(np.abs(sums - target).argmin())
    return pool[begin : begin + count]


def _swapped(order: IntArray, pairs: list[IntArray]) -> IntArray:
    """`order` with the places of each pair exchanged."""
    changed = order.copy()
    for a, b in pairs:
        changed[a], changed[b] = changed[b], changed[a]
    return changed


def _disjoint(pairs: IntArray) -> list[IntArray]:
    """The first of `pairs` that share no place, at most COMBINED."""
    used: set[int] = set()
    chosen: list[IntArray] = []
    for pair in pairs:
        if used.isdisjoint(pair.tolist()) and len(chosen) < COMBINED:
            used.update(pair.tolist())
            chosen.append(pair)
    return chosen
