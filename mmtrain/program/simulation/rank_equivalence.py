"""Equivalent ranks: ranks of a replica group that do the same at the same time, of which the simulator follows one.

Tensor parallelism makes most ranks of a TP group copies of each other: they compute together, and position k of a
TP group sends to position k of the next. Only the first rank may differ, since it alone exchanges data with other
units for its TP group; and where an encoder has a replica on each rank of the TP group, every rank differs.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from mmtrain.program.ir.data_dependencies import shared_embedding_stages
from mmtrain.program.ir.graph import Stage, StageGraph, StageId
from mmtrain.program.ir.symmetry import symmetry

LinkClass = Callable[[tuple[int, ...]], Hashable]  # ranks -> what the costs of communication among them depend on
RankRole = tuple[tuple[StageId, int, bool], ...]  # (stage, replica) held, and whether the rank talks to other units
SameActions = Callable[[int, int], bool]  # whether two ranks do the same
RanksByRole = dict[RankRole, int]


class _Connection(NamedTuple):
    """Ranks that exchange messages, or that share a collective other than those of their TP groups."""

    ranks: tuple[int, ...]  # of group 0
    group: tuple[int, ...]  # of all replica groups


class _Component(NamedTuple):
    """Connected ranks of group 0: see `equivalent_ranks`."""

    ranks: RanksByRole
    members: tuple[int, ...]  # all ranks; several may have one role
    is_alone: bool  # equivalent to no other, because its ranks cannot be matched
    key: frozenset[object]  # equivalent components have the same
    key_inside_units: frozenset[object]  # so have those that differ in nothing but whether they talk to other units


def equivalent_ranks(
    graph: StageGraph,
    ranks: Collection[int],
    same_actions: SameActions,
    mirrors: Sequence[Mapping[int, int]],
    link_class: LinkClass,
) -> dict[int, tuple[int, ...]]:
    """Return the ranks to simulate, each with all the ranks of group 0 that do as it does, itself first.

    A *component* is a set of ranks connected by messages and collectives that go from position k of one TP group to
    position k of another. Two components are equivalent if their ranks have the same roles and do the same, and if
    their connections cost the same in all groups of `mirrors`.

    Args:
        ranks: those whose actions are known; a component without any of them is taken to do as an equivalent one, or as
            one that does the same and talks to other units besides (see `representative_ranks`).
        mirrors: for each replica group, rank of group 0 -> rank of the group.
    """
    equivalent: defaultdict[frozenset[object], list[_Component]] = defaultdict(list)
    followed: dict[int, tuple[int, ...]] = {}
    for component in _all_components(graph, mirrors, link_class):
        if component.is_alone:
            followed |= {rank: (rank,) for rank in component.members}
        else:
            equivalent[component.key].append(component)
    known_alike: dict[frozenset[object], _Component] = {}
    left_out: list[_Component] = []
    for components in equivalent.values():
        unknown = [c for c in components if not any(rank in ranks for rank in c.ranks.values())]
        known = [c for c in components if c not in unknown]
        if not known:
            left_out += unknown
            continue
        known_alike[known[0].key_inside_units] = known[0]
        for first, *others in _doing_the_same([c.ranks for c in known], same_actions):
            for role, rank in first.items():
                followed[rank] = (rank, *(ranks_of[role] for ranks_of in [*others, *(c.ranks for c in unknown)]))
            unknown = []  # they were given to the first of the known components
    for component in left_out:
        if component.key_inside_units in known_alike:
            own = {_inside_unit(role): rank for role, rank in component.ranks.items()}
            for role, rank in known_alike[component.key_inside_units].ranks.items():
                followed[rank] = (*followed[rank], own[_inside_unit(role)])
    return {rank: followed[rank] for rank in sorted(followed) if rank in ranks}


def representative_ranks(graph: StageGraph, link_class: LinkClass) -> tuple[int, ...]:
    """Return ranks of group 0 whose actions are enough to know the step of all groups.

    Every other rank does as one of them, but for two differences: it sends and receives nothing between units, and its
    messages may leave sooner. Forwards and backwards wait for the whole TP group, so its first rank, which talks to
    other units besides, decides when they start. Only where a tied embedding matrix is reduced between the ends of a
    pipeline, at the same position of both TP groups, all positions are followed.

    This holds for programs that give ranks which hold the same stages the same order, as the builders do.
    """
    mirrors = symmetry(graph).mirrors
    components = list(_all_components(graph, mirrors, link_class))
    first_of_key: dict[frozenset[object], _Component] = {}
    for component in components:
        first_of_key.setdefault(component.key, component)
    talking = set()
    if not shared_embedding_stages(graph):
        talking = {c.key_inside_units for c in components if _talks_wherever_others_do(graph, c)}
    followed = [
        component
        for component in first_of_key.values()
        if component.key_inside_units not in talking or _talks_wherever_others_do(graph, component)
    ]
    return tuple(sorted(rank for component in followed for rank in component.members))


def _all_components(
    graph: StageGraph, mirrors: Sequence[Mapping[int, int]], link_class: LinkClass
) -> Iterator[_Component]:
    """List the components of group 0."""
    connections, roles = list(_connections(graph)), _roles(graph)
    for members, own_connections in _components(roles, connections):
        component = {roles[rank]: rank for rank in members}
        # Where a role is not unique, position k cannot be matched to position k: such a component stays alone.
        is_alone = len(component) < len(members) or _visits_twice(component)
        unmatched = members if is_alone else ()
        costs = [
            (connection.ranks, tuple(_link_classes(connection, mirrors, link_class))) for connection in own_connections
        ]
        key = [(tuple(roles[rank] for rank in linked), cost) for linked, cost in costs]
        inside = [(tuple(_inside_unit(roles[rank]) for rank in linked), cost) for linked, cost in costs]
        yield _Component(
            component,
            tuple(members),
            is_alone,
            frozenset([*component, *key, *unmatched]),
            frozenset([*map(_inside_unit, component), *inside, *unmatched]),
        )


def _inside_unit(role: RankRole) -> RankRole:
    """Return the role of a rank with the same stages that does not talk to other units."""
    return tuple((stage, replica, False) for stage, replica, _ in role)


def _talks_wherever_others_do(graph: StageGraph, component: _Component) -> bool:
    """Return whether every rank of the component is first in its TP groups wherever data enters or leaves a unit."""
    at_unit_border = _stages_at_unit_border(graph)
    return all(talks == (stage in at_unit_border) for role in component.ranks for stage, _, talks in role)


def _stages_at_unit_border(graph: StageGraph) -> set[StageId]:
    return {stage for e in graph.edges if e.crosses_units for stage in (e.src, e.dst)}


def _roles(graph: StageGraph) -> dict[int, RankRole]:
    at_unit_border = _stages_at_unit_border(graph)
    held: defaultdict[int, list[tuple[StageId, int, bool]]] = defaultdict(list)
    for stage in graph.stages:
        for replica, tp_group in enumerate(_tp_groups(graph, stage)):
            for rank in tp_group:
                held[rank].append((stage.id, replica, stage.id in at_unit_border and rank == tp_group[0]))
    return {rank: tuple(stages) for rank, stages in held.items()}


def _tp_groups(graph: StageGraph, stage: Stage) -> tuple[tuple[int, ...], ...]:
    """Return the TP groups of group 0."""
    return stage.tp_groups[: graph.mesh(stage.id.unit).num_replicas // graph.num_groups]


def _visits_twice(component: RanksByRole) -> bool:
    """Return whether two ranks of the component are in one TP group."""
    tp_groups = [(stage, replica) for role in component for stage, replica, _ in role]
    return len(set(tp_groups)) < len(tp_groups)


def _connections(graph: StageGraph) -> Iterator[_Connection]:
    pairs = {
        pair: None
        for e in graph.edges
        if not e.crosses_units
        for src, dst in zip(_tp_groups(graph, graph.stage(e.src)), _tp_groups(graph, graph.stage(e.dst)), strict=True)
        for pair in zip(src, dst, strict=True)
    }
    yield from (_Connection(pair, pair) for pair in pairs)
    seen = set()
    for stage in graph.stages:
        key = (stage.id.unit, stage.tp_groups)
        if key not in seen:
            seen.add(key)
            in_group_0 = zip(*_tp_groups(graph, stage), strict=True)
            in_all_groups = zip(*stage.tp_groups, strict=True)
            yield from (_Connection(ranks, group) for ranks, group in zip(in_group_0, in_all_groups, strict=True))
    ends = [_tp_groups(graph, graph.stage(sid)) for sid in shared_embedding_stages(graph)]
    for tp_groups in zip(*ends, strict=True):
        yield from (_Connection(ranks, ranks) for ranks in zip(*tp_groups, strict=True))


def _components(
    roles: Mapping[int, RankRole], connections: Sequence[_Connection]
) -> Iterator[tuple[list[int], list[_Connection]]]:
    """Yield sets of connected ranks, each with its connections."""
    component_of = {rank: number for number, rank in enumerate(sorted(roles))}
    members: dict[int, list[int]] = {number: [rank] for rank, number in component_of.items()}
    for connection in connections:
        for rank, other in pairwise(connection.ranks):
            if component_of[rank] == component_of[other]:
                continue
            small, large = sorted((component_of[rank], component_of[other]), key=lambda number: len(members[number]))
            component_of.update(dict.fromkeys(members[small], large))
            members[large] += members.pop(small)
    connections_of: defaultdict[int, list[_Connection]] = defaultdict(list)
    for connection in connections:
        connections_of[component_of[connection.ranks[0]]].append(connection)
    for number in dict.fromkeys(component_of.values()):
        yield members[number], connections_of[number]


def _link_classes(
    connection: _Connection, mirrors: Sequence[Mapping[int, int]], link_class: LinkClass
) -> list[Hashable]:
    if len(connection.group) > len(connection.ranks):
        return [link_class(tuple(sorted(connection.group)))]
    return [link_class(tuple(mirror[rank] for rank in connection.ranks)) for mirror in mirrors]


def _doing_the_same(components: Sequence[RanksByRole], same_actions: SameActions) -> Iterator[list[RanksByRole]]:
    """Put components together whose ranks do the same."""
    left = list(components)
    while left:
        first = left[0]
        alike = [
            component
            for component in left
            if component is first or all(same_actions(rank, component[role]) for role, rank in first.items())
        ]
        yield alike
        left = [component for component in left if component not in alike]
