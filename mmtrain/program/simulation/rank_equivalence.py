"""Twins: ranks of a replica group that do the same at the same time, of which the simulator follows one.

Tensor parallelism makes most ranks of a TP group copies of each other: they compute together, and position k of a
TP group talks to position k of the next. Only its first rank may differ, which speaks for the TP group to other units.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from mmtrain.program.ir.actions import Action, Recv, Send
from mmtrain.program.ir.data_dependencies import shared_embedding_stages
from mmtrain.program.ir.graph import Stage, StageGraph, StageId
from mmtrain.program.ir.symmetry import symmetry

LinkClass = Callable[[tuple[int, ...]], Hashable]  # what costs among these ranks depend on
RankRole = tuple[
    tuple[StageId, int, bool], ...
]  # the (stage, replica) that a rank holds, and if it speaks for the TP group
SameActions = Callable[[int, int], bool]  # whether two ranks do the same
RanksByRole = dict[RankRole, int]  # the ranks of a thread by where they sit


class _Connection(NamedTuple):
    """Ranks that exchange messages, or that are in one collective besides those of their TP groups."""

    ranks: tuple[int, ...]  # of group 0
    group: tuple[int, ...]  # of all replica groups


def equivalent_ranks(
    graph: StageGraph, ranks: Collection[int], same: SameActions, mirrors: Sequence[Mapping[int, int]], link: LinkClass
) -> dict[int, tuple[int, ...]]:
    """Return, for each of `ranks` (of group 0) to follow, the ranks that do as it does, itself first.

    A *thread* is a set of ranks tied by messages and collectives that go from position k of a TP group to position k of
    another. Two threads are twins if they sit in the same TP groups, neither speaks for one in which the other does
    not, their ties cost the same in all the groups of `mirrors` (rank of group 0 -> rank of the group), and the ranks
    do the same. Twins that are not among `ranks` are taken to do as those that are.
    """
    ties, seats = list(_ties(graph)), _seats(graph)
    alike: defaultdict[frozenset[object], list[RanksByRole]] = defaultdict(list)
    for members, own in _threads(seats, ties):
        thread = {seats[rank]: rank for rank in members}
        alone = members if len(thread) < len(members) or _visits_twice(thread) else ()
        costs = {(tuple(seats[r] for r in tie.ranks), *_links(tie, mirrors, link)) for tie in own}
        alike[frozenset([*thread, *costs, *alone])].append(thread)
    found: dict[int, tuple[int, ...]] = {}
    for threads in alike.values():
        missing = [t for t in threads if not any(rank in ranks for rank in t.values())]
        for first, *others in _doing_the_same([t for t in threads if t not in missing], same):
            for seat, rank in first.items():
                found[rank] = (rank, *(t[seat] for t in [*others, *missing]))
            missing = []
    return {rank: found[rank] for rank in sorted(found) if rank in ranks}


def representative_ranks(graph: StageGraph, link: LinkClass) -> tuple[int, ...]:
    """Ranks of group 0 whose actions are enough to simulate all groups: others do as one of them.

    True of programs that give ranks which hold the same stages the same order, as builders do.
    """
    mirrors = symmetry(graph).mirrors
    return tuple(equivalent_ranks(graph, mirrors[0], lambda one, other: True, mirrors, link))


def _seats(graph: StageGraph) -> dict[int, RankRole]:
    speaks = {sid for e in graph.edges if e.crosses_units for sid in (e.src, e.dst)}
    held: defaultdict[int, list[tuple[StageId, int, bool]]] = defaultdict(list)
    for stage in graph.stages:
        for replica, tp_group in enumerate(_tp_groups(graph, stage)):
            for rank in tp_group:
                held[rank].append((stage.id, replica, stage.id in speaks and rank == tp_group[0]))
    return {rank: tuple(places) for rank, places in held.items()}


def _tp_groups(graph: StageGraph, stage: Stage) -> tuple[tuple[int, ...], ...]:
    """TP groups of group 0."""
    return stage.tp_groups[: graph.mesh(stage.id.unit).dp // graph.num_groups]


def _visits_twice(thread: RanksByRole) -> bool:
    """Whether two ranks of the thread sit in one TP group."""
    tp_groups = [(stage, replica) for seat in thread for stage, replica, _ in seat]
    return len(set(tp_groups)) < len(tp_groups)


def _ties(graph: StageGraph) -> Iterator[_Connection]:
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
            here = zip(*_tp_groups(graph, stage), strict=True)
            groups = zip(*stage.tp_groups, strict=True)
            yield from (_Connection(ranks, group) for ranks, group in zip(here, groups, strict=True))
    ends = [_tp_groups(graph, graph.stage(sid)) for sid in shared_embedding_stages(graph)]
    for tp_groups in zip(*ends, strict=True):
        yield from (_Connection(ranks, ranks) for ranks in zip(*tp_groups, strict=True))


def _threads(
    seats: Mapping[int, RankRole], ties: Sequence[_Connection]
) -> Iterator[tuple[list[int], list[_Connection]]]:
    """Sets of ranks that ties join, with their ties."""
    thread: dict[int, list[int]] = {rank: [rank] for rank in sorted(seats)}
    for tie in ties:
        for one, two in pairwise(tie.ranks):
            if thread[one] is not thread[two]:
                small, large = sorted((thread[one], thread[two]), key=len)
                large += small
                thread.update(dict.fromkeys(small, large))
    own: defaultdict[int, list[_Connection]] = defaultdict(list)
    for tie in ties:
        own[id(thread[tie.ranks[0]])].append(tie)
    yield from ((ranks, own[key]) for key, ranks in {id(ranks): ranks for ranks in thread.values()}.items())


def _links(tie: _Connection, mirrors: Sequence[Mapping[int, int]], link: LinkClass) -> list[Hashable]:
    if len(tie.group) > len(tie.ranks):
        return [link(tuple(sorted(tie.group)))]
    return [link(tuple(mirror[rank] for rank in tie.ranks)) for mirror in mirrors]


def _doing_the_same(threads: Sequence[RanksByRole], same: SameActions) -> Iterator[list[RanksByRole]]:
    """Put threads together whose ranks do the same."""
    left = list(threads)
    while left:
        first = left[0]
        alike = [t for t in left if t is first or all(same(rank, t[seat]) for seat, rank in first.items())]
        yield alike
        left = [t for t in left if t not in alike]


def same_actions(one: Sequence[Action] | None, two: Sequence[Action] | None) -> bool:
    """Whether two ranks do the same things in the same order, each with peers of its own."""
    if one is None or two is None:
        return False
    return len(one) == len(two) and all(a is b or a == b or _flow(a) == _flow(b) for a, b in zip(one, two, strict=True))


def _flow(action: Action) -> tuple[object, ...]:
    """What a message carries, without its peer."""
    if not isinstance(action, Send | Recv):
        return (action,)
    return type(action), action.edge, action.src, action.dst, action.payload
