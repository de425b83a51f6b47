"""Reorder the microbatches of a pipeline so that it takes less time (MMScale, arXiv 2408.04275, section 5.3)."""

from collections.abc import Callable

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.ordering.makespan_1f1b import makespans_1f1b
from mmtrain.balance.ordering.uneven_stage import order_around_uneven_stage, varies_in_one_stage

SWAPS_PER_ROUND = 256  # scored together; the recurrence costs little more for many orders than for one
MAX_COMBINED_SWAPS = 24  # improving swaps that are tried together


def reorder_microbatches(
    forward: FloatArray,
    backward: FloatArray,
    order: IntArray,
    rounds: int,
    rng: np.random.Generator,
    score: Callable[[IntArray], FloatArray] | None = None,
) -> IntArray:
    """Search an order of microbatches that shortens a pipeline; return (l,), never longer than `order`.

    forward, backward: (c, p, l) seconds of each microbatch on each of p stages, for c pipelines that run one order
    together (LLM replicas fed by the same encoder microbatches). order: (l,) the given order. score: (k,) seconds under
    each of some orders (k, l), for a pipeline other than 1F1B (see `ScheduleRecurrence`); forward and backward are then
    what its ranks do for each microbatch.

    Starts from the best of the given order, the constructed one and that of `order_around_uneven_stage`. Where one
    stage of a 1F1B pipeline varies much more than the others, the formula of `uneven_stage` holds, and each of `rounds`
    rounds descends by it from another order: the constructed one first, then random ones. Elsewhere each round scores
    some random swaps by the pipeline recurrence, then the best of them combined.
    """
    constructed = construct_order(forward.mean(axis=0), backward.mean(axis=0), order)
    descends = score is None and all(map(varies_in_one_stage, forward, backward))
    starts = [order]
    if descends and rounds:
        starts += [constructed, *(rng.permutation(order) for _ in range(rounds - 1))]
    found = [order_around_uneven_stage(forward, backward, start) for start in starts]
    score = score or (lambda orders: makespans_1f1b(forward, backward, orders))
    candidates = np.stack([order, constructed, *found])
    spans = score(candidates)
    best: IntArray = candidates[spans.argmin()]
    if descends:
        return best
    return _swap_at_random(best, float(spans.min()), rounds, rng, score)


def _swap_at_random(
    order: IntArray, span: float, rounds: int, rng: np.random.Generator, score: Callable[[IntArray], FloatArray]
) -> IntArray:
    """Improve `order`, which takes `span` seconds, by random swaps; return (l,)."""
    best, best_span = order, span
    for _ in range(rounds):
        pairs = rng.integers(0, len(order), (SWAPS_PER_ROUND, 2))
        row, first, second = np.arange(SWAPS_PER_ROUND), pairs[:, 0], pairs[:, 1]
        swapped = np.tile(best, (SWAPS_PER_ROUND, 1))
        swapped[row, first], swapped[row, second] = best[second], best[first]
        spans = score(swapped)
        num_better = int((spans < best_span - 1e-12).sum())
        combined = _disjoint(pairs[np.argsort(spans, kind="stable")][:num_better])
        if not combined:
            continue
        candidates = np.stack([_swapped(best, combined[: k + 1]) for k in range(len(combined))])
        spans = score(candidates)
        best = candidates[spans.argmin()]
        best_span = float(spans.min())
    return best


def construct_order(forward: FloatArray, backward: FloatArray, order: IntArray) -> IntArray:
    """Construct an order for 1F1B with p stages by MMScale's rule; return (l,).

    The smallest microbatch comes first, which fills the pipeline soonest, and the p - 1 smallest come last, since the
    last p - 1 intervals stay unfilled. Interval 1 of the first stage, from the end of its first forward to the start of
    its first backward, takes the p - 1 microbatches whose sum fits best; each later interval, between two backwards,
    takes the microbatch whose forward fits best. (The published loop asks for more microbatches than remain; this one
    stops when the pool is empty.) forward, backward: (p, l) seconds. With too few microbatches for intervals (l < 2p),
    `order` is returned.

    Which microbatch comes next depends on when the ones before it end, so this simulates tick by tick: stage s does
    F(i) in tick 2 i + s and B(i) in tick 2 i + 2 p - 1 - s.
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
        new_end = list(end)
        for s in range(p - 1, -1, -1):  # the first stage last: its choice depends on what it waits for next
            is_forward = (t - s) % 2 == 0
            i = (t - s) // 2 if is_forward else (t - 2 * p + 1 + s) // 2
            if not 0 <= i < num:
                continue
            if i == len(chosen):
                if not pool:
                    return np.array(chosen + last, dtype=np.int64)
                gap = new_end[2] - end[1]
                chosen.append(pool.pop(int(np.abs(forward[0, pool] - gap).argmin())))
            neighbor = s if is_forward else s + 2
            seconds = forward if is_forward else backward
            new_end[s + 1] = max(end[s + 1], end[neighbor]) + float(seconds[s, chosen[i]])
        end = new_end
    raise AssertionError("the pool empties before the pipeline does")


def _window_of_sum(pool: list[int], seconds: FloatArray, count: int, target: float) -> list[int]:
    """The `count` adjacent microbatches of the ascending `pool` whose sum is nearest to `target`."""
    sums = np.convolve(seconds[pool], np.ones(count), mode="valid")
    start = int(np.abs(sums - target).argmin())
    return pool[start : start + count]


def _swapped(order: IntArray, pairs: list[IntArray]) -> IntArray:
    """Exchange the places of each pair in a copy of `order`."""
    swapped = order.copy()
    for a, b in pairs:
        swapped[a], swapped[b] = swapped[b], swapped[a]
    return swapped


def _disjoint(pairs: IntArray) -> list[IntArray]:
    """The first of `pairs` that share no place, at most MAX_COMBINED_SWAPS."""
    used: set[int] = set()
    chosen: list[IntArray] = []
    for pair in pairs:
        if used.isdisjoint(pair.tolist()) and len(chosen) < MAX_COMBINED_SWAPS:
            used.update(pair.tolist())
            chosen.append(pair)
    return chosen
