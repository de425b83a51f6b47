"""Node-wise rearrangement (OrchMLLM): which replica gets which new batch, so that little crosses between nodes."""

from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.rearrangement import stable_order

EMPHASES = 8, 4, 16, 2, 32, 1  # on heavy senders, of greedy starts; more than the first where there is time
MANY_PIECES = 50_000  # pieces, counted once a start, that there is time for
OPTIONS = 60  # exchanges tried for one worst sender
FEW_SUBSETS = 2_000  # ways to fill a node up to which the best placement is searched for
STEPS = 20_000  # of that search, after which it gives up
STALLED = 6  # worst replicas that are looked at in turn before the search gives up


def rearrange_across_nodes(
    source: IntArray, batch: IntArray, num_bytes: IntArray, num_replicas: int, per_node: int, swaps: int
) -> IntArray:
    """Place new batches on replicas so that the replica that sends most off its node sends little.

    Piece i lies on replica source[i], belongs to new batch batch[i] (of `num_replicas`), and has num_bytes[i]. Nodes
    are `per_node` consecutive replicas. Returns (num_replicas,) the replica of each batch, each replica once.

    New batches cost the same wherever they are computed. Placing them is a min-max assignment; solving it exactly
    takes minutes at hundreds of replicas. Here batches are first placed greedily, by the bytes they keep on a node,
    counting those of heavy senders more; then at most `swaps` exchanges of two batches relieve the worst sender. Where
    a node can be filled in few ways (4 of 16 batches) the best placement is found from there.
    Never worse than leaving batch j on replica j. Raises ValueError if nodes are not all full.
    """
    if num_replicas % per_node:
        raise ValueError(f"{num_replicas} replicas do not fill nodes of {per_node}")
    volume = _Volume(source, batch, num_bytes, num_replicas, per_node)
    emphases = EMPHASES[: max(MANY_PIECES // max(len(source), 1), 1)]
    found = [_relieve(volume, _greedy(volume, emphasis), swaps) for emphasis in emphases]
    found.append(np.arange(num_replicas, dtype=np.int64) // per_node)
    best = min(found, key=lambda node: float(volume.off_node(node).max(initial=0.0)))
    if comb(num_replicas, per_node) <= FEW_SUBSETS:
        best = _exact(volume, best)
    return _replicas(best)


def off_node_bytes(
    source: IntArray, batch: IntArray, num_bytes: IntArray, replica_of_batch: IntArray, per_node: int
) -> IntArray:
    """(d,) bytes that each source replica sends to other nodes."""
    leaves = source // per_node != replica_of_batch[batch] // per_node
    sums = np.bincount(source[leaves], weights=num_bytes[leaves], minlength=len(replica_of_batch))
    return sums.astype(np.int64)


class _Volume:
    """Bytes from every source replica to every new batch, without the zeros, by source and by batch."""

    def __init__(
        self, source: IntArray, batch: IntArray, num_bytes: IntArray, num_replicas: int, per_node: int
    ) -> None:
        self.num_replicas, self.per_node = num_replicas, per_node
        order = stable_order(source)
        self.source, self.batch = source[order], batch[order]
        self.num_bytes: FloatArray = num_bytes[order].astype(np.float64)
        self.total: FloatArray = self._by_source(np.ones(len(source), dtype=bool))
        self.of_source = np.searchsorted(self.source, np.arange(num_replicas + 1))
        self.by_batch = stable_order(self.batch)
        self.of_batch = np.searchsorted(self.batch[self.by_batch], np.arange(num_replicas + 1))

    def _by_source(self, pieces: npt.NDArray[np.bool_]) -> FloatArray:
        """(d,) bytes of some pieces, summed by source."""
        sums = np.bincount(self.source[pieces], weights=self.num_bytes[pieces], minlength=self.num_replicas)
        return sums.astype(np.float64)

    def off_node(self, node: IntArray) -> FloatArray:
        """(d,) bytes each source sends off its node when batch j goes to node[j]."""
        return self._by_source(node[self.batch] != self.source // self.per_node)

    def column(self, batch: int) -> tuple[IntArray, FloatArray]:
        """Sources of a batch and their bytes."""
        rows = self.by_batch[self.of_batch[batch] : self.of_batch[batch + 1]]
        return self.source[rows], self.num_bytes[rows]


def _greedy(volume: _Volume, emphasis: int) -> IntArray:
    """Batches to nodes, largest gain first; a byte counts the more, the more its source sends altogether."""
    d, c = volume.num_replicas, volume.per_node
    num_nodes = d // c
    weight = (volume.total / max(float(volume.total.max(initial=0.0)), 1.0)) ** emphasis
    gains = np.bincount(volume.batch * num_nodes + volume.source // c, weights=volume.num_bytes * weight[volume.source])
    key = np.flatnonzero(gains)
    best_first = key[np.argsort(-gains[key], kind="stable")]
    node, room = [-1] * d, [c] * num_nodes
    for batch, wanted in zip((best_first // num_nodes).tolist(), (best_first % num_nodes).tolist(), strict=True):
        if node[batch] < 0 and room[wanted]:
            node[batch] = wanted
            room[wanted] -= 1
    free = [n for n, count in enumerate(room) for _ in range(count)]
    unplaced = [batch for batch, wanted in enumerate(node) if wanted < 0]
    for batch, wanted in zip(unplaced, free, strict=True):
        node[batch] = wanted
    return np.array(node, dtype=np.int64)


def _relieve(volume: _Volume, node: IntArray, swaps: int) -> IntArray:
    """Exchange batches between nodes while that relieves the worst sender without making another one as bad."""
    node, off, stalled = node.copy(), volume.off_node(node), 0
    for _ in range(swaps):
        worst = int(off.argmax()) if stalled == 0 else int(np.argsort(-off, kind="stable")[stalled])
        found = _best_swap(volume, node, off, worst)
        if found is None:
            stalled += 1
            if stalled == min(STALLED, len(off)):
                break
            continue
        (come, go), touched = found
        node[come], node[go] = node[go], node[come]
        off[list(touched)] = list(touched.values())
        stalled = 0
    return node


def _best_swap(
    volume: _Volume, node: IntArray, off: FloatArray, worst: int
) -> tuple[tuple[int, int], dict[int, float]] | None:
    """The exchange that relieves `worst` most, as far as the others it touches stay below where `worst` is now.

    Returns the two batches and what the sources on both nodes then send off them.
    """
    here = worst // volume.per_node
    lo, hi = volume.of_source[worst], volume.of_source[worst + 1]
    to_worst: dict[int, float] = {}
    for j, size in zip(volume.batch[lo:hi].tolist(), volume.num_bytes[lo:hi].tolist(), strict=True):
        to_worst[j] = to_worst.get(j, 0.0) + size
    inside = np.flatnonzero(node == here).tolist()
    outside = [j for j in to_worst if node[j] != here]
    options = sorted(
        ((to_worst[j] - to_worst.get(k, 0.0), j, k) for j in outside for k in inside), key=lambda o: (-o[0], o[1], o[2])
    )
    best: tuple[tuple[int, int], dict[int, float]] | None = None
    best_level = float(off[worst]) - 1e-6
    for gain, come, go in options[:OPTIONS]:
        if gain <= 0 or off[worst] - gain >= best_level:
            break
        touched = _touched(volume, off, int(node[come]), here, come, go)
        if max(touched.values()) < best_level:
            best, best_level = ((come, go), touched), max(touched.values())
    return best


def _touched(volume: _Volume, off: FloatArray, there: int, here: int, come: int, go: int) -> dict[int, float]:
    """What each source on either node sends off it once batch `come` moves there -> here and `go` here -> there."""
    c = volume.per_node
    after = {n * c + i: float(off[n * c + i]) for n in (there, here) for i in range(c)}
    for batch, leaves, enters in ((come, there, here), (go, here, there)):
        sources, sizes = volume.column(batch)
        for source, size in zip(sources.tolist(), sizes.tolist(), strict=True):
            if source // c == leaves:
                after[source] += size
            elif source // c == enters:
                after[source] -= size
    return after


def _exact(volume: _Volume, node: IntArray) -> IntArray:
    """The best placement, or nearly: a search that takes too long counts as one that found nothing.

    Every way to fill every node has a cost, that of its worst sender; bisection over the costs below that of `node`
    asks whether some ways that cost no more share out all batches.
    """
    d, c = volume.num_replicas, volume.per_node
    ways = np.array(list(combinations(range(d), c)), dtype=np.int64)
    masks = (1 << ways).sum(axis=1)
    kept = np.zeros((d, d))
    np.add.at(kept, (volume.source, volume.batch), volume.num_bytes)
    off = volume.total[:, None] - kept[:, ways].sum(axis=2)
    cost = off.reshape(d // c, c, len(ways)).max(axis=1)  # (nodes, ways)
    levels = np.unique(cost[cost < volume.off_node(node).max(initial=0.0)])
    lo, hi = 0, len(levels)  # a placement is known for level hi, none was found below lo
    while lo < hi:
        level = levels[(lo + hi) // 2]
        found = _cover([masks[row <= level].tolist() for row in cost])
        if not found:
            lo = (lo + hi) // 2 + 1
            continue
        hi = (lo + hi) // 2
        node = np.array([next(n for n, mask in enumerate(found) if mask >> j & 1) for j in range(d)], dtype=np.int64)
    return node


def _cover(masks: list[list[int]]) -> list[int]:
    """One mask of each list that share no bit; an empty list if there are none, or none were found in time."""
    steps = 0
    chosen: list[int] = []
    left = [iter(masks[0])]
    while left:
        used = sum(chosen[: len(left) - 1])
        del chosen[len(left) - 1 :]
        mask = next((m for m in left[-1] if not m & used), None)
        steps += 1
        if steps > STEPS:
            return []
        if mask is None:
            left.pop()
            continue
        chosen.append(mask)
        if len(chosen) == len(masks):
            return chosen
        left.append(iter(masks[len(chosen)]))
    return []


def _replicas(node: IntArray) -> IntArray:
    """(d,) replica of each batch: the places of a node in the order of the batches it gets."""
    replica = np.empty(len(node), dtype=np.int64)
    replica[np.argsort(node, kind="stable")] = np.arange(len(node))
    return replica
