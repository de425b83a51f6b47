"""What replicas send to new batches: the sparse matrix that node-wise rearrangement works on."""

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.rearrangement import stable_order


class NodeVolume:
    """Bytes from every source replica to every new batch: a sparse matrix, by source and by batch."""

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
        """(d,) sum of the bytes of some pieces by source."""
        sums = np.bincount(self.source[pieces], weights=self.num_bytes[pieces], minlength=self.num_replicas)
        return sums.astype(np.float64)

    def off_node(self, node: IntArray) -> FloatArray:
        """Return (d,) the bytes that each source sends off its node when batch j goes to node[j]."""
        return self._by_source(node[self.batch] != self.source // self.per_node)

    def row(self, source: int) -> tuple[IntArray, FloatArray]:
        """Return the batches of a source's pieces and their bytes."""
        pieces = slice(self.of_source[source], self.of_source[source + 1])
        return self.batch[pieces], self.num_bytes[pieces]

    def column(self, batch: int) -> tuple[IntArray, FloatArray]:
        """Return the sources of a batch and their bytes."""
        rows = self.by_batch[self.of_batch[batch] : self.of_batch[batch + 1]]
        return self.source[rows], self.num_bytes[rows]
