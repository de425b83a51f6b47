"""Node-wise rearrangement (OrchMLLM, arXiv 2503.23830): place new batches so that little is sent between nodes.

`dispatch_items` calls this: there a piece is an item's features, its new batch the one that encodes the item, and the
source the replica whose LLM reads the features, which does not move. What the source "sends" to the batch it receives
from it, and it sends back as many gradients.
"""

from itertools import combinations
from math import comb

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.check_lengths import check_lengths
from mmtrain.balance.node_volume import NodeVolume
from mmtrain.balance.placement_by_need import gains_on_nodes, place_by_gain, place_by_need

SENDER_EXPONENTS = 8, 4, 16, 2, 32, 1  # one greedy start each, as far as there is time
MAX_SIZE_OF_ALL_STARTS = 16_384  # greedy starts, times pieces and four times the replicas, that there is time for
MAX_EXCHANGES_PER_SENDER = 60  # exchanges that are tried for one worst sender
MAX_WAYS_TO_FILL_NODE = 2_000  # up to which the best placement is searched for
MAX_SEARCH_STEPS = 20_000  # after which that search gives up
MAX_STALLED_SENDERS = 6  # worst senders that are tried one after another before the exchanges end


def rearrange_across_nodes(
    source: IntArray, batch: IntArray, num_bytes: IntArray, num_replicas: int, per_node: int, swaps: int
) -> IntArray:
    """Place new batches on replicas so that the replica that sends most off its node sends little.

    Piece i lies on replica source[i], belongs to new batch batch[i] (of `num_replicas`), and has num_bytes[i]. Nodes
    are `per_node` consecutive replicas. Returns (num_replicas,) the replica of each batch, each replica once.

    New batches cost the same wherever they are computed. Placing them is a min-max assignment; to solve it exactly
    takes minutes at hundreds of replicas. `place_by_need` bisects the least bound for which senders find what they must
    keep. Among few replicas (64 with 60 pieces each, 512 with 8), where a node can take a large part of the batches,
    this starts from placements that are made greedily, by the bytes they keep on a node, where bytes of heavy senders
    count more; before and after it at most `swaps` exchanges of two batches relieve the worst sender.
    Where a node can be filled in few ways (4 of 16 batches) an exact search starts from the result. Exchanges and the
    exact search can take a second; with `swaps` 0 both are left out, which takes milliseconds. Of greedy placements
    with the same largest sender the one that sends fewest bytes is taken. The placement is never worse than leaving
    batch j on replica j. Raises ValueError if nodes are not all full, and for bytes that are not whole numbers from 0
    to 2^40.
    """
    check_lengths("bytes of pieces", num_bytes)
    if num_replicas % per_node:
        raise ValueError(f"{num_replicas} replicas do not fill nodes of {per_node}")
    volume = NodeVolume(source, batch, num_bytes, num_replicas, per_node)
    num_starts = MAX_SIZE_OF_ALL_STARTS // (len(source) + 4 * num_replicas)
    placements = [
        _relieve_worst_sender(volume, _place_greedily(volume, exponent), swaps)
        for exponent in SENDER_EXPONENTS[:num_starts]
    ]
    placements.append(np.arange(num_replicas, dtype=np.int64) // per_node)

    def cost(node: IntArray) -> tuple[float, float]:
        sent = volume.off_node(node)
        return float(sent.max(initial=0.0)), float(sent.sum())

    best = min(placements, key=cost)
    by_need = place_by_need(volume, int(volume.off_node(best).max(initial=0.0)))
    if by_need is not None:
        best = _relieve_worst_sender(volume, by_need, swaps) if num_starts else by_need
    if swaps and comb(num_replicas, per_node) <= MAX_WAYS_TO_FILL_NODE:
        best = _search_exactly(volume, best)
    return _replicas(best)


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


def _relieve_worst_sender(volume: NodeVolume, node: IntArray, swaps: int) -> IntArray:
    """Exchange batches between nodes while that relieves the worst sender without making another one as bad."""
    node, off_node, num_stalled = node.copy(), volume.off_node(node), 0
    for _ in range(swaps):
        sender = int(np.argsort(-off_node, kind="stable")[num_stalled])
        swap = _best_swap(volume, node, off_node, sender)
        if swap is None:
            num_stalled += 1
            if num_stalled == min(MAX_STALLED_SENDERS, len(off_node)):
                break
            continue
        (entering, leaving), new_off_node = swap
        node[entering], node[leaving] = node[leaving], node[entering]
        off_node[list(new_off_node)] = list(new_off_node.values())
        num_stalled = 0
    return node


def _best_swap(
    volume: NodeVolume, node: IntArray, off_node: FloatArray, sender: int
) -> tuple[tuple[int, int], dict[int, float]] | None:
    """The exchange that relieves `sender` most, if no other source sends as much after it as `sender` does now.

    Returns the batches that enter and leave the sender's node, and what the sources on both nodes then send off them.
    """
    home = sender // volume.per_node
    lo, hi = volume.of_source[sender], volume.of_source[sender + 1]
    sent: dict[int, float] = {}  # bytes from the sender to each batch
    for batch, size in zip(volume.batch[lo:hi].tolist(), volume.num_bytes[lo:hi].tolist(), strict=True):
        sent[batch] = sent.get(batch, 0.0) + size
    inside = np.flatnonzero(node == home).tolist()
    outside = [batch for batch in sent if node[batch] != home]
    swaps = [(sent.get(leaving, 0.0) - sent[entering], entering, leaving) for entering in outside for leaving in inside]
    best: tuple[tuple[int, int], dict[int, float]] | None = None
    best_level = float(off_node[sender]) - 1e-6
    for change, entering, leaving in sorted(swaps)[:MAX_EXCHANGES_PER_SENDER]:
        if change >= 0 or off_node[sender] + change >= best_level:
            break
        after = _off_node_after(volume, off_node, (int(node[entering]), home), (entering, leaving))
        if max(after.values()) < best_level:
            best = (entering, leaving), after
            best_level = max(after.values())
    return best


def _off_node_after(
    volume: NodeVolume, off_node: FloatArray, nodes: tuple[int, int], batches: tuple[int, int]
) -> dict[int, float]:
    """What each source on two nodes sends off its node once they have exchanged two batches.

    The first batch moves from the first node to the second, the second batch back.
    """
    c = volume.per_node
    after = {n * c + i: float(off_node[n * c + i]) for n in nodes for i in range(c)}
    for batch, left, entered in ((batches[0], nodes[0], nodes[1]), (batches[1], nodes[1], nodes[0])):
        sources, sizes = volume.column(batch)
        for source, size in zip(sources.tolist(), sizes.tolist(), strict=True):
            if source // c == left:
                after[source] += size
            elif source // c == entered:
                after[source] -= size
    return after


def _search_exactly(volume: NodeVolume, node: IntArray) -> IntArray:
    """Find the best placement, or nearly: a search that takes too long counts as one that found nothing.

    Every way to fill a node has a cost, that of its worst sender. Bisection over the costs below that of `node` finds
    the least cost for which some way to fill each node places every batch once.
    """
    d, c = volume.num_replicas, volume.per_node
    ways = np.array(list(combinations(range(d), c)), dtype=np.int64)
    masks = (1 << ways).sum(axis=1)
    sent = np.zeros((d, d))  # from source to batch
    np.add.at(sent, (volume.source, volume.batch), volume.num_bytes)
    sent_off_node = volume.total[:, None] - sent[:, ways].sum(axis=2)
    cost = sent_off_node.reshape(d // c, c, len(ways)).max(axis=1)  # (nodes, ways)
    levels = np.unique(cost[cost < volume.off_node(node).max(initial=0.0)])
    lo, hi = 0, len(levels)  # a placement is known for level hi, none was found below lo
    while lo < hi:
        middle = (lo + hi) // 2
        cover = _disjoint_masks([masks[row <= levels[middle]].tolist() for row in cost])
        if not cover:
            lo = middle + 1
            continue
        hi = middle
        node = np.array([next(n for n, mask in enumerate(cover) if mask >> j & 1) for j in range(d)], dtype=np.int64)
    return node


def _disjoint_masks(masks: list[list[int]]) -> list[int]:
    """Choose one mask of each list so that no two share a bit; an empty list if none are found in time."""
    num_steps = 0
    chosen: list[int] = []
    untried = [iter(masks[0])]
    while untried:
        used = sum(chosen[: len(untried) - 1])
        del chosen[len(untried) - 1 :]
        mask = next((m for m in untried[-1] if not m & used), None)
        num_steps += 1
        if num_steps > MAX_SEARCH_STEPS:
            return []
        if mask is None:
            untried.pop()
            continue
        chosen.append(mask)
        if len(chosen) == len(masks):
            return chosen
        untried.append(iter(masks[len(chosen)]))
    return []


def _replicas(node: IntArray) -> IntArray:
    """(d,) replica of each batch: the replicas of a node take its batches in order."""
    replica = np.empty(len(node), dtype=np.int64)
    replica[np.argsort(node, kind="stable")] = np.arange(len(node))
    return replica
