"""Create the process groups of a stage graph, on all ranks in one order.

Each (edge, payload) of a replica group has a group of its own: NCCL has no tags and runs the messages of one
communicator in order, so activations and gradients between the same two ranks must not share one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.megatron import ParallelGroups
from mmtrain.program import Edge, Payload, Recv, Send, Share, StageGraph, UnitMesh
from mmtrain.program.ir.data_dependencies import shared_embedding_stages
from mmtrain.runtime.world import World


@dataclass(frozen=True)
class ProcessGroups:
    """The groups that this rank is a member of."""

    units: dict[str, ParallelGroups]
    channels: dict[tuple[Edge, Payload], dist.ProcessGroup]
    tied_embeddings: dist.ProcessGroup | None  # first and last LLM stage of this rank's replica, same TP rank


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Wait until the message has arrived, or has left."""


@dataclass(frozen=True)
class Transport:
    """How one rank sends and receives rows: over which groups, and in which format."""

    rank: int
    groups: ProcessGroups
    widths: Mapping[Edge, int]  # features in a row, over each edge
    token_shards: Mapping[str, int]  # unit with sequence parallelism -> ranks that shard its tokens between stages
    device: torch.device
    dtype: torch.dtype

    def send(self, rows: Tensor, message: Send) -> Pending:
        """Start to send rows to the message's peer; they must not change before they have left."""
        work = dist.isend(rows, message.peer, group=self.groups.channels[message.edge, message.payload])
        assert work is not None
        return work

    def receive(self, rows: Tensor, message: Recv) -> Pending:
        """Start to receive rows from the message's peer."""
        work = dist.irecv(rows, message.peer, group=self.groups.channels[message.edge, message.payload])
        assert work is not None
        return work

    def share(self, tensor: Tensor, share: Share, root: int) -> None:
        """Broadcast what the first rank of a TP group received, `root`, to the rest of it."""
        unit = (share.edge.dst if share.payload == "activation" else share.edge.src).unit
        dist.broadcast(tensor, src=root, group=self.groups.units[unit].tp)


def build_groups(graph: StageGraph, world: World) -> ProcessGroups:
    """Create every group of the graph; return those that this rank belongs to."""
    creator = _GroupCreator(world.rank)
    units: dict[str, ParallelGroups] = {}
    for mesh in graph.meshes:
        tp, dp, pp = (creator.create(lines) for lines in _mesh_lines(mesh))
        if tp and dp and pp:
            units[mesh.unit] = ParallelGroups(tp=tp, dp=dp, pp=pp)
    channels: dict[tuple[Edge, Payload], dist.ProcessGroup] = {}
    payloads: tuple[Payload, ...] = ("activation", "gradient")
    for edge in graph.edges:
        for payload in payloads:
            group = creator.create(_edge_ranks(graph, edge))
            if group:
                channels[edge, payload] = group
    return ProcessGroups(units, channels, creator.create(_tied_pairs(graph)))


def release_groups(groups: ProcessGroups) -> None:
    """Leave the groups of a stage graph, which hold connections and a GPU's memory; all ranks call this together."""
    of_units = [group for unit in groups.units.values() for group in (unit.tp, unit.dp, unit.pp)]
    every = [*of_units, *groups.channels.values(), groups.tied_embeddings]
    for group in dict.fromkeys(group for group in every if group is not None):
        dist.destroy_process_group(group)


class _GroupCreator:
    """Creates groups. Every rank must ask for the same ones in the same order: torch counts them for their names."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # No other rank need take part in a group of one; all groups of this rank alone are this one.
        self._alone = dist.new_group([rank], use_local_synchronization=True)

    def create(self, groups: Iterable[list[int]]) -> dist.ProcessGroup | None:
        """Create one group for each list of ranks; return the one with this rank in it."""
        mine: dist.ProcessGroup | None = None
        for ranks in groups:
            group = self._alone if len(ranks) == 1 else dist.new_group(ranks)
            if self._rank in ranks:
                mine = group
        return mine


def _mesh_lines(mesh: UnitMesh) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Return the lines of ranks along the mesh's tp, dp and pp axes."""
    tp, dp, pp = range(mesh.tp), range(mesh.dp), range(mesh.pp)
    tp_groups = {(p, d): mesh.tp_group(p, d) for p in pp for d in dp}
    return (
        [list(tp_group) for tp_group in tp_groups.values()],
        [[tp_groups[p, d][t] for d in dp] for p in pp for t in tp],
        [[tp_groups[p, d][t] for p in pp] for d in dp for t in tp],
    )


def _edge_ranks(graph: StageGraph, edge: Edge) -> list[list[int]]:
    """Return the ranks at both ends of the edge, for each replica group."""
    groups: list[set[int]] = [set() for _ in range(graph.num_groups)]
    for stage_id in (edge.src, edge.dst):
        tp_groups = graph.stage(stage_id).tp_groups
        replicas_per_group = len(tp_groups) // graph.num_groups
        for replica, tp_group in enumerate(tp_groups):
            groups[replica // replicas_per_group].update(tp_group)
    return [sorted(group) for group in groups]


def _tied_pairs(graph: StageGraph) -> list[list[int]]:
    """Return the ranks that hold the same shard of a matrix that the LLM's first and last stage both hold."""
    ends = [graph.stage(stage_id).tp_groups for stage_id in shared_embedding_stages(graph)]
    return [list(pair) for tp_groups in zip(*ends, strict=True) for pair in zip(*tp_groups, strict=True)]
