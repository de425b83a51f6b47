"""Draw the groups of every step at random, then match them inside the step: rows of alike groups, side by side.

Sorting a whole window into alike groups would make its steps of one kind, and gradients with them. Here chance decides
which groups share a step, and only their order inside the step depends on their size.
"""

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.balance.matched.row_targets import MIN_ROUNDING_SHARE, load_unit

MAX_ADDED_VARIANCE = 0.08  # of a step's total by chance: what dividing totals evenly may add to it
MAX_SWAP_CANDIDATES = 256  # groups of a step, and after it, that are tried for a swap
# A step has a divisor's eleventh too few units: one row then takes what some groups have too many, where no exchange
# fits (scripts/bench_balance.py at 64 x 8: tiles 0.020 uneven without, 0.009 with it).
UNITS_PER_MISSING_UNIT = 11
MAX_SWAP_DEVIATIONS = 1.5  # of groups' loads: what a swap changes at most, so that there are pairs to choose from


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

    Whole images make loads coarse: eight replicas cannot share 97 tiles evenly. So random groups of a step change
    places with random later ones such that the step's total becomes the nearest number that a divisor of the step's
    groups divides, less a few units. The divisor is the largest whose rounding adds at most `MAX_ADDED_VARIANCE` to the
    variance that the order gives it. A step that begins in the window before keeps its total.
    """
    order, left_share = random_order[0].copy(), random_order[1]
    if not load.any():
        return order
    counts = load // load_unit(load)
    divisor = _even_divisor(counts, step_size, left_share)
    if divisor == 1:
        return order
    max_change = max(round(MAX_SWAP_DEVIATIONS * float(counts.std())), 1)
    for start in range(-num_before % step_size, len(load) - step_size + 1, step_size):
        total = int(counts[order[start : start + step_size]].sum())
        excess = (total + divisor // UNITS_PER_MISSING_UNIT) % divisor
        missing = divisor - excess if 2 * excess > divisor else -excess
        for num_left in range(-(-abs(missing) // max_change), 0, -1):
            missing -= _swap(order, counts, slice(start, start + step_size), round(missing / num_left), rng)
    return order


def _swap(order: IntArray, counts: IntArray, step: slice, change: int, rng: np.random.Generator) -> int:
    """Let a group of a step and one behind it change places such that the step's total rises by `change`.

    Returns by how much it rises: 0 if no two of the groups that are tried differ by that.
    """
    inside = rng.permutation(np.arange(step.start, step.stop))[:MAX_SWAP_CANDIDATES]
    later = np.arange(step.stop, min(step.stop + MAX_SWAP_CANDIDATES, len(order)))
    suitable = np.flatnonzero(counts[order[later]][None, :] - counts[order[inside]][:, None] == change)
    if not len(suitable):
        return 0
    i, j = divmod(int(rng.choice(suitable)), len(later))
    order[[inside[i], later[j]]] = order[[later[j], inside[i]]]
    return change


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
