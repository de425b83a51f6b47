"""Seconds and bytes in which data-parallel replicas reduce gradients, in fp32 or in bf16 (`train.grad_reduce`).

In fp32 it is one reduce-scatter. In bf16 every replica rounds its own sum to bf16, an all-to-all brings each replica
its shard of all of them, and there they are added up in fp32, in the order of the replicas. So a contribution is
rounded once, however many replicas there are. An all-to-all moves half the bytes of the reduce-scatter over a network
port where each node has one replica. With k on a node it moves k / 2 times as many: the ring of a reduce-scatter enters
a node once, while in an all-to-all each replica sends to all others by itself.
"""

from dataclasses import dataclass

from mmtrain.costs.collectives import GroupLayout
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.hardware import ELEMENT_BYTES, Precision

BYTES_PER_GRADIENT = 4  # gradients are added up in fp32 whatever the parameters are


@dataclass(frozen=True)
class GradientReduction:
    """Prices the reduction of a bucket of gradients."""

    costs: CostModel
    dtype: Precision = "fp32"  # `train.grad_reduce`

    def nbytes(self, num_parameters: int) -> int:
        """Return the bytes of the gradients of so many parameters as they travel."""
        return num_parameters * ELEMENT_BYTES[self.dtype]

    def seconds(self, num_parameters: int, group: GroupLayout) -> float:
        """Return the seconds until every replica of `group` has what the others send it."""
        nbytes = self.nbytes(num_parameters)
        if not self._adds_up_here(group):
            return self.costs.collective("reduce_scatter", nbytes, group)
        fewest, most = group.fewest_per_node, -(-group.size // group.nodes)
        to_each = nbytes / group.size
        on_node, off_node = round((most - 1) * to_each), round((group.size - fewest) * to_each)
        return self.costs.all_to_all(on_node, off_node if group.nodes > 1 else 0, group)

    def rounding_seconds(self, num_parameters: int, group: GroupLayout) -> float:
        """Return the seconds in which a replica rounds its sums, before they travel: they are read, and written."""
        if not num_parameters or not self._adds_up_here(group):
            return 0.0
        moved_bytes = BYTES_PER_GRADIENT * num_parameters + self.nbytes(num_parameters)
        return self.costs.shard_copies(moved_bytes, 1)

    def adding_seconds(self, num_parameters: int, group: GroupLayout) -> float:
        """Return the seconds in which a replica adds up what has arrived.

        Each contribution to its shard is read, and added to a sum, which is then copied to its place.
        """
        if not num_parameters or not self._adds_up_here(group):
            return 0.0
        of_shard = num_parameters / group.size
        moved_bytes = self.nbytes(num_parameters) + 2 * BYTES_PER_GRADIENT * num_parameters
        return self.costs.shard_copies(moved_bytes + BYTES_PER_GRADIENT * of_shard, group.size + 1)

    def _adds_up_here(self, group: GroupLayout) -> bool:
        return self.dtype == "bf16" and group.size > 1 and not self.costs.sums_on_the_way
