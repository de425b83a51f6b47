"""Lower bounds of how long a 1F1B pipeline takes in any order of its microbatches, to measure orders against."""

import numpy as np
from scipy.optimize import linear_sum_assignment

from mmtrain.balance.batch_meta import FloatArray

NUM_BOUNDS = 60  # that are tried, each with other shares of the terms of a maximum
FORBIDDEN = 1e9  # seconds


def makespan_lower_bound(forward: FloatArray, backward: FloatArray) -> float:
    """Return seconds that no order of a pipeline goes below; forward, backward: (p, l).

    That is a stage's whole work, what must precede it on the stages before, and what must follow it there.
    """
    work = (forward + backward).sum(axis=1)
    before = np.concatenate([[0.0], np.cumsum(forward, axis=0).min(axis=1)[:-1]])
    after = np.concatenate([[0.0], np.cumsum(backward, axis=0).min(axis=1)[:-1]])
    return float((work + before + after).max())


def pairing_lower_bound(forward: FloatArray, backward: FloatArray) -> float:
    """Return seconds that no order goes below, because of how the first stage pairs microbatches; (p, l), p <= l.

    Let f, b be the first stage's times, t_s the least forward plus the least backward of stage s, and x_k the k-th
    microbatch. The first stage runs the forwards of x_0 to x_{p-1}, then in turn the backward of x_k and the forward of
    x_{k+p}, and at last p backwards. Let S_k be the start of its backward k.

    S_0 >= f(x_0) + max(t_1 + ... + t_{p-1}, f(x_1) + ... + f(x_{p-1})): x_0 goes down and up the pipeline.
    S_{k+1} >= S_k + max(t_1, b(x_k) + f(x_{k+p})) for k < l - p. The second stage ends backward k before S_k, and the
    forward of x_{k+p-1}, which it runs next, begins neither before that end nor before the first stage has ended it,
    and that is before S_k. Backward k + 1 follows, so it ends at S_k + t_1 or later.
    S_{l-p+j} >= S_{l-p} + t_1 + ... + t_j for j < p: stage j runs the last forward before its backward l - p + j.
    The end is at S_{l-p+j} + b(x_{l-p+j}) + ... + b(x_{l-1}) or later, for every j.

    So every backward is paired with another microbatch's forward, or among the last p, and every forward with a
    backward, or among the first p. A maximum is at least any weighted mean of its terms, which makes the total a sum
    over pairs, and the cheapest assignment a bound (it may pair in circles, which no order can). The weights are
    improved by the terms that the assignment makes largest, as Frank and Wolfe do.
    """
    num_stages, num = forward.shape
    if num_stages < 2:
        return float((forward + backward).sum())
    passes = forward[1:].min(axis=1) + backward[1:].min(axis=1)  # t_1 to t_{p-1}
    ways = np.concatenate([[0.0], np.cumsum(passes)])
    pairs = np.maximum(passes[0], backward[0][:, None] + forward[0][None])
    np.fill_diagonal(pairs, FORBIDDEN)
    warm_up, cool_down = 0.5, np.full(num_stages, 1 / num_stages)  # shares of the terms of both maxima
    best = 0.0
    for number in range(NUM_BOUNDS):
        costs = np.full((num + num_stages, num + num_stages), FORBIDDEN)  # of backwards and slots by forwards and slots
        costs[:num, :num] = pairs
        costs[num, :num] = forward[0]
        costs[num + 1 :, :num] = (1 - warm_up) * forward[0]
        costs[:num, num:] = backward[0][:, None] * np.cumsum(cool_down)
        rows, columns = linear_sum_assignment(costs)
        best = max(best, float(costs[rows, columns].sum() + warm_up * ways[-1] + cool_down @ ways))
        warm_up_s = forward[0][columns[num + 1 :]].sum()
        last = backward[0][rows[np.argsort(columns)][num:]]
        piled_up = ways + np.cumsum(last[::-1])[::-1]
        share = 1 / (number + 3)
        warm_up += share * (float(ways[-1] > warm_up_s) - warm_up)
        cool_down = (1 - share) * cool_down
        cool_down[piled_up.argmax()] += share
    return best
