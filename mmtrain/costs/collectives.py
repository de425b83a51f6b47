"""Seconds of a collective from the links of a machine, for groups inside a node and across nodes.

The model is that of NCCL's own tuning (`src/graph/tuning.cc`): a ring moves (n - 1) / n of the tensor through every
link of the ring, an all-reduce twice as much. A group with k ranks on each node runs k rings, each of which leaves the
node through another rank's network port, so that a node sends k times as fast as one port. An all-reduce across nodes
may run on trees instead, whose number of steps grows with the logarithm of the nodes.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from mmtrain.costs.hardware import Hardware

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]


@dataclass(frozen=True)
class GroupLayout:
    """How the ranks of a group lie on nodes."""

    size: int
    nodes: int = 1
    fewest_per_node: int = 0  # ranks of the group on the node with fewest of them; 0: as many on each node

    def __post_init__(self) -> None:
        if not self.fewest_per_node:
            object.__setattr__(self, "fewest_per_node", self.size // self.nodes)

    @classmethod
    @lru_cache(maxsize=1 << 12)
    def of_ranks(cls, ranks: tuple[int, ...] | range, ranks_per_node: int) -> "GroupLayout":
        """Return the layout of global ranks, of which consecutive `ranks_per_node` share a node."""
        on_node = Counter(rank // ranks_per_node for rank in ranks)
        return cls(sum(on_node.values()), len(on_node), min(on_node.values()))

    @classmethod
    def strided(cls, size: int, stride: int, ranks_per_node: int, first: int = 0) -> "GroupLayout":
        """Return the layout of the ranks `first`, `first + stride`, and so on."""
        return cls.of_ranks(range(first, first + size * stride, stride), ranks_per_node)


def collective_seconds(hardware: Hardware, kind: CollectiveKind, nbytes: int, group: GroupLayout) -> float:
    """Return the seconds of a collective over `group`; `nbytes` is the whole (gathered or reduced) tensor."""
    if group.size == 1:
        return 0.0
    ring = _ring_seconds(hardware, kind, nbytes, group)
    if kind == "all_reduce" and group.nodes > 1:
        return min(ring, _tree_seconds(hardware, nbytes, group))
    return ring


def _ring_seconds(hardware: Hardware, kind: CollectiveKind, nbytes: int, group: GroupLayout) -> float:
    passes = 2 if kind == "all_reduce" else 1
    if kind == "broadcast":  # the tensor flows through all ranks, and takes as many steps as a tree of them is deep
        share, steps, steps_between = 1.0, (group.size - 1).bit_length(), (group.nodes - 1).bit_length()
    else:
        share = passes * (group.size - 1) / group.size
        steps, steps_between = passes * (group.size - 1), passes * (group.nodes - 1)
    steps_s = (steps - steps_between) * hardware.intra_node.step_s + steps_between * hardware.inter_node.step_s
    return hardware.collective_start_s + steps_s + _flow_seconds(hardware, share * nbytes, group, kind)


def _tree_seconds(hardware: Hardware, nbytes: int, group: GroupLayout) -> float:
    """Return the seconds of an all-reduce over trees of nodes, in each of which the ranks are a chain.

    Two trees share the tensor, so that every node sends and receives it about once on the way up and once on the way
    down, whatever the number of nodes.
    """
    in_node = -(-group.size // group.nodes) - 1
    between = (group.nodes - 1).bit_length()
    steps_s = 2 * (in_node * hardware.intra_node.step_s + between * hardware.inter_node.step_s)
    return hardware.collective_start_s + steps_s + _flow_seconds(hardware, 2.0 * nbytes, group, "all_reduce")


def _flow_seconds(hardware: Hardware, nbytes: float, group: GroupLayout, kind: CollectiveKind) -> float:
    """Return the seconds in which every rank forwards `nbytes`, the ranks of a node at once to the next node."""
    in_node_s = 0.0
    if group.size > group.nodes:
        ranks_on_node = -(-group.size // group.nodes)
        in_node_s = nbytes / hardware.collective_bytes_per_s(ranks_on_node, is_all_reduce=kind == "all_reduce")
    if group.nodes == 1:
        return in_node_s
    ports = group.fewest_per_node * hardware.ports_per_rank
    return max(in_node_s, nbytes / (ports * hardware.inter_node.bytes_per_s))
