"""Which encoder replica gets which of the batches dealt to them, so that little of what they make leaves its node.

Batches of a replica group cost the same wherever they are computed, and what is made of them goes to LLM replicas that
are placed already. So, unlike where samples are sent before they are encoded (`nodes.rearrange`), what a batch sends
off a node hangs on its own place alone: an assignment with the least largest entry, which matching finds exactly.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch_meta import IntArray


def place_batches(volume: IntArray, node_of: Sequence[int]) -> IntArray:
    """(d,) replica of each batch, each replica once, so that the batch that sends most off its node sends least.

    volume: (d, nodes) what batch j sends to each node; node_of: (d,) node of each replica. Batch j stays on replica j
    where no placement has a smaller largest sender.
    """
    off = volume.sum(axis=1, keepdims=True) - volume[:, list(node_of)]  # (batches, replicas)
    stay = np.arange(len(off))
    levels = np.unique(off)
    levels = levels[levels < off[stay, stay].max(initial=0)]
    best, lo, hi = stay, 0, len(levels)  # a placement is known for level hi, there is none below lo
    while lo < hi:
        middle = (lo + hi) // 2
        found = _matching(off <= levels[middle])
        if found is None:
            lo = middle + 1
        else:
            best, hi = found, middle
    return best


def _matching(allowed: npt.NDArray[np.bool_]) -> IntArray | None:
    """(d,) an allowed column for each row, each column once; None if there is no such choice (Kuhn's algorithm)."""
    options = [np.flatnonzero(row).tolist() for row in allowed]
    row_of: dict[int, int] = {}

    def place(row: int, tried: set[int]) -> bool:
        for column in options[row]:
            if column not in tried:
                tried.add(column)
                if column not in row_of or place(row_of[column], tried):
                    row_of[column] = row
                    return True
        return False

    if not all(place(row, set()) for row in range(len(options))):
        return None
    found = np.empty(len(options), dtype=np.int64)
    found[list(row_of.values())] = list(row_of.keys())
    return found


def place_items(
    replica: IntArray, sent: IntArray, to_node: IntArray, node_of: Sequence[int], num_groups: int
) -> IntArray:
    """(n,) encoder replicas of items after the replicas of each replica group have changed batches by `place_batches`.

    replica, sent, to_node: (n,) encoder replica of each item, what it sends, and the node of the LLM replica it goes
    to. node_of: node of each encoder replica; `num_groups` equal runs of them are the replica groups.
    """
    size, num_nodes = len(node_of) // num_groups, max(*node_of, int(to_node.max(initial=0))) + 1
    moved = replica.copy()
    for lo in range(0, len(node_of), size):
        nodes = node_of[lo : lo + size]
        if len(set(nodes)) == 1:
            continue
        here = np.flatnonzero((replica >= lo) & (replica < lo + size))
        volume = np.zeros((size, num_nodes), dtype=np.int64)
        np.add.at(volume, (replica[here] - lo, to_node[here]), sent[here])
        moved[here] = lo + place_batches(volume, nodes)[replica[here] - lo]
    return moved
