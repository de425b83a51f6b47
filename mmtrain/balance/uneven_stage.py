"""Orders for a 1F1B pipeline in which one stage is uneven, found by a formula instead of the recurrence.

Let stage v be the one whose times differ between microbatches (an encoder), T the longest forward plus backward of the
others, and q stages lie from v to the end. Stage v warms up with q forwards, then alternates backwards and forwards,
and ends with q backwards. With x_k the k-th microbatch the pipeline takes, up to a constant,

    f(x_0) + max(slack, sum_{0<k<q} f(x_k))                warm-up: later forwards hide behind the first one's way
    + sum_{k<l-q} max(T, b(x_k) + f(x_{k+q}))              steady state: a turn longer than T delays everybody
    + max_{j<q} (j T + sum_{k>=l-q+j} b(x_k))              cool-down: backwards arrive every T and may pile up

which is exact where the other stages are even, v is the first and the warm-up's forwards come early enough; else it
is a guess. A change of one position changes few terms, so that all l^2 swaps are judged at once. (The intervals are
those of MMScale, arXiv 2408.04275, section 5.3; the formula is ours.)
"""

from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray

SWEEPS = 24  # at most; the descent mostly ends after ten
SWAPS_A_SWEEP = 48  # best swaps looked at in a sweep
WARM_UP, COOL_DOWN = -1, -2  # stand for the terms of many positions, among positions


@dataclass(frozen=True)
class UnevenStage:
    """The uneven stage of one pipeline."""

    forward: FloatArray  # (l,) f
    backward: FloatArray  # (l,) b
    turn: float  # T
    slack: float
    after: int  # q


def order_around_uneven_stage(forward: FloatArray, backward: FloatArray, order: IntArray) -> IntArray:
    """Swap microbatches of `order` while that shortens the pipelines by the formula above; returns (l,).

    forward, backward: (c, p, l) seconds; c pipelines that run one order together count by the sum of their times.
    Where a pipeline has too few microbatches for a steady state, `order` is returned. What is found is good where the
    formula is, so score it by the recurrence.
    """
    pipelines = [uneven_stage(f, b) for f, b in zip(forward, backward, strict=True)]
    num = len(order)
    if max(p.after for p in pipelines) * 2 > num:
        return order
    order = order.copy()
    for _ in range(SWEEPS):
        for p in pipelines:
            _sort_ends(p, order)
        change = np.sum([replacement_changes(p, order) for p in pipelines], axis=0)[:, order]
        gain = change + change.T  # of swapping positions (i, j), as long as neither changes what the other's is
        for p in pipelines:
            forbid_dependent_swaps(gain, p.after)
        if not _swap(order, gain, {p.after for p in pipelines}):
            break
    return order


def uneven_stage(forward: FloatArray, backward: FloatArray) -> UnevenStage:
    """Find it in (p, l) seconds of stages by microbatches: the stage whose times vary most."""
    busy = forward + backward
    v = int(busy.std(axis=1).argmax())
    mean = busy.mean(axis=1)
    others = np.delete(mean, v)
    return UnevenStage(
        forward[v], backward[v], float(others.max(initial=0.0)), float(mean[v + 1 :].sum()), len(forward) - v
    )


def _sort_ends(p: UnevenStage, order: IntArray) -> None:
    """The least backward last: what has piled up by then is least."""
    last = order[len(order) - p.after :]
    last[:] = last[np.argsort(-p.backward[last], kind="stable")]


def replacement_changes(p: UnevenStage, order: IntArray) -> FloatArray:
    """(l, l) change of the formula if position i held microbatch y instead, all others as they are."""
    q, num = p.after, len(order)
    f, b = p.forward[order], p.backward[order]
    change = np.zeros((num, num))
    change[0] += p.forward - f[0]
    warm = f[1:q].sum()
    change[1:q] += np.maximum(p.slack, warm - f[1:q, None] + p.forward) - max(p.slack, warm)
    now = np.maximum(p.turn, b[: num - q] + f[q:])[:, None]
    change[: num - q] += np.maximum(p.turn, p.backward + f[q:, None]) - now
    change[q:] += np.maximum(p.turn, b[: num - q, None] + p.forward) - now
    last = b[num - q :]
    piled = np.arange(q) * p.turn + np.cumsum(last[::-1])[::-1]
    until = np.maximum.accumulate(piled)[:, None]
    beyond = np.append(np.maximum.accumulate(piled[::-1])[::-1][1:], 0.0)[:, None]
    change[num - q :] += np.maximum(until + p.backward - last[:, None], beyond) - piled.max()
    return change


def forbid_dependent_swaps(gain: FloatArray, q: int) -> None:
    """Leave alone swaps of positions that stand in one term."""
    num = len(gain)
    at = np.arange(num - q)
    gain[at, at + q] = gain[at + q, at] = 0.0
    gain[1:q, 1:q] = gain[num - q :, num - q :] = 0.0


def _swap(order: IntArray, gain: FloatArray, reaches: set[int]) -> int:
    """Make the best swaps that share no term; returns their number."""
    num, made = len(order), 0
    pairs = np.flatnonzero(np.triu(gain, 1) < -1e-9)
    best_first = pairs[np.argsort(gain.ravel()[pairs], kind="stable")[:SWAPS_A_SWEEP]]
    taken: set[int] = set()
    for pair in best_first.tolist():
        i, j = divmod(pair, num)
        touched = {k + step for k in (i, j) for q in reaches for step in (-q, 0, q) if 0 <= k + step < num}
        if min(i, j) < max(reaches):
            touched.add(WARM_UP)
        if max(i, j) >= num - max(reaches):
            touched.add(COOL_DOWN)
        if taken.isdisjoint(touched):
            taken |= touched
            order[i], order[j] = order[j], order[i]
            made += 1
    return made
