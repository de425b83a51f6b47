"""Equivalent ranks: ranks of a replica group that do the same at the same time, of which the simulator follows one.

Tensor parallelism makes most ranks of a TP group copies of each other: they compute together, and position k of a
TP group sends to position k of the next. Only the first rank may differ, since it alone exchanges data with other
units for its TP group.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from mmtrain.program.ir.actions import Action, Recv, Send
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
        ranks: those whose actions are known; a component without any of them is taken to do as an equivalent one.
        mirrors: for each replica group, rank of group 0 -> rank of the group.
    """
    connections, roles = list(_connections(graph)), _roles(graph)
    equivalent: defaultdict[frozenset[object], list[RanksByRole]] = defaultdict(list)
    for members, own_connections in _components(roles, connections):
        component = {roles[rank]: rank for rank in members}
        # Where a role is not unique, position k cannot be matched to position k: such a component stays alone.
        unmatched = members if len(component) < len(members) or _visits_twice(component) else ()
        costs = {
            (tuple(roles[rank] for rank in connection.ranks), *_link_classes(connection, mirrors, link_class))
            for connection in own_connections
        }
        equivalent[frozenset([*component, *costs, *unmatched])].append(component)
    followed: dict[int, tuple[int, ...]] = {}
    for components in equivalent.values():
        unknown = [c for c in components if not any(rank in ranks for rank in c.values())]
        known = [c for c in components if c not in unknown]
        for first, *others in _doing_the_same(known, same_actions):
            for role, rank in first.items():
                followed[rank] = (rank, *(component[role] for component in [*others, *unknown]))
            unknown = []  # they were given to the first of the known components
    return {rank: followed[rank] for rank in sorted(followed) if rank in ranks}


def representative_ranks(graph: StageGraph, link_class: LinkClass) -> tuple[int, ...]:
    """Return ranks of group 0 whose actions are enough to simulate all groups: every other rank does as one of them.

    This holds for programs that give ranks which hold the same stages the same order, as the builders do.
    """
    mirrors = symmetry(graph).mirrors
    return tuple(equivalent_ranks(graph, mirrors[0], lambda rank, other: True, mirrors, link_class))


def _roles(graph: StageGraph) -> dict[int, RankRole]:
    at_unit_border = {stage for e in graph.edges if e.crosses_units for stage in (e.src, e.dst)}
    held: defaultdict[int, list[tuple[StageId, int, bool]]] = defaultdict(list)
    for stage in graph.stages:
        for replica, tp_group in enumerate(_tp_groups(graph, stage)):
            for rank in tp_group:
                held[rank].append((stage.id, replica, stage.id in at_unit_border and rank == tp_group[0]))
    return {rank: tuple(stages) for rank, stages in held.items()}


def _tp_groups(graph: StageGraph, stage: Stage) -> tuple[tuple[int, ...], ...]:
    """Return the TP groups of group 0."""
    return stage.tp_groups[: graph.mesh(stage.id.unit).dp // graph.num_groups]


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


def same_actions(actions: Sequence[Action] | None, others: Sequence[Action] | None) -> bool:
    """Return whether two ranks do the same in the same order, each with its own peers; False if one is unknown."""
    if actions is None or others is None or len(actions) != len(others):
        return False
    return all(a is b or a == b or _without_peer(a) == _without_peer(b) for a, b in zip(actions, others, strict=True))


def _without_peer(action: Action) -> tuple[object, ...]:
    if not isinstance(action, Send | Recv):
        return (action,)
    return type(action), action.edge, action.src, action.dst, action.payload
