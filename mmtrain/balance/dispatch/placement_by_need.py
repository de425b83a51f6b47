"""Place new batches on nodes for a bound on what a replica sends off its node: senders above it take what they need.

A replica that sends less than the bound altogether is free. Every other one, the largest first, takes batches with its
own pieces onto its node until it keeps enough; bisection finds the least bound for which that works. Batches that no
such replica needs then go where most of their pieces are.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.dispatch.node_volume import NodeVolume
from mmtrain.balance.dispatch.rearrangement import stable_order

BOUND_TOLERANCE = 0.002  # of the bound, at which the bisection ends
MAX_ATTEMPTS = 12  # for each bound; twice as many help little (scripts/bench_shapes.py)
MAX_PLACED = 30_000  # batches placed in all attempts, after which a bound gets one attempt: bounds the time
NUM_SENDERS_OF_BOUND = 64  # the largest, by which the lower bound is found
NUM_SENDERS_READ_AT_ONCE = 256
MAX_GAINS_TO_FILL = 20_000  # the largest, by which batches that nobody needs are placed: bounds the time


def place_by_need(volume: NodeVolume, known: int) -> IntArray | None:
    """Return (d,) the node of each batch such that no source sends `known` bytes or more off its node.

    None if no bound below `known` was reached.
    """
    low, high = _lower_bound(volume), known
    senders = _Senders(volume, low)
    best: dict[int, int] | None = None
    while high - low > max(BOUND_TOLERANCE * high, 1):
        bound = (low + high) // 2
        placed = senders.place(bound)
        if placed is None:
            low = bound
        else:
            high, best = bound, placed
    return (
        None
        if best is None
        else place_by_gain(volume, gains_on_nodes(volume, volume.num_bytes), best, MAX_GAINS_TO_FILL)
    )


def _lower_bound(volume: NodeVolume) -> int:
    """Return bytes that some source sends at least: all but its share of the `per_node` batches of its node."""
    bound = 0
    for source in np.argsort(-volume.total, kind="stable")[:NUM_SENDERS_OF_BOUND].tolist():
        by_batch = np.sort(np.bincount(*volume.row(source)))
        bound = max(bound, int(volume.total[source] - by_batch[-volume.per_node :].sum()))
    return bound


@dataclass
class _Attempt:
    """Batches that senders have taken onto their nodes for one bound."""

    bound: int
    room: list[int]  # of each node
    kept: list[int]  # bytes that each sender keeps on its node
    node_of: dict[int, int] = field(default_factory=dict)  # by batch


class _Senders:
    """The sources that send more than a lower bound, by descending bytes; pieces are read when a sender needs some."""

    def __init__(self, volume: NodeVolume, lower_bound: int) -> None:
        self._volume = volume
        sources = np.argsort(-volume.total, kind="stable")
        self._sources: IntArray = sources[: int((volume.total > lower_bound).sum())]
        self._total: list[int] = volume.total[self._sources].astype(np.int64).tolist()
        self._node: list[int] = (self._sources // volume.per_node).tolist()
        self._num_nodes = volume.num_replicas // volume.per_node
        self._on_node: list[list[int]] = [[] for _ in range(self._num_nodes)]
        for sender, node in enumerate(self._node):
            self._on_node[node].append(sender)
        self._turns = list(range(len(self._total)))  # who takes batches first
        self._sizes: list[list[int]] = []  # of each sender's pieces, ascending, as far as they are read
        self._batches: list[list[int]] = []  # in the same order
        self._size_of: list[dict[int, int] | None] = [None] * len(self._total)  # bytes of each sender by batch
        self._num_placed = 0

    def place(self, bound: int) -> dict[int, int] | None:
        """Return the node of the batches that senders take so that each sends at most `bound`; None if one cannot.

        A sender that cannot keep enough comes first in the next attempt.
        """
        for _ in range(MAX_ATTEMPTS if self._num_placed < MAX_PLACED else 1):
            attempt = _Attempt(bound, [self._volume.per_node] * self._num_nodes, [0] * len(self._total))
            failed = self._take_all(attempt)
            self._num_placed += len(attempt.node_of)
            if failed is None:
                return attempt.node_of
            self._turns.remove(failed)
            self._turns.insert(0, failed)
        return None

    def _take_all(self, attempt: _Attempt) -> int | None:
        """Take batches for all senders in turn; return the first that cannot keep enough, None if there is none."""
        total, kept, bound = self._total, attempt.kept, attempt.bound
        for sender in self._turns:
            while (need := total[sender] - kept[sender] - bound) > 0:
                node = self._node[sender]
                batch = self._best_batch(sender, need, attempt.node_of) if attempt.room[node] else None
                if batch is None:
                    return sender
                attempt.node_of[batch] = node
                attempt.room[node] -= 1
                for other in self._on_node[node]:
                    if total[other] <= bound:
                        break
                    pieces = self._size_of[other] or self._read(other)
                    if batch in pieces:
                        kept[other] += pieces[batch]
        return None

    def _best_batch(self, sender: int, need: int, node_of: dict[int, int]) -> int | None:
        """Return the batch with the smallest piece that suffices, else with the largest, of those without a node."""
        if self._size_of[sender] is None:
            self._read(sender)
        batches = self._batches[sender]
        least = bisect_left(self._sizes[sender], need)
        for batch in batches[least:]:
            if batch not in node_of:
                return batch
        for batch in reversed(batches[:least]):
            if batch not in node_of:
                return batch
        return None

    def _read(self, sender: int) -> dict[int, int]:
        """Read the pieces of a sender, and return the bytes that it has for each batch."""
        while len(self._sizes) <= sender:
            self._read_more()
        sizes, batches = self._sizes[sender], self._batches[sender]
        pieces = dict(zip(batches, sizes, strict=True))
        if len(pieces) < len(batches):  # several pieces of one batch
            pieces = dict.fromkeys(batches, 0)
            for batch, size in zip(batches, sizes, strict=True):
                pieces[batch] += size
            self._batches[sender] = sorted(pieces, key=pieces.__getitem__)
            self._sizes[sender] = sorted(pieces.values())
        self._size_of[sender] = pieces
        return pieces

    def _read_more(self) -> None:
        """Read the pieces of the next senders, each sender's by ascending size."""
        volume = self._volume
        sources = self._sources[len(self._sizes) :][:NUM_SENDERS_READ_AT_ONCE]
        counts = volume.of_source[sources + 1] - volume.of_source[sources]
        ends = np.cumsum(counts)
        pieces = np.arange(int(counts.sum())) + np.repeat(volume.of_source[sources] - (ends - counts), counts)
        pieces = pieces[np.argsort(volume.num_bytes[pieces], kind="stable")]
        place_of_source = np.zeros(volume.num_replicas, dtype=np.int64)
        place_of_source[sources] = np.arange(len(sources))
        pieces = pieces[stable_order(place_of_source[volume.source[pieces]])]
        sizes, batches = volume.num_bytes[pieces].astype(np.int64).tolist(), volume.batch[pieces].tolist()
        for end, count in zip(ends.tolist(), counts.tolist(), strict=True):
            self._sizes.append(sizes[end - count : end])
            self._batches.append(batches[end - count : end])


