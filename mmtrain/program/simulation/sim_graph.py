"""A program as the simulator runs it: numbers instead of names, and one track for all ranks that do the same.

Made once for a program and then run over the times of batch after batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mmtrain.program.ir.actions import Collective, Compute, GatherParams, Partial, Pass, ReduceGrads, Send, Step
from mmtrain.program.ir.graph import StageGraph
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.segments import finished_pass, pass_of
from mmtrain.program.simulation.rank_equivalence import LinkClass, equivalent_ranks
from mmtrain.program.verify.live_activations import ActivationEvent, activation_events
from mmtrain.program.verify.matching import Join, MatchedActions, Post, match_actions

_OF_ALL_GROUPS = ReduceGrads | GatherParams | Step


class SimTask(NamedTuple):
    """What holds its tracks until it is done: a forward or backward, a part of one, or a collective."""

    action: Compute | Collective
    rank: int  # one of those that do it
    group: tuple[int, ...]  # all that do it, of all replica groups


class SimMessage(NamedTuple):
    """A message, sent alike by several ranks: the k-th of `senders` sends it to the k-th of `peers`."""

    send: Send  # of the first
    senders: tuple[int, ...]
    peers: tuple[int, ...]


class Participation(NamedTuple):
    """A track's part in a job; visits of a track follow each other in number.

    The first of a track is a part in the begin of the step, which is the job `SimGraph.start`; behind the last comes
    one in no job (-1).
    """

    task: int
    sim_rank: int
    reads: tuple[int, ...]  # parcels that must have arrived before
    posts: tuple[int, ...]  # parcels of which the track starts its end right after


@dataclass(frozen=True)
class SimGraph:
    """Ranks of the first replica groups that move along the same track, and what they meet there."""

    ranks: tuple[tuple[int, ...], ...]  # by track
    tasks: tuple[SimTask | None, ...]  # none where group 0 keeps the job for all groups
    messages: tuple[SimMessage, ...]
    participations: tuple[Participation, ...]
    participations_of: tuple[tuple[int, ...], ...]  # by job
    sender: tuple[int, ...]  # by parcel: the track whose communication stream it occupies
    reader: tuple[int, ...]  # by parcel: the visit that waits for it, or -1
    activation_events: tuple[tuple[ActivationEvent, ...], ...]  # by track: where activations begin and end to live
    resumed_by: Mapping[int, int]  # part that leaves a collective under way -> the next part of its pass, which waits

    @property
    def start(self) -> int:
        """The job that begins the step."""
        return len(self.tasks)

    @cached_property
    def num_dependencies(self) -> tuple[int, ...]:
        """By job: visits that must come to it, and parcels that must have arrived before them."""
        counts = [len(of) + sum([len(self.participations[v].reads) for v in of]) for of in self.participations_of]
        for job in self.resumed_by.values():
            counts[job] += 1
        return tuple(counts)

    @cached_property
    def is_compute(self) -> tuple[bool, ...]:
        """By job: whether it is no collective, which would occupy communication streams."""
        return tuple([job is not None and isinstance(job.action, Compute) for job in self.tasks])

    def tasks_of(self, track: int) -> Iterator[tuple[int, SimTask]]:
        """Jobs of a track, in order, each with its number."""
        visit = self.participations_of[self.start][track] + 1
        while (number := self.participations[visit].task) >= 0:
            job = self.tasks[number]
            assert job is not None, "no track visits a job that another group keeps"
            yield number, job
            visit += 1


def build_sim_graph(program: Program, num_groups: int, link_of: LinkClass) -> SimGraph:
    """Put ranks that do the same on one track, tie the ends of what they do together, and number all of it.

    `link_of` says what costs of messages and collectives among some ranks depend on; see `Timing.match_actions`.
    """
    mirrors = program.symmetry.mirrors[:num_groups]
    followed = equivalent_ranks(program.graph, program.actions, program.same_actions, mirrors, link_of)
    key = (num_groups, tuple(followed.items()))
    if key not in program.sim_graphs:
        program.sim_graphs[key] = _numbered(program, num_groups, followed)
    return program.sim_graphs[key]


def _numbered(program: Program, num_groups: int, followed: Mapping[int, tuple[int, ...]]) -> SimGraph:
    """Number jobs and parcels of group 0, then those of the next group in the same order; visits track by track."""
    groups, in_order = range(num_groups), list(followed)
    links = match_actions(program.graph, {rank: program.actions[rank] for rank in in_order})
    num_works, num_messages, num_tracks = len(links.joint_actions), len(links.messages), len(in_order)
    visits = list(_visits(links, num_groups))
    visits_of: list[list[int]] = [[] for _ in range(num_groups * num_works + 1)]
    reader = [-1] * (num_groups * num_messages)
    for number, visit in enumerate(visits):
        if visit.task >= 0:
            visits_of[visit.task].append(number)
        for parcel in visit.reads:
            reader[parcel] = number
    place = {rank: at for at, rank in enumerate(in_order)}
    senders = [place[message.sender] for message in links.messages]
    alive = [activation_events(program.graph, program.actions[rank]) for rank in in_order]
    mirrors = program.symmetry.mirrors
    resumed = _resumed(program.graph, links)
    return SimGraph(
        ranks=tuple(tuple(mirrors[g][twin] for twin in followed[rank]) for g in groups for rank in in_order),
        tasks=tuple(job for g in groups for job in _jobs(program, links, g)),
        messages=tuple(parcel for g in groups for parcel in _parcels(program, links, g, followed)),
        participations=tuple(visits),
        participations_of=tuple(map(tuple, visits_of)),
        sender=tuple(g * num_tracks + sender for g in groups for sender in senders),
        reader=tuple(reader),
        activation_events=tuple(
            tuple(b._replace(mb=program.shift(b.mb, g)) for b in track) for g in groups for track in alive
        ),
        resumed_by={g * num_works + part: g * num_works + other for g in groups for part, other in resumed.items()},
    )


def _resumed(graph: StageGraph, links: MatchedActions) -> dict[int, int]:
    """Parts of stages whose layers are cut, each with the part that goes on where it stops, by number of the work."""
    found: dict[int, int] = {}
    if not any(stage.pieces for stage in graph.stages):
        return found
    for steps in links.steps.values():
        stopped: dict[Pass, int] = {}
        for number in (step.joint_action for step in steps if isinstance(step, Join)):
            part = links.joint_actions[number].action
            if isinstance(part, Partial) and graph.stage(part.stage).pieces:
                if (before := stopped.pop(pass_of(part), None)) is not None:
                    found[before] = number
                if not finished_pass(graph, part):
                    stopped[pass_of(part)] = number
    return found


def _visits(links: MatchedActions, num_groups: int) -> Iterator[Participation]:
    num_works, num_messages = len(links.joint_actions), len(links.messages)
    shared = [isinstance(work.action, _OF_ALL_GROUPS) for work in links.joint_actions]
    track = 0
    for group in range(num_groups):
        first_work, first_message = group * num_works, group * num_messages
        for steps in links.steps.values():
            job, reads, posts = num_groups * num_works, (), []  # type: int, tuple[int, ...], list[int]
            for step in steps:
                if isinstance(step, Post):
                    posts.append(first_message + step.message)
                    continue
                yield Participation(job, track, reads, tuple(posts))
                job = step.joint_action if shared[step.joint_action] else first_work + step.joint_action
                reads, posts = tuple([first_message + message for message in step.reads]), []
            yield Participation(job, track, reads, tuple(posts))
            yield Participation(-1, track, (), ())
            track += 1


def _jobs(program: Program, links: MatchedActions, group: int) -> Iterator[SimTask | None]:
    mirror = program.symmetry.mirrors[group]
    for action, ranks, everyone in links.joint_actions:
        if not isinstance(action, _OF_ALL_GROUPS):
            members = tuple([mirror[rank] for rank in everyone]) if group else everyone
            yield SimTask(program.translate(action, group), mirror[ranks[0]], members)
        else:
            yield None if group else SimTask(action, ranks[0], everyone)


def _parcels(
    program: Program, links: MatchedActions, group: int, followed: Mapping[int, tuple[int, ...]]
) -> Iterator[SimMessage]:
    mirror = program.symmetry.mirrors[group]
    ranks = {rank: tuple(mirror[twin] for twin in same) for rank, same in followed.items()}
    for sender, send in links.messages:
        yield SimMessage(program.translate(send, group), ranks[sender], ranks[send.peer])
