"""Replica group 0 of a stage graph as a graph of its own, small enough to run where the whole plan is not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mmtrain.program.ir.graph import StageGraph
from mmtrain.program.ir.symmetry import symmetry


@dataclass(frozen=True)
class FirstGroup:
    """The stages of replica group 0, with its ranks numbered from 0.

    Its replicas and microbatches keep their numbers, so the loads and routes of a step hold for it too.
    """

    graph: StageGraph
    ranks: tuple[int, ...]  # of the whole graph, by rank of this one

    def renumber(self, order: Mapping[int, Sequence[str]]) -> dict[int, Sequence[str]]:
        """Return the lines of an explicit schedule for this graph's ranks."""
        return {number: order[rank] for number, rank in enumerate(self.ranks) if rank in order}


def first_group(graph: StageGraph) -> FirstGroup:
    """Return replica group 0 of the graph; all of it where replicas dispatch, since then all exchange rows.

    Raises:
        ProgramError: the graph's parts do not fit together, see `symmetry`.
    """
    groups = symmetry(graph).mirrors
    num_groups = len(groups) if graph.dispatches_items else 1
    ranks = tuple(sorted(rank for group in groups[:num_groups] for rank in group.values()))
    number_of = {rank: number for number, rank in enumerate(ranks)}

    def renumbered(tp_group: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number_of[rank] for rank in tp_group)

    meshes = []
    for mesh in graph.meshes:
        dp = mesh.dp // graph.num_groups * num_groups
        tp_groups = [mesh.tp_group(stage, replica) for stage in range(mesh.pp) for replica in range(dp * mesh.cp)]
        mesh_ranks = tuple(rank for tp_group in tp_groups for rank in renumbered(tp_group))
        meshes.append(replace(mesh, dp=dp, ranks=mesh_ranks))
    stages = []
    for stage in graph.stages:
        num_replicas = graph.mesh(stage.id.unit).num_replicas // graph.num_groups * num_groups
        kept = stage.tp_groups[:num_replicas]
        stages.append(replace(stage, tp_groups=tuple(renumbered(tp_group) for tp_group in kept)))
    return FirstGroup(replace(graph, meshes=tuple(meshes), stages=tuple(stages)), ranks)
