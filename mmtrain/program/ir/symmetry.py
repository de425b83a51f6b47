"""Replica groups: how a group's ranks mirror those of group 0, and which stage graphs are rejected."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from mmtrain.errors import ProgramError
from mmtrain.program.ir.graph import LLM, StageGraph, StageId


@dataclass(frozen=True)
class Symmetry:
    """For each rank its replica group, and the rank of group 0 that it mirrors in its own group."""

    location: Mapping[int, tuple[int, int]]  # rank -> (group, rank of group 0)
    mirrors: tuple[Mapping[int, int], ...]  # per group: rank of group 0 -> rank of this group


def symmetry(graph: StageGraph) -> Symmetry:
    """Find every rank's replica group and its mirror in group 0; position k of a TP group mirrors position k.

    Raises:
        ProgramError: the graph's parts do not fit together, or a rank belongs to two groups.
    """
    _reject_misfits(graph)
    location: dict[int, tuple[int, int]] = {}
    held: dict[int, StageId] = {}  # the first stage found on each rank
    located: set[tuple[tuple[tuple[int, ...], ...], int]] = set()
    for stage in graph.stages:
        per_group = graph.mesh(stage.id.unit).num_replicas // graph.num_groups
        if (stage.tp_groups, per_group) in located:
            continue  # as another model chunk of the same ranks
        located.add((stage.tp_groups, per_group))
        for replica, tp_group in enumerate(stage.tp_groups):
            mirror = stage.tp_groups[replica % per_group]
            for rank, first in zip(tp_group, mirror, strict=True):
                in_this_stage = (replica // per_group, first)
                if location.setdefault(rank, in_this_stage) != in_this_stage:
                    raise ProgramError(_two_locations(rank, held[rank], location[rank], stage.id, in_this_stage))
                held.setdefault(rank, stage.id)
    mirrors: tuple[dict[int, int], ...] = tuple({} for _ in range(graph.num_groups))
    for rank, (group, first) in location.items():
        other = mirrors[group].setdefault(first, rank)
        if other != rank:
            raise ProgramError(
                f"stage graph: in replica group {group} ranks {other} and {rank} both mirror rank {first} of group 0; "
                "lay the units out so that every group repeats the first one"
            )
    return Symmetry(location, mirrors)


def _two_locations(
    rank: int, stage: StageId, location: tuple[int, int], other: StageId, other_location: tuple[int, int]
) -> str:
    (group, mirrored), (other_group, other_mirrored) = location, other_location
    return (
        f"stage graph: rank {rank} holds {stage} in replica group {group} (as rank {mirrored} of group 0 does) "
        f"and {other} in replica group {other_group} (as rank {other_mirrored} of group 0 does); a rank belongs to one "
        "group, and every group repeats the first one: change the ranks of one of the units"
    )


def _reject_misfits(graph: StageGraph) -> None:
    problems = [*_mesh_problems(graph), *_stage_problems(graph), *_edge_problems(graph)]
    if problems:
        raise ProgramError("stage graph: " + "; ".join(problems))
    _ = graph.order  # rejects cycles


def _mesh_problems(graph: StageGraph) -> list[str]:
    if not graph.meshes:
        return ["no units; at least one is needed"]
    return [
        f"{m.unit} has {m.num_microbatches} microbatches a replica in a step; at least 1 is needed"
        for m in graph.meshes
        if m.num_microbatches < 1
    ]


def _stage_problems(graph: StageGraph) -> list[str]:
    problems = []
    units = {m.unit for m in graph.meshes}
    for mesh in graph.meshes:
        num_stages = sum(s.id.unit == mesh.unit for s in graph.stages)
        if not (mesh.vpp - 1) * mesh.pp < num_stages <= mesh.vpp * mesh.pp:
            problems.append(
                f"{mesh.unit} has {num_stages} stages; pp {mesh.pp} with vpp {mesh.vpp} takes "
                f"{(mesh.vpp - 1) * mesh.pp + 1} to {mesh.vpp * mesh.pp}"
            )
    for stage in graph.stages:
        if stage.id.unit not in units:
            problems.append(f"stage {stage.id} belongs to no mesh; meshes: {', '.join(sorted(units))}")
            continue
        mesh = graph.mesh(stage.id.unit)
        if len(stage.tp_groups) != mesh.num_replicas or any(len(tp_group) != mesh.tp for tp_group in stage.tp_groups):
            problems.append(
                f"stage {stage.id} needs {mesh.num_replicas} TP groups of {mesh.tp} ranks, found {stage.tp_groups}"
            )
        held_ranks = list(chain.from_iterable(stage.tp_groups))
        if len(set(held_ranks)) < len(held_ranks):
            repeated = sorted(rank for rank, count in Counter(held_ranks).items() if count > 1)
            problems.append(
                f"stage {stage.id} lies more than once on ranks {repeated}; a rank holds one replica of a stage"
            )
    return problems


def _edge_problems(graph: StageGraph) -> list[str]:
    known = {s.id for s in graph.stages}
    problems = [
        f"edge {edge} joins a stage that does not exist" for edge in graph.edges if not {edge.src, edge.dst} <= known
    ]
    fed_by_llm = dict.fromkeys(e.dst.unit for e in graph.edges if e.crosses_units and e.src.unit == LLM)
    if len(fed_by_llm) > 1:
        problems.append(f"the LLM feeds {' and '.join(fed_by_llm)}; it can send rows to one unit, not to several")
    return problems
