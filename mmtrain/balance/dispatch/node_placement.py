"""Place the batches of encoder replicas on nodes, so that few of the features they produce leave a node.

Batches cost the same wherever they are computed, so only their places change. There are two cases.

With dispatch, an LLM replica receives features from many batches. `rearrange_across_nodes` chooses all places together,
so that the LLM replica with most traffic from other nodes has as little as possible (node-wise rearrangement of
OrchMLLM, arXiv 2503.23830).

Without dispatch, the encoders of a replica group serve its own LLM replicas alone, and what a batch sends off its node
depends on its own place only. `place_items` finds the best places exactly.
"""

import heapq
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.check_lengths import check_lengths
from mmtrain.balance.dispatch.post_balancing import stable_order

# Up to 1,024 pieces get 32 attempts, more pieces fewer, and from 32,768 on one. With one attempt for all, the busiest
# of 64 replicas with 8 pieces each has 10% more bytes from other nodes, and that of 16 up to 12% more (2026-11-28).
MAX_ATTEMPTS = 32
MAX_PIECES_OF_ALL_ATTEMPTS = 2**15
OWN_WEIGHT = 8  # of a reader's own bytes in a batch, against the bytes of all readers of its node
FIRST_URGENCY = 16  # of a reader; grows by an eighth per failure, in whole numbers so that all ranks agree


