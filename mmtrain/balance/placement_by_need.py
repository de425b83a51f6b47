"""Place new batches on nodes for a bound on what a replica sends off its node: senders above it take what they need.

A replica that sends less than the bound altogether is free. Every other one, the largest first, takes batches with its
own largest pieces onto its node until it keeps enough; bisection finds the least bound for which that works.
"""

from collections import defaultdict

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.balance.node_volume import NodeVolume

NUM_BISECTIONS = 7  # of the range between a lower bound and the known result: to a hundredth of it
MAX_ATTEMPTS = 6  # for each bound; more help little
NUM_SENDERS_OF_BOUND = 64  # the largest, by which the lower bound is found


def place_by_need(volume: NodeVolume, known: int) -> IntArray | None:
    """Return (d,) the node of each batch such that no source sends `known` bytes or more off its node.

    None if no bound below `known` was reached.
    """
    needs = _Needs(volume)
    low, high, best = needs.lower_bound(), known, None
    for _ in range(NUM_BISECTIONS):
        bound = (low + high) // 2
        if not low < bound < high:
            break
        placed = needs.place(bound)
        if placed is None:
            low = bound
        else:
            high, best = bound, placed
    return None if best is None else _fill_nodes(best, volume.num_replicas, volume.per_node)


class _Needs:
    """The pieces of the senders that may have to keep some, listed when a sender is first met."""

    def __init__(self, volume: NodeVolume) -> None:
        self._volume = volume
        self._per_node = volume.per_node
        self._num_nodes = volume.num_replicas // volume.per_node
        self._in_order: list[int] = np.argsort(-volume.total, kind="stable").tolist()
        self._total: list[int] = volume.total.astype(np.int64).tolist()
        self._pieces: dict[int, list[tuple[float, int]]] = {}  # source -> (bytes, batch), the largest first
        self._senders: dict[int, list[tuple[int, float]]] = {}  # batch -> (source, bytes)

    def lower_bound(self) -> int:
        """Return bytes that some source sends at least: all but its share of the `per_node` batches of its node."""
        bound = 0
        for sender in self._in_order[:NUM_SENDERS_OF_BOUND]:
            by_batch = np.sort(np.bincount(*self._volume.row(sender)))
            bound = max(bound, int(self._total[sender] - by_batch[-self._per_node :].sum()))
        return bound

    def _pieces_of(self, sender: int) -> list[tuple[float, int]]:
        if sender not in self._pieces:
            batch, size = self._volume.row(sender)
            self._pieces[sender] = sorted(zip(size.tolist(), batch.tolist(), strict=True), reverse=True)
        return self._pieces[sender]

    def _senders_of(self, batch: int) -> list[tuple[int, float]]:
        if batch not in self._senders:
            source, size = self._volume.column(batch)
            self._senders[batch] = list(zip(source.tolist(), size.tolist(), strict=True))
        return self._senders[batch]

    def place(self, bound: int) -> dict[int, int] | None:
        """Return the node of the batches that senders take so that each sends at most `bound`; None if one cannot.

        A sender that cannot keep enough comes first in the next attempt.
        """
        for _ in range(MAX_ATTEMPTS):
            node_of, failed = self._attempt(bound)
            if failed is None:
                return node_of
            self._in_order.remove(failed)
            self._in_order.insert(0, failed)
        return None

    def _attempt(self, bound: int) -> tuple[dict[int, int], int | None]:
        """Return the node of the batches that senders take, and the first sender that cannot keep enough, if any."""
        node_of: dict[int, int] = {}
        room = [self._per_node] * self._num_nodes
        kept: defaultdict[int, float] = defaultdict(float)
        for sender in self._in_order:
            node = sender // self._per_node
            if self._total[sender] <= bound:
                continue
            while self._total[sender] - kept[sender] > bound:
                batch = self._best_batch(sender, self._total[sender] - kept[sender] - bound, node_of)
                if batch is None or room[node] == 0:
                    return node_of, sender
                node_of[batch] = node
                room[node] -= 1
                for other, size in self._senders_of(batch):
                    if other // self._per_node == node:
                        kept[other] += size
        return node_of, None

    def _best_batch(self, sender: int, need: float, node_of: dict[int, int]) -> int | None:
        """The batch with the smallest piece that suffices, else with the largest, among those without a node."""
        best: int | None = None
        for size, batch in self._pieces_of(sender):
            if batch in node_of:
                continue
            if best is not None and size < need:
                break
            best = batch
        return best


def _fill_nodes(node_of: dict[int, int], num_replicas: int, per_node: int) -> IntArray:
    """Put the batches without a node where there is room."""
    node = np.full(num_replicas, -1, dtype=np.int64)
    node[list(node_of.keys())] = list(node_of.values())
    room = per_node - np.bincount(node[node >= 0], minlength=num_replicas // per_node)
    without = np.flatnonzero(node < 0)
    node[without] = np.repeat(np.arange(len(room)), room)
    return node
