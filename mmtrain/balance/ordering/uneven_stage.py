"""Order the microbatches of a 1F1B pipeline in which one stage is uneven, by a formula instead of the recurrence.

Let stage v be the one whose times differ between microbatches (an encoder), T the longest forward plus backward of the
others, and q the number of stages from v to the end. Stage v warms up with q forwards, then alternates backwards and
forwards, and ends with q backwards. With x_k the k-th microbatch the pipeline takes, up to a constant,

    f(x_0) + max(slack, sum_{0<k<q} f(x_k))                warm-up: later forwards hide behind the first one's way
    + sum_{k<l-q} max(T, b(x_k) + f(x_{k+q}))              steady state: an interval longer than T delays every stage
    + max_{j<q} (j T + sum_{k>=l-q+j} b(x_k))              cool-down: backwards arrive every T and may pile up

This is exact where the other stages are even, v is the first stage and the warm-up's forwards come early enough;
elsewhere it is an approximation. A change of one position changes few terms, so all l^2 swaps are scored at once, in
the time in which the recurrence (`pipeline_recurrence`) scores a few: that is why this second way to predict a
pipeline's time exists. It only proposes orders, which the recurrence then scores, and `tests/balance/test_reordering`
holds it against the recurrence. The intervals are those of MMScale, arXiv 2408.04275, section 5.3; the formula is ours.
"""

from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray

# Of the uneven stage's deviation, that of the others: at a sixth, random swaps gain more than the formula.
MAX_DEVIATION_OF_OTHERS = 0.05
MAX_SWEEPS = 24  # the descent mostly ends after ten
MAX_SWAPS_PER_SWEEP = 48  # the best swaps that a sweep considers
WARM_UP_TERM = "warm-up"  # the term that many positions share
COOL_DOWN_TERM = "cool-down"


@dataclass(frozen=True)
class UnevenStage:
    """The uneven stage v of one pipeline, and what its formula needs of the other stages."""

    forward: FloatArray  # (l,) f
    backward: FloatArray  # (l,) b
    interval_s: float  # T
    slack_s: float
    num_stages_to_end: int  # q


def order_around_uneven_stage(forward: FloatArray, backward: FloatArray, order: IntArray) -> IntArray:
    """Swap microbatches of `order` while that shortens the pipelines by the formula above; return (l,).

    forward, backward: (c, p, l) seconds; of c pipelines that run one order together the sum of their times counts.
    Where a pipeline has too few microbatches for a steady state, `order` is returned. The result is as good as the
    formula, so score it by the recurrence.
    """
    pipelines = [find_uneven_stage(f, b) for f, b in zip(forward, backward, strict=True)]
    if max(p.num_stages_to_end for p in pipelines) * 2 > len(order):
        return order
    order = order.copy()
    for _ in range(MAX_SWEEPS):
        for p in pipelines:
            _sort_cool_down(p, order)
        change = np.sum([replacement_changes(p, order) for p in pipelines], axis=0)[:, order]
        change_of_swap = change + change.T  # of positions (i, j), as long as they share no term
        for p in pipelines:
            forbid_dependent_swaps(change_of_swap, p.num_stages_to_end)
        if not _swap(order, change_of_swap, {p.num_stages_to_end for p in pipelines}):
            break
    return order


def varies_in_one_stage(forward: FloatArray, backward: FloatArray) -> bool:
    """Return whether the times of one stage vary much more than those of all others; forward, backward: (p, l)."""
    deviations = np.sort((forward + backward).std(axis=1))
    return len(deviations) > 1 and bool(deviations[-2] <= MAX_DEVIATION_OF_OTHERS * deviations[-1])


def find_uneven_stage(forward: FloatArray, backward: FloatArray) -> UnevenStage:
    """Find the stage whose times vary most; forward, backward: (p, l) seconds of stages by microbatches."""
    busy = forward + backward
    v = int(busy.std(axis=1).argmax())
    mean = busy.mean(axis=1)
    return UnevenStage(
        forward=forward[v],
        backward=backward[v],
        interval_s=float(np.delete(mean, v).max(initial=0.0)),
        slack_s=float(mean[v + 1 :].sum()),
        num_stages_to_end=len(forward) - v,
    )


def _sort_cool_down(p: UnevenStage, order: IntArray) -> None:
    """Put the shortest backward last: then the least work has piled up when it comes."""
    cool_down = order[len(order) - p.num_stages_to_end :]
    cool_down[:] = cool_down[np.argsort(-p.backward[cool_down], kind="stable")]


def replacement_changes(p: UnevenStage, order: IntArray) -> FloatArray:
    """Return (l, l) the change of the formula if position i held microbatch y, and all others stayed as they are."""
    q, num = p.num_stages_to_end, len(order)
    f, b = p.forward[order], p.backward[order]
    change = np.zeros((num, num))
    change[0] += p.forward - f[0]
    warm_up_s = f[1:q].sum()
    change[1:q] += np.maximum(p.slack_s, warm_up_s - f[1:q, None] + p.forward) - max(p.slack_s, warm_up_s)
    intervals = np.maximum(p.interval_s, b[: num - q] + f[q:])[:, None]
    change[: num - q] += np.maximum(p.interval_s, p.backward + f[q:, None]) - intervals
    change[q:] += np.maximum(p.interval_s, b[: num - q, None] + p.forward) - intervals
    last = b[num - q :]
    piled_up = np.arange(q) * p.interval_s + np.cumsum(last[::-1])[::-1]
    up_to = np.maximum.accumulate(piled_up)[:, None]
    beyond = np.append(np.maximum.accumulate(piled_up[::-1])[::-1][1:], 0.0)[:, None]
    change[num - q :] += np.maximum(up_to + p.backward - last[:, None], beyond) - piled_up.max()
    return change


def forbid_dependent_swaps(change_of_swap: FloatArray, q: int) -> None:
    """Set the change of swaps to zero, in place, where both positions stand in one term."""
    num = len(change_of_swap)
    position = np.arange(num - q)
    change_of_swap[position, position + q] = change_of_swap[position + q, position] = 0.0
    change_of_swap[1:q, 1:q] = change_of_swap[num - q :, num - q :] = 0.0


def _swap(order: IntArray, change_of_swap: FloatArray, distances: set[int]) -> int:
    """Make the best swaps that share no term; return how many.

    distances: the q of every pipeline, by which positions of one term of its steady state lie apart.
    """
    num, num_swaps = len(order), 0
    pairs = np.flatnonzero(np.triu(change_of_swap, 1) < -1e-9)
    best_first = pairs[np.argsort(change_of_swap.ravel()[pairs], kind="stable")[:MAX_SWAPS_PER_SWEEP]]
    used: set[int | str] = set()  # positions and terms
    for pair in best_first.tolist():
        i, j = divmod(pair, num)
        touched: set[int | str] = {
            k + offset for k in (i, j) for q in distances for offset in (-q, 0, q) if 0 <= k + offset < num
        }
        if min(i, j) < max(distances):
            touched.add(WARM_UP_TERM)
        if max(i, j) >= num - max(distances):
            touched.add(COOL_DOWN_TERM)
        if used.isdisjoint(touched):
            used |= touched
            order[i], order[j] = order[j], order[i]
            num_swaps += 1
    return num_swaps
