"""Choose what the groups that run side by side should hold: whole numbers of the coarsest load, the same in a row."""

from itertools import pairwise

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray

MAX_LACK_SHARE = 0.06  # of a row's load, that groups which cannot reach the row's target may lack together
MIN_LACK_UNITS = 1.5  # below the mean: where the smallest group is nearer, exchanges will bring it there
USABLE_FREE_SHARE = 0.9  # of the LLM tokens of samples without the load: the rest fills gaps in other rows
MIN_ROUNDING_SHARE = 1e-4  # of a step's load: where the unit of a load is finer, whole units need no care
MAX_UNITS_PER_GROUP = 1000  # finer loads are counted in thousandths of a group
MAX_ROW_SWAPS = 64  # swaps of groups between two rows; each changes the totals by one unit


def load_unit(load: IntArray) -> int:
    """Return the greatest common divisor of the loads (k,) of samples, at least 1: whole images make loads coarse."""
    return max(int(np.gcd.reduce(load)), 1) if len(load) else 1


def row_targets(group_load: IntArray, load: IntArray, tokens: IntArray, num_replicas: int) -> FloatArray:
    """Return (G,) the coarsest load that each group of a step should have, the same for the groups of a row.

    group_load: (G,) of each group, ascending; each run of `num_replicas` is a row. load, tokens: (k,) the coarsest load
    and the LLM tokens of each sample of the step.

    All rows get near the mean, in whole units, unless some groups cannot: a text of a group's length leaves no room for
    images. These are in the first rows. Such a row gets the largest target of which its groups lack at most
    `MAX_LACK_SHARE`, but no smaller one than samples without the load suffice for.
    """
    num_rows = len(group_load) // num_replicas
    unit = max(load_unit(load), int(group_load.mean()) // MAX_UNITS_PER_GROUP)
    rows = group_load.reshape(num_rows, num_replicas) // unit
    units_left = int(rows.sum())
    free_tokens = USABLE_FREE_SHARE * float(tokens[load == 0].sum())
    tokens_per_unit = max(float(tokens[load > 0].sum()) / max(units_left, 1), 1.0)
    tokens_per_group = float(tokens.sum()) / len(group_load)
    targets = np.zeros(num_rows, dtype=np.int64)
    num_low_rows = 0
    for row in range(num_rows - 1):
        mean = units_left / (num_rows - row) / num_replicas
        least = int(np.ceil((tokens_per_group - free_tokens / num_replicas) / tokens_per_unit))
        candidates = np.arange(max(least, 1), int(mean) + 1)
        if rows[row, 0] >= mean - MIN_LACK_UNITS or not len(candidates):
            break
        lack = np.maximum(candidates[:, None] - rows[row], 0).sum(axis=1) / (candidates * num_replicas)
        target = int(candidates[np.flatnonzero(lack <= max(float(lack.min()), MAX_LACK_SHARE))[-1]])
        if target >= mean - 0.5:
            break
        targets[row] = target
        units_left -= target * num_replicas
        free_tokens -= num_replicas * (tokens_per_group - tokens_per_unit * target)
        num_low_rows = row + 1
    num_others = num_rows - num_low_rows
    sums = np.round(np.arange(num_others + 1) * (units_left / num_replicas / num_others))
    targets[num_low_rows:] = np.sort(np.diff(sums))
    return np.repeat(targets * unit, num_replicas).astype(np.float64)


def order_rows(loads: IntArray, unit: int, num_replicas: int) -> IntArray:
    """Return the order (G,) of a step's groups in which each run of `num_replicas` is as alike as the groups permit.

    loads: (G, q), whole numbers, the coarsest first and in units of `unit`. Groups are sorted by their loads and cut
    into rows. Then each row changes groups with the next one that have one unit more, until its coarsest total can be
    divided evenly among the replicas.
    """
    order: IntArray = np.lexsort(loads.T[::-1])
    counts = loads[:, 0] // unit
    if num_replicas / 2 < MIN_ROUNDING_SHARE * counts.sum():
        return order
    rows = order.reshape(-1, num_replicas)
    for row, next_row in pairwise(rows):
        num_missing = -int(counts[row].sum()) % num_replicas
        for _ in range(min(num_missing, MAX_ROW_SWAPS)):
            is_one_more = counts[next_row][None, :] - counts[row][:, None] == 1
            i, j = divmod(int(is_one_more.argmax()), num_replicas)
            if not is_one_more[i, j]:
                break
            row[i], next_row[j] = next_row[j], row[i]
    return rows.ravel()
