"""First-fit decreasing, the packing that grouping is measured against."""

import numpy as np


def first_fit_decreasing(sizes: np.ndarray, budget: int) -> int:
    """Count the groups of first-fit decreasing: largest first, each into the first group that has room.

    sizes: (n,) none above `budget`. The rooms are the leaves of a binary tree of their maxima.
    """
    num_leaves = 1
    while num_leaves < max(len(sizes), 1):
        num_leaves *= 2
    rooms = [budget] * (2 * num_leaves)
    num_groups = 0
    for size in np.sort(sizes)[::-1].tolist():
        node = 1
        while node < num_leaves:
            node = 2 * node if rooms[2 * node] >= size else 2 * node + 1
        num_groups = max(num_groups, node - num_leaves + 1)
        rooms[node] -= size
        while node > 1:
            node //= 2
            rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
    return num_groups
