"""Place the batches of encoder replicas so that little of what they produce leaves its node.

Batches of a replica group cost the same wherever they are computed, and their features go to LLM replicas that are
placed already. So what a batch sends off a node depends on its own place only, unlike where samples are sent before
they are encoded (`node_rearrangement`): this is an assignment with the least largest entry, which bipartite matching
finds exactly.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch_meta import IntArray


def place_batches(volume: IntArray, node_of: Sequence[int]) -> IntArray:
    """Give each batch a replica of its own such that the batch that sends most off its node sends the least.

    volume: (d, nodes) what batch j sends to each node. node_of: (d,) node of each replica. Returns (d,) the replica of
    each batch. Batch j stays on replica j where no placement has a smaller largest sender.
    """
    sent_off_node = volume.sum(axis=1, keepdims=True) - volume[:, list(node_of)]  # (batches, replicas)
    stay = np.arange(len(sent_off_node))
    levels = np.unique(sent_off_node)
    levels = levels[levels < sent_off_node[stay, stay].max(initial=0)]
    best, lo, hi = stay, 0, len(levels)  # a placement is known for level hi, there is none below lo
    while lo < hi:
        middle = (lo + hi) // 2
        replicas = _perfect_matching(sent_off_node <= levels[middle])
        if replicas is None:
            lo = middle + 1
        else:
            best = replicas
            hi = middle
    return best


def _perfect_matching(allowed: npt.NDArray[np.bool_]) -> IntArray | None:
    """(d,) an allowed column for each row, each column once; None if there is none (Kuhn's algorithm)."""
    options = [np.flatnonzero(row).tolist() for row in allowed]
    row_of: dict[int, int] = {}

    def match(row: int, tried: set[int]) -> bool:
        for column in options[row]:
            if column not in tried:
                tried.add(column)
                if column not in row_of or match(row_of[column], tried):
                    row_of[column] = row
                    return True
        return False

    if not all(match(row, set()) for row in range(len(options))):
        return None
    column_of = np.empty(len(options), dtype=np.int64)
    column_of[list(row_of.values())] = list(row_of.keys())
    return column_of


def place_items(
    replica: IntArray, num_features: IntArray, to_node: IntArray, node_of: Sequence[int], num_groups: int
) -> IntArray:
    """Exchange whole batches between the encoder replicas of each replica group, by `place_batches`.

    replica, num_features, to_node: (n,) encoder replica of each item, the features it sends, and the node of the LLM
    replica that reads them. node_of: node of each encoder replica; `num_groups` equal runs of replicas are the replica
    groups. Returns (n,) the new replica of each item.
    """
    size = len(node_of) // num_groups
    num_nodes = max(*node_of, int(to_node.max(initial=0))) + 1
    moved = replica.copy()
    for first in range(0, len(node_of), size):
        nodes = node_of[first : first + size]
        if len(set(nodes)) == 1:
            continue
        items = np.flatnonzero((replica >= first) & (replica < first + size))
        volume = np.zeros((size, num_nodes), dtype=np.int64)
        np.add.at(volume, (replica[items] - first, to_node[items]), num_features[items])
        moved[items] = first + place_batches(volume, nodes)[replica[items] - first]
    return moved
