"""Dispatch the items of a step over all replicas of their encoder, wherever their samples are (OrchMLLM, 2503.23830).

Only lengths are needed, which every rank knows of the whole step. So every rank finds the same places, reads what it
computes itself, and what an item becomes is all that moves between ranks.
"""

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.balance.post_balancing import BatchCost, rebalance
from mmtrain.balance.step_targets import SequenceCost


def dispatch_items(
    tokens: IntArray, features: IntArray, home: IntArray, block: IntArray, cost: SequenceCost, dp: int, per_block: int
) -> tuple[IntArray, IntArray]:
    """Return the replica and the microbatch of each item, such that the replicas of a microbatch cost about the same.

    tokens, features, home, block: (n,) of each item what its encoder computes, the rows that it becomes, the replica
    that reads these, and the block of the step. dp, per_block: replicas, and microbatches of each in a block.

    In each block post-balancing makes batches that cost about the same (`rebalance`; items lie side by side without
    padding), and each batch goes to a replica that reads much of it. Items stay at home where that is as even.
    """
    replica, index = home.copy(), block * per_block
    batch_cost = BatchCost("packed", float(cost.linear), float(cost.quadratic))
    for number in np.unique(block):
        items = np.flatnonzero(block == number)
        at_home = home[items] * per_block
        slot = rebalance(tokens[items], at_home, dp * per_block, batch_cost).dest_rank
        costs = [batch_cost.of_ranks(tokens[items], slots, dp * per_block).max() for slots in (at_home, slot)]
        if costs[0] <= costs[1]:
            continue
        batch, within = np.divmod(slot, per_block)
        replica[items] = place_near(batch, home[items], features[items], dp)[batch]
        index[items] += within
    return replica, index


def place_near(batch: IntArray, home: IntArray, features: IntArray, dp: int) -> IntArray:
    """Return (dp,) the replica of each batch, each replica once, so that many features stay on their replica.

    batch, home, features: (n,) of each item. The pair of a batch and a replica with most features is joined first, then
    the next of those that are left. That keeps at least half of what the best places keep, and takes 10 ms for 2,560
    replicas, where an exact assignment takes minutes.
    """
    pairs, pair_of_item = np.unique(batch * dp + home, return_inverse=True)
    volume = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(volume, pair_of_item, features)
    replica = np.full(dp, -1, dtype=np.int64)
    is_taken = np.zeros(dp, dtype=bool)
    for pair in pairs[np.argsort(-volume, kind="stable")].tolist():
        of_batch, at = divmod(pair, dp)
        if replica[of_batch] < 0 and not is_taken[at]:
            replica[of_batch] = at
            is_taken[at] = True
    replica[replica < 0] = np.flatnonzero(~is_taken)
    return replica
