"""The communicators that a rank holds, and their share of a GPU's memory; see `runtime.execution.process_groups`."""

from collections import Counter
from collections.abc import Mapping

from mmtrain.costs import Hardware
from mmtrain.program.ir.channels import graph_channels
from mmtrain.program.ir.data_dependencies import shared_embedding_stages
from mmtrain.program.ir.graph import StageGraph


def communicator_bytes(graph: StageGraph, machine: Hardware) -> Mapping[int, float]:
    """Return the bytes of communicators by rank of the first replica group; all groups hold the same."""
    if not machine.channel_bytes and not machine.communicator_bytes:
        return {}
    num_channels, num_collectives = count_communicators(graph)
    ranks = set(num_channels) | set(num_collectives)
    return {
        rank: num_channels[rank] * machine.channel_bytes + num_collectives[rank] * machine.communicator_bytes
        for rank in ranks
    }


def count_communicators(graph: StageGraph) -> tuple[Counter[int], Counter[int]]:
    """Count the communicators of each rank of the first replica group: of two ranks for messages, and of collectives.

    Collectives have one of all ranks, one of each unit's TP group, one of its replicas and one of those that share
    sequences, unless these are alone, and one for embeddings that two stages hold. Where weights are sharded, ranks
    that hold one copy together have one, and ranks with equal shards another; units on the same ranks share both.
    Groups of pipeline ranks only generate text, and connect when they do.
    """
    num_channels, num_collectives = Counter[int](), Counter[int]()
    for _, _, sender, receiver in graph_channels(graph, graph.num_groups):
        num_channels.update((sender, receiver))
    tied = shared_embedding_stages(graph)
    first_stages = {mesh.unit: [s for s in graph.stages if s.id.unit == mesh.unit][: mesh.pp] for mesh in graph.meshes}
    for mesh in graph.meshes:
        per_group = mesh.num_replicas // graph.num_groups
        for stage in first_stages[mesh.unit]:  # those of later model chunks lie on the same ranks
            for tp_group in stage.tp_groups[:per_group]:
                num_collectives.update(dict.fromkeys(tp_group, (mesh.tp > 1) + (mesh.num_replicas > 1) + (mesh.cp > 1)))
        for stage_id in tied if mesh.unit in {stage_id.unit for stage_id in tied} else ():
            for tp_group in graph.stage(stage_id).tp_groups[:per_group]:
                num_collectives.update(tp_group)
    first_group = set(num_collectives)
    for ranks, shard in {(mesh.ranks, mesh.shard) for mesh in graph.meshes if mesh.shard is not None}:
        num_collectives.update(dict.fromkeys(first_group.intersection(ranks), (shard > 1) + (shard < len(ranks))))
    if graph.world_size > 1:
        num_collectives.update(first_group)
    return num_channels, num_collectives