def gains_on_nodes(volume: NodeVolume, num_bytes: FloatArray) -> FloatArray:
    """Return (d * nodes,) the bytes that stay on node n if it takes batch j, at j * nodes + n; num_bytes: of pieces."""
    num_nodes = volume.num_replicas // volume.per_node
    key = volume.batch * num_nodes + volume.source // volume.per_node
    return np.bincount(key, num_bytes, volume.num_replicas * num_nodes).astype(np.float64)


def place_by_gain(
    volume: NodeVolume, gains: FloatArray, placed: Mapping[int, int], limit: int | None = None
) -> IntArray:
    """Return (d,) the node of each batch: largest gain first, beside the batches that are `placed` already.

    limit: the number of gains that are looked at; batches that have none of them go where there is room.
    """
    num_nodes = volume.num_replicas // volume.per_node
    node = np.full(volume.num_replicas, -1, dtype=np.int64)
    node[list(placed.keys())] = list(placed.values())
    key = np.flatnonzero((gains > 0) & np.repeat(node < 0, num_nodes))
    best_first = key[np.argsort(-gains[key], kind="stable")][:limit]
    room = (volume.per_node - np.bincount(node[node >= 0], minlength=num_nodes)).tolist()
    for batch, best_node in zip((best_first // num_nodes).tolist(), (best_first % num_nodes).tolist(), strict=True):
        if room[best_node] and node[batch] < 0:
            node[batch] = best_node
            room[best_node] -= 1
    node[node < 0] = np.repeat(np.arange(num_nodes), room)
    return node
