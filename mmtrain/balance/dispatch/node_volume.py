"""What replicas send to new batches: the sparse matrix that node-wise rearrangement works on."""

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.dispatch.rearrangement import stable_order


class NodeVolume:
    """Bytes from every source replica to every new batch: a sparse matrix, by source."""

    def __init__(
        self, source: IntArray, batch: IntArray, num_bytes: IntArray, num_replicas: int, per_node: int
    ) -> None:
        self.num_replicas, self.per_node = num_replicas, per_node
        if (source[1:] < source[:-1]).any():  # most callers list pieces by source
            order = stable_order(source)
            source, batch, num_bytes = source[order], batch[order], num_bytes[order]
        self.source, self.batch = source, batch
        self.num_bytes: FloatArray = num_bytes.astype(np.float64)
        self.total: FloatArray = self._by_source(self.num_bytes)
        self.of_source = np.searchsorted(self.source, np.arange(num_replicas + 1))

    def _by_source(self, num_bytes: FloatArray) -> FloatArray:
        """(d,) sum of `num_bytes`, which belong to the pieces, by source."""
        return np.bincount(self.source, weights=num_bytes, minlength=self.num_replicas).astype(np.float64)

    def off_node(self, node: IntArray) -> FloatArray:
        """Return (d,) the bytes that each source sends off its node when batch j goes to node[j]."""
        node_of_source = np.arange(self.num_replicas) // self.per_node
        return self._by_source(self.num_bytes * (node[self.batch] != node_of_source[self.source]))

    def row(self, source: int) -> tuple[IntArray, FloatArray]:
        """Return the batches of a source's pieces and their bytes."""
        pieces = slice(self.of_source[source], self.of_source[source + 1])
        return self.batch[pieces], self.num_bytes[pieces]
