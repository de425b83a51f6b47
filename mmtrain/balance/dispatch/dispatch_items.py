"""Dispatch the items of a step over all replicas of their encoder, wherever their samples are (OrchMLLM, 2503.23830).

Only lengths are needed, which every rank knows of the whole step. So every rank finds the same places, reads what it
computes itself, and what an item becomes is all that moves between ranks.
"""

from typing import NamedTuple

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.balance.dispatch.node_placement import rearrange_across_nodes
from mmtrain.balance.dispatch.post_balancing import BatchCost, rebalance
from mmtrain.balance.step_targets import SequenceCost


class DispatchSizes(NamedTuple):
    """Over how many places the items of a block are dispatched."""

    dp: int  # replicas
    per_block: int  # microbatches of each replica in a block
    per_node: int | None = None  # replicas on each node, one after another; None: places do not depend on nodes


def dispatch_items(
    tokens: IntArray,
    features: IntArray,
    home: IntArray,
    block: IntArray,
    cost: SequenceCost,
    sizes: DispatchSizes,
    as_padded: bool = False,
) -> tuple[IntArray, IntArray]:
    """Return the replica and the microbatch of each item, such that the replicas of a microbatch cost about the same.

    tokens, features, home, block: (n,) of each item what its encoder computes, the rows that it becomes, the replica
    that reads these, and the block of the step. as_padded: balance batches as if their items were padded. They lie
    side by side without padding, so this is for comparison.

    In each block post-balancing makes batches that cost about the same (`rebalance`), and each batch goes to a replica
    that reads much of it. Items stay at home where that is as even.
    """
    dp, per_block, _ = sizes
    replica, index = home.copy(), block * per_block
    batch_cost = BatchCost("padded" if as_padded else "packed", float(cost.linear), float(cost.quadratic))
    for number in np.unique(block):
        items = np.flatnonzero(block == number)
        at_home = home[items] * per_block
        slot = rebalance(tokens[items], at_home, dp * per_block, batch_cost)
        costs = [batch_cost.of_ranks(tokens[items], slots, dp * per_block).max() for slots in (at_home, slot)]
        if costs[0] <= costs[1]:
            continue
        batch, within = np.divmod(slot, per_block)
        replica[items] = place_batches_near(batch, home[items], features[items], sizes)[batch]
        index[items] += within
    return replica, index


def place_batches_near(batch: IntArray, home: IntArray, features: IntArray, sizes: DispatchSizes) -> IntArray:
    """Return (dp,) the replica of each batch, each replica once, so that many features stay on their replica or node.

    batch, home, features: (n,) of each item.

    Links between nodes are slower than those inside, and a dispatch ends with the replica that moves most. So nodes
    come first: batches are permuted between nodes until the replica that receives most from other nodes receives little
    (node-wise rearrangement), then between the replicas of each node. Only the features count, as nothing else travels.
    Places of the samples are not permuted: it is the places of encoder and LLM relative to each other that count.
    """
    near = place_near(batch, home, features, sizes.dp)
    if sizes.per_node is None:
        return near
    near_batch = near[batch]  # numbered by the replicas that they go to anyway, so that nodes never make it worse
    replica = rearrange_across_nodes(home, near_batch, features, sizes.dp, sizes.per_node)
    node = replica // sizes.per_node
    return place_near(near_batch, home, features, sizes.dp, (node, sizes.per_node))[near]


def place_near(
    batch: IntArray, home: IntArray, features: IntArray, dp: int, nodes: tuple[IntArray, int] | None = None
) -> IntArray:
    """Return (dp,) the replica of each batch, each replica once, so that many features stay on their replica.

    batch, home, features: (n,) of each item. nodes: (dp,) the node on which each batch must stay, and the replicas on
    each; None: any replica will do. The pair of a batch and a replica with most features is joined first, then the next
    of those that are left. That keeps at least half of what the best places keep, and takes 10 ms for 2,560 replicas,
    where an exact assignment takes minutes.
    """
    node, per_node = (np.zeros(dp, dtype=np.int64), dp) if nodes is None else nodes
    may_join = node[batch] == home // per_node
    pairs, pair_of_item = np.unique(batch[may_join] * dp + home[may_join], return_inverse=True)
    volume = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(volume, pair_of_item, features[may_join])
    replica = np.full(dp, -1, dtype=np.int64)
    is_taken = np.zeros(dp, dtype=bool)
    for pair in pairs[np.argsort(-volume, kind="stable")].tolist():
        of_batch, at = divmod(pair, dp)
        if replica[of_batch] < 0 and not is_taken[at]:
            replica[of_batch] = at
            is_taken[at] = True
    without = np.flatnonzero(replica < 0)
    replica[without[np.argsort(node[without], kind="stable")]] = np.flatnonzero(~is_taken)  # both by their nodes
    return replica


def replicas_per_node(replica_nodes: tuple[int, ...]) -> int | None:
    """Return how many consecutive replicas share each node; None on a single node, or where nodes are not all full."""
    num_nodes = len(set(replica_nodes))
    if num_nodes < 2 or len(replica_nodes) % num_nodes:
        return None
    per_node = len(replica_nodes) // num_nodes
    first = replica_nodes[0]
    is_full = all(node == first + place // per_node for place, node in enumerate(replica_nodes))
    return per_node if is_full else None
