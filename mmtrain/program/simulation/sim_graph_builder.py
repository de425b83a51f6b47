"""Make the simulator's graph of a program: one sim rank for all equivalent ranks, and numbers instead of names."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from mmtrain.program.ir.actions import (
    Action,
    Collective,
    Compute,
    Dispatch,
    GatherParams,
    Partial,
    Pass,
    ReduceGrads,
    Step,
)
from mmtrain.program.ir.graph import StageGraph
from mmtrain.program.ir.matching import Join, Launch, MatchedActions, Post, match_actions
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.segments import finished_pass, pass_of
from mmtrain.program.simulation.rank_equivalence import LinkClass, equivalent_ranks
from mmtrain.program.simulation.sim_graph import Participation, SimGraph, SimMessage, SimTask
from mmtrain.program.verify.live_activations import ActivationEvent, activation_events


def build_sim_graph(program: Program, num_groups: int, link_class: LinkClass) -> SimGraph:
    """Return the program's graph for its first `num_groups` replica groups; the program keeps it for the next call.

    Args:
        link_class: what the costs of messages and collectives among some ranks depend on; see `Timing.link_class`.
    """
    mirrors = program.symmetry.mirrors[:num_groups]
    equivalents = equivalent_ranks(program.graph, program.actions, program.same_actions, mirrors, link_class)
    key = ("sim graph", num_groups, tuple(equivalents.items()))
    return program.remembered(key, lambda: _numbered(program, num_groups, equivalents))


def _numbered(program: Program, num_groups: int, equivalents: Mapping[int, tuple[int, ...]]) -> SimGraph:
    """Number tasks and messages of group 0, then those of the next group in the same order.

    equivalents: each rank to simulate, with all the ranks that it stands for.
    """
    groups = range(num_groups)
    simulated = list(equivalents)
    matched = match_actions(program.graph, {rank: program.actions[rank] for rank in simulated})
    num_tasks, num_messages, num_sim_ranks = len(matched.joint_actions), len(matched.messages), len(simulated)
    of_all_groups = [_is_of_all_groups(program.graph, joint.action) for joint in matched.joint_actions]
    participations = list(_participations(matched, num_groups, of_all_groups))
    participations_of: list[list[int]] = [[] for _ in range(num_groups * num_tasks + 1)]
    reader: list[int | None] = [None] * (num_groups * num_messages)
    for number, participation in enumerate(participations):
        if participation.task is not None:
            participations_of[participation.task].append(number)
        for message in participation.reads:
            reader[message] = number
    sim_rank_of = {rank: sim_rank for sim_rank, rank in enumerate(simulated)}
    senders = [sim_rank_of[message.sender] for message in matched.messages]
    mirrors = program.symmetry.mirrors
    resumed_by = _resumed_by(program.graph, matched)
    return SimGraph(
        ranks=tuple(tuple(mirrors[g][other] for other in equivalents[rank]) for g in groups for rank in simulated),
        tasks=tuple(task for g in groups for task in _tasks(program, matched, g, of_all_groups)),
        messages=tuple(message for g in groups for message in _messages(program, matched, g, equivalents)),
        participations=tuple(participations),
        participations_of=tuple(map(tuple, participations_of)),
        streams_of=_streams_of(matched, participations, len(participations_of), num_groups * num_sim_ranks),
        awaited_by=_awaited_by(matched, num_groups, of_all_groups),
        sender=tuple(g * num_sim_ranks + sender for g in groups for sender in senders),
        reader=tuple(reader),
        resumed_by={
            g * num_tasks + part: g * num_tasks + next_part for g in groups for part, next_part in resumed_by.items()
        },
        # Of the program's parts: one that led back to it would keep both from being freed with their last reference.
        find_activation_events=partial(
            _activation_events, program.graph, [program.actions[rank] for rank in simulated], num_groups
        ),
    )


def _activation_events(
    graph: StageGraph, actions: Sequence[Sequence[Action]], num_groups: int
) -> tuple[tuple[ActivationEvent, ...], ...]:
    """Return by sim rank where it starts and ends to keep activations.

    actions: of the simulated ranks of group 0.
    """
    events = [activation_events(graph, of_rank) for of_rank in actions]
    return tuple(
        tuple(event._replace(mb=graph.shift(event.mb, g)) for event in of_rank)
        for g in range(num_groups)
        for of_rank in events
    )


def _resumed_by(graph: StageGraph, matched: MatchedActions) -> dict[int, int]:
    """Map each part that ends inside a pass of a stage cut into pieces to the next part of that pass."""
    resumed_by: dict[int, int] = {}
    if not any(stage.pieces for stage in graph.stages):
        return resumed_by
    for sequence in matched.sequences.values():
        stopped: dict[Pass, int] = {}
        for number in (step.joint_action for step in sequence if isinstance(step, Join)):
            part = matched.joint_actions[number].action
            if isinstance(part, Partial) and graph.stage(part.stage).pieces:
                if (before := stopped.pop(pass_of(part), None)) is not None:
                    resumed_by[before] = number
                if not finished_pass(graph, part):
                    stopped[pass_of(part)] = number
    return resumed_by


def _is_of_all_groups(graph: StageGraph, action: Compute | Collective) -> bool:
    """Return whether the ranks of all replica groups run the action together."""
    if isinstance(action, Compute):
        return graph.mesh(action.stage.unit).shard is not None
    return isinstance(action, Dispatch | ReduceGrads | GatherParams | Step)


def _participations(matched: MatchedActions, num_groups: int, of_all_groups: Sequence[bool]) -> Iterator[Participation]:
    """Yield the participations of sim rank after sim rank, each with its start and end."""
    num_tasks, num_messages = len(matched.joint_actions), len(matched.messages)
    start = num_groups * num_tasks
    sim_rank = 0
    for group in range(num_groups):
        first_task, first_message = group * num_tasks, group * num_messages
        for sequence in matched.sequences.values():
            task = start
            reads: tuple[int, ...] = ()
            posts: list[int] = []
            launches: list[int] = []
            for step in sequence:
                if isinstance(step, Post):
                    posts.append(first_message + step.message)
                    continue
                number = step.joint_action
                joint = number if of_all_groups[number] else first_task + number
                if isinstance(step, Launch):
                    launches.append(joint)
                    continue
                yield Participation(task, sim_rank, reads, tuple(posts), tuple(launches))
                task = joint
                reads = tuple([first_message + message for message in step.reads])
                posts = []
                launches = []
            yield Participation(task, sim_rank, reads, tuple(posts), tuple(launches))
            yield Participation(None, sim_rank, (), (), ())
            sim_rank += 1


def _streams_of(
    matched: MatchedActions, participations: Sequence[Participation], num_tasks: int, num_sim_ranks: int
) -> tuple[tuple[int, ...], ...]:
    """Return the streams that each task, and the start of the step, occupies (see `SimGraph`)."""
    streams_of: list[list[int]] = [[] for _ in range(num_tasks)]
    is_compute = [isinstance(joint.action, Compute) for joint in matched.joint_actions]
    for participation in participations:
        task = participation.task
        if task is not None and task != num_tasks - 1 and not is_compute[task % len(is_compute)]:
            streams_of[task].append(participation.sim_rank)
        for launched in participation.launches:
            streams_of[launched].append(num_sim_ranks + participation.sim_rank)
    return tuple(map(tuple, streams_of))


def _awaited_by(matched: MatchedActions, num_groups: int, of_all_groups: Sequence[bool]) -> dict[int, tuple[int, ...]]:
    """Map each asynchronous collective to the tasks that wait for its end."""
    awaited_by: dict[int, dict[int, None]] = {}
    num_tasks = len(matched.joint_actions)
    waiting = [
        step for sequence in matched.sequences.values() for step in sequence if isinstance(step, Join) and step.awaits
    ]
    for group in range(num_groups):
        for step in waiting:
            number = step.joint_action
            task = number if of_all_groups[number] else group * num_tasks + number
            for awaited in step.awaits:
                collective = awaited if of_all_groups[awaited] else group * num_tasks + awaited
                awaited_by.setdefault(collective, {})[task] = None
    return {collective: tuple(tasks) for collective, tasks in awaited_by.items()}


def _tasks(
    program: Program, matched: MatchedActions, group: int, of_all_groups: Sequence[bool]
) -> Iterator[SimTask | None]:
    mirror = program.symmetry.mirrors[group]
    for (action, ranks, all_ranks), is_of_all_groups in zip(matched.joint_actions, of_all_groups, strict=True):
        if not is_of_all_groups:
            members = tuple([mirror[rank] for rank in all_ranks]) if group else all_ranks
            yield SimTask(program.translate(action, group), mirror[ranks[0]], members)
        elif group == 0:
            yield SimTask(action, ranks[0], all_ranks)
        else:
            yield None


def _messages(
    program: Program, matched: MatchedActions, group: int, equivalents: Mapping[int, tuple[int, ...]]
) -> Iterator[SimMessage]:
    mirror = program.symmetry.mirrors[group]
    mirrored = {rank: tuple(mirror[other] for other in others) for rank, others in equivalents.items()}
    for sender, send, _ in matched.messages:
        senders, peers = mirrored[sender], mirrored[send.peer]
        if send.edge.crosses_units:  # only first ranks send and receive it, whoever else does as they do
            senders, peers = senders[:1], peers[:1]
        yield SimMessage(program.translate(send, group), senders, peers)
