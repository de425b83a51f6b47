"""Node-wise rearrangement (OrchMLLM, arXiv 2503.23830): place new batches so that little is sent between nodes.

`dispatch_items` calls this: there a piece is an item's features, its new batch the one that encodes the item, and the
source the replica whose LLM reads the features, which does not move. What the source "sends" to the batch it receives
from it, and it sends back as many gradients.
"""

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.balance.check_lengths import check_lengths
from mmtrain.balance.dispatch.node_volume import NodeVolume
from mmtrain.balance.dispatch.placement_by_need import gains_on_nodes, place_by_gain, place_by_need

SENDER_EXPONENTS = 8, 4, 16, 2, 32, 1  # one greedy start each, as far as there is time
MAX_SIZE_OF_ALL_STARTS = 16_384  # greedy starts, times pieces and four times the replicas, that there is time for


def rearrange_across_nodes(
    source: IntArray, batch: IntArray, num_bytes: IntArray, num_replicas: int, per_node: int
) -> IntArray:
    """Place new batches on replicas so that the replica that sends most off its node sends little.

    Piece i lies on replica source[i], belongs to new batch batch[i] (of `num_replicas`), and has num_bytes[i]. Nodes
    are `per_node` consecutive replicas. Returns (num_replicas,) the replica of each batch, each replica once.

    New batches cost the same wherever they are computed. Placing them is a min-max assignment; to solve it exactly
    takes minutes at hundreds of replicas. `place_by_need` bisects the least bound for which senders find what they must
    keep. Among few replicas (64 with 60 pieces each, 512 with 8), where a node can take a large part of the batches,
    this starts from placements that are made greedily, by the bytes they keep on a node, where bytes of heavy senders
    count more. Of greedy placements with the same largest sender the one that sends fewest bytes is taken. The
    placement is never worse than leaving batch j on replica j. Raises ValueError if nodes are not all full, and for
    bytes that are not whole numbers from 0 to 2^40.
    """
    check_lengths("bytes of pieces", num_bytes)
    if num_replicas % per_node:
        raise ValueError(f"{num_replicas} replicas do not fill nodes of {per_node}")
    volume = NodeVolume(source, batch, num_bytes, num_replicas, per_node)
    num_starts = MAX_SIZE_OF_ALL_STARTS // (len(source) + 4 * num_replicas)
    placements = [_place_greedily(volume, exponent) for exponent in SENDER_EXPONENTS[:num_starts]]
    placements.append(np.arange(num_replicas, dtype=np.int64) // per_node)

    def cost(node: IntArray) -> tuple[float, float]:
        sent = volume.off_node(node)
        return float(sent.max(initial=0.0)), float(sent.sum())

    best = min(placements, key=cost)
    by_need = place_by_need(volume, int(volume.off_node(best).max(initial=0.0)))
    return _replicas(best if by_need is None else by_need)


def off_node_bytes(
    source: IntArray, batch: IntArray, num_bytes: IntArray, replica_of_batch: IntArray, per_node: int
) -> IntArray:
    """Return (d,) the bytes that each source replica sends to other nodes."""
    leaves = source // per_node != replica_of_batch[batch] // per_node
    sums = np.bincount(source[leaves], weights=num_bytes[leaves], minlength=len(replica_of_batch))
    return sums.astype(np.int64)


def _place_greedily(volume: NodeVolume, exponent: int) -> IntArray:
    """Place batches on nodes, largest gain first; a byte counts more if its source sends more altogether."""
    weight = (volume.total / max(float(volume.total.max(initial=0.0)), 1.0)) ** exponent
    return place_by_gain(volume, gains_on_nodes(volume, volume.num_bytes * weight[volume.source]), {})


def _replicas(node: IntArray) -> IntArray:
    """(d,) replica of each batch: the replicas of a node take its batches in order."""
    replica = np.empty(len(node), dtype=np.int64)
    replica[np.argsort(node, kind="stable")] = np.arange(len(node))
    return replica