def rearrange_across_nodes(
    reader: IntArray, batch: IntArray, num_bytes: IntArray, num_replicas: int, per_node: int
) -> IntArray:
    """Place new batches on replicas so that the reader with most bytes from other nodes has few.

    Piece i is read by replica reader[i], belongs to batch batch[i] (of `num_replicas`), and has num_bytes[i]. Nodes are
    `per_node` consecutive replicas. Returns (num_replicas,) the replica of each batch, each replica once. In
    `dispatch_items` a piece is the features of an item, its batch encodes the item, and its reader is the LLM replica
    that reads the features and sends back as many bytes of gradients.

    The exact solution, a min-max assignment, takes minutes for hundreds of replicas. This is greedy: the reader with
    most bytes from other nodes brings a batch to its node, the one with most bytes for it and its node. It goes on
    until such a reader cannot: its node is full, or it has no piece left. That reader is more urgent in the next
    attempt. The best attempt counts. Batches that no reader has brought go where most of their bytes are read. The
    result is never worse than batch j on replica j. Raises ValueError if nodes are not all full, and for bytes that are
    not whole numbers from 0 to 2^40.
    """
    check_lengths("bytes of pieces", num_bytes)
    if num_replicas % per_node:
        raise ValueError(f"{num_replicas} replicas do not fill nodes of {per_node}")
    pieces = _Pieces(reader, batch, num_bytes, num_replicas, per_node)
    least = int(off_node_bytes(reader, batch, num_bytes, np.arange(num_replicas), per_node).max(initial=0))
    best: dict[int, int] | None = None
    urgency = [FIRST_URGENCY] * num_replicas  # of each reader
    for _ in range(min(MAX_ATTEMPTS, MAX_PIECES_OF_ALL_ATTEMPTS // max(len(reader), 1) or 1)):
        most, failed, node_of_batch = pieces.bring_batches(urgency, least)
        if most < least:
            least, best = most, node_of_batch
        if failed is None:
            break
        urgency[failed] += urgency[failed] // 8
    if best is None:
        return np.arange(num_replicas)
    node = pieces.place_other_batches(best)
    replica = np.empty(num_replicas, dtype=np.int64)
    replica[np.argsort(node, kind="stable")] = np.arange(num_replicas)  # replicas of a node take its batches in order
    return replica


def off_node_bytes(
    reader: IntArray, batch: IntArray, num_bytes: IntArray, replica_of_batch: IntArray, per_node: int
) -> IntArray:
    """Return (d,) the bytes that each replica reads from other nodes."""
    leaves = reader // per_node != replica_of_batch[batch] // per_node
    sums = np.bincount(reader[leaves], weights=num_bytes[leaves], minlength=len(replica_of_batch))
    return sums.astype(np.int64)


class _Pieces:
    """The bytes of every reader in every new batch; several pieces of one reader in one batch count as one."""

    def __init__(
        self, reader: IntArray, batch: IntArray, num_bytes: IntArray, num_replicas: int, per_node: int
    ) -> None:
        self._num_replicas, self._per_node = num_replicas, per_node
        self._num_nodes = num_replicas // per_node
        by_pair = stable_order(batch)
        by_pair = by_pair[num_bytes[by_pair] > 0]
        by_pair = by_pair[stable_order(reader[by_pair])]
        pair = reader[by_pair] * num_replicas + batch[by_pair]
        is_first = np.diff(pair, prepend=-1) > 0
        sums = np.zeros(int(is_first.sum()), dtype=np.int64)
        np.add.at(sums, np.cumsum(is_first) - 1, num_bytes[by_pair])
        readers, batches = np.divmod(pair[is_first], num_replicas)
        on_node = batches * self._num_nodes + readers // per_node
        self._kept: FloatArray = np.bincount(on_node, sums, num_replicas * self._num_nodes).astype(np.float64)
        wanted = OWN_WEIGHT * sums + self._kept[on_node]  # whole numbers, so that all ranks find the same order
        order = np.argsort(-wanted, kind="stable")
        order = order[stable_order(readers[order])]
        self._first_of_reader = np.searchsorted(readers, np.arange(num_replicas + 1)).tolist()
        self._batch, self._num_bytes = batches[order], sums[order]
        self._total: list[int] = np.bincount(readers, sums, num_replicas).astype(np.int64).tolist()
        self._bytes_by_batch: dict[int, dict[int, int]] = {}  # of the readers that were looked at

    def of_reader(self, reader: int) -> dict[int, int]:
        """Return the bytes of a reader by batch, the one that it wants most first."""
        if reader not in self._bytes_by_batch:
            pieces = slice(self._first_of_reader[reader], self._first_of_reader[reader + 1])
            by_batch = zip(self._batch[pieces].tolist(), self._num_bytes[pieces].tolist(), strict=True)
            self._bytes_by_batch[reader] = dict(by_batch)
        return self._bytes_by_batch[reader]

    def bring_batches(self, urgency: Sequence[int], limit: int) -> tuple[int, int | None, dict[int, int]]:
        """Let readers bring batches to their nodes until the one with most bytes from other nodes can bring none.

        urgency: (d,) of each reader; its product with the bytes says which reader is next. Returns the most bytes that
        a reader then has from other nodes, that reader (None if none has any), and the node of each batch that was
        brought. Gives up when a reader fails that has `limit` or more.
        """
        off_node = list(self._total)
        heap = [(-remote * urgency[reader], reader) for reader, remote in enumerate(off_node)]
        heapq.heapify(heap)
        room = [self._per_node] * (self._num_replicas // self._per_node)
        node_of_batch: dict[int, int] = {}
        most, failed = 0, None
        while heap and most < limit:
            priority, reader = heapq.heappop(heap)
            remote = off_node[reader]
            if remote <= most or priority != -remote * urgency[reader]:  # a later entry has its new priority
                continue
            node = reader // self._per_node
            batch = None
            if room[node]:
                batch = next((batch for batch in self.of_reader(reader) if batch not in node_of_batch), None)
            if batch is None:
                most, failed = remote, reader
                continue
            node_of_batch[batch] = node
            room[node] -= 1
            for neighbor in range(node * self._per_node, (node + 1) * self._per_node):
                kept = self.of_reader(neighbor).get(batch)
                if kept:
                    off_node[neighbor] -= kept
                    heapq.heappush(heap, (-off_node[neighbor] * urgency[neighbor], neighbor))
        return most, failed, node_of_batch

    def place_other_batches(self, node_of_batch: Mapping[int, int]) -> IntArray:
        """Return (d,) the node of each batch: largest gain first, beside the batches that have a node already."""
        node = np.full(self._num_replicas, -1, dtype=np.int64)
        node[list(node_of_batch.keys())] = list(node_of_batch.values())
        gains = np.flatnonzero((self._kept > 0) & np.repeat(node < 0, self._num_nodes))
        best_first = gains[np.argsort(-self._kept[gains], kind="stable")]
        room = (self._per_node - np.bincount(node[node >= 0], minlength=self._num_nodes)).tolist()
        batches, nodes = np.divmod(best_first, self._num_nodes)
        for batch, best in zip(batches.tolist(), nodes.tolist(), strict=True):
            if room[best] and node[batch] < 0:
                node[batch] = best
                room[best] -= 1
        node[node < 0] = np.repeat(np.arange(self._num_nodes), room)
        return node


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
