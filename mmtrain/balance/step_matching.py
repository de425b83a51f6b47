"""Draw the groups of every step at random, then match them inside the step: rows of alike groups, side by side.

Sorting a whole window into alike groups would make its steps of one kind, and gradients with them. Here chance decides
which groups share a step, and only their order inside the step depends on their size.
"""

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.balance.row_targets import MIN_ROUNDING_SHARE, load_unit

MAX_ADDED_VARIANCE = 0.08  # of a step's total by chance: what dividing totals evenly may add to it
MAX_SWAP_CANDIDATES = 256  # groups after a step that are tried for a swap; one in `divisor` of them suits


def draw_steps(
    load: IntArray,
    random_order: tuple[IntArray, float],
    step_size: int,
    num_before: int,
    rng: np.random.Generator,
) -> IntArray:
    """Return an order (G,) of the groups of a window, near the given random one, in steps whose load divides evenly.

    load: (G,) of each group, the coarsest load that is balanced. random_order: an order (G,), and what share of the
    variance of steps of groups drawn one by one is left in it (`random_order.random_order`). step_size: groups in a
    step. num_before: groups of the stream before these; they may end inside a step.

    Whole images make loads coarse: eight replicas cannot share 97 tiles evenly. So one random group of a step changes
    places with a random later one such that the step's total becomes divisible by a divisor of the step's groups. The
    divisor is the largest whose rounding adds at most `MAX_ADDED_VARIANCE` to the variance that the order gives it.
    """
    order, left_share = random_order[0].copy(), random_order[1]
    if not load.any():
        return order
    counts = load // load_unit(load)
    divisor = _even_divisor(counts, step_size, left_share)
    if divisor == 1:
        return order
    first = -num_before % step_size
    for start in range(first, len(load) - step_size + 1, step_size):
        end = start + step_size
        step, later = order[start:end], order[end : end + MAX_SWAP_CANDIDATES]
        excess = int(counts[step].sum()) % divisor
        if excess == 0:
            continue
        change = counts[later][None, :] - counts[step][:, None] + excess
        suitable = np.flatnonzero(change % divisor == 0)
        if len(suitable):
            i, j = divmod(int(rng.choice(suitable)), len(later))
            order[start + i], order[end + j] = order[end + j], order[start + i]
    return order


def _even_divisor(counts: IntArray, step_size: int, left_share: float) -> int:
    """Return the divisor of `step_size` by which totals can be divided evenly without varying much more."""
    total = float(counts.mean()) * step_size
    variance = float(counts.var()) * step_size * left_share
    divisors = [
        d
        for d in range(1, step_size + 1)
        if step_size % d == 0 and d * d / 12 <= MAX_ADDED_VARIANCE * variance and d / 2 >= MIN_ROUNDING_SHARE * total
    ]
    return max(divisors, default=1)
