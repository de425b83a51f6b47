"""The simulator: run a checked program event by event, given what its actions take.

Each rank has a compute stream, a communication stream and a data-parallel stream. The rank walks through its actions.
It posts sends and receives without delay, and starts a reduction of gradients or the gathering of parameters without
waiting for it. Everything else, a forward or backward, a part of one, or a collective, starts when the rank has reached
it, what it reads has arrived and all ranks that take part have reached it; it holds the rank until it ends.

A message is ready once both its ends are posted. Messages and collectives occupy communication streams, one after
another in the order in which they become ready: a message that of its sender, a collective those of all its members.
The receiver's stream stays free. Reductions and gathers occupy the data-parallel streams of all their members in the
same way, and start when all of these have reached them: NCCL gives every group a stream, and messages do not queue
behind gradients. Collectives inside compute occupy no stream either: one that a part leaves under way ends after its
own time, whatever the rank does meanwhile.

Ranks are simulated at the expected pace of those that they meet at every microbatch (`straggler_waits`), and
collectives of all replica groups start when the slowest group is expected to come.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np

from mmtrain.errors import ProgramError
from mmtrain.program.ir.actions import (
    Backward,
    Collective,
    Compute,
    Dispatch,
    Forward,
    Partial,
    ReduceGrads,
    Send,
    Step,
)
from mmtrain.program.ir.graph import Microbatch, StageId
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.serialize import action_to_text
from mmtrain.program.simulation.critical_path import critical_path
from mmtrain.program.simulation.event_loop import NEVER, Durations, EventTimes, Meetings, run_events
from mmtrain.program.simulation.sim_graph import SimGraph, SimTask
from mmtrain.program.simulation.sim_graph_builder import build_sim_graph
from mmtrain.program.simulation.simulated_bubbles import FloatArray
from mmtrain.program.simulation.straggler_waits import StragglerWaits
from mmtrain.program.simulation.timing import NO_TRANSFER, ModelTiming, Timing, TransferCost
from mmtrain.program.trace.timeline import LazyPeaks, LazySpans, Span, Timeline
from mmtrain.program.verify.live_activations import peak_of_events

T = TypeVar("T")


class _Run(NamedTuple):
    """The events of a step, what each of them costs, and when it happens."""

    graph: SimGraph
    task_costs: Sequence[TransferCost]
    message_costs: Sequence[TransferCost]
    times: EventTimes


def simulate(program: Program, timing: Timing, num_groups: int = 1, waits: StragglerWaits | None = None) -> Timeline:
    """Predict one step of the first `num_groups` replica groups.

    One group stands for all when their loads are alike: it then waits for its own members of data-parallel
    collectives only, though these are timed at their full size. Simulate all groups when their loads differ.

    Equivalent ranks are simulated once (see `equivalent_ranks`). `BubbleAccount` says what each kind of bubble means.

    waits: for slower ranks; None: all ranks are equally fast.

    Raises:
        ProgramError: the program gets stuck; `check_program` says why.
    """
    graph, task_costs, message_costs, times = _run(program, timing, num_groups, waits)
    step_time = max(times.ended)
    tp_wait_s = _tp_waits(graph, timing) if any(mesh.tp > 1 for mesh in program.graph.meshes) else None
    started, ended = np.array(times.started), np.array(times.ended)
    bubbles = [pattern.bubbles(started, ended, tp_wait_s, step_time) for pattern in graph.bubble_patterns]
    return Timeline(
        spans=LazySpans(partial(_spans, graph, times, task_costs, message_costs)),
        step_time_s=step_time,
        bubbles=_by_rank(graph, bubbles),
        peak_memory_bytes=LazyPeaks(partial(_peaks, graph, timing)),
        simulated=True,
        pipeline_ranks={mesh.unit: mesh.pp for mesh in program.graph.meshes},
        critical_path=LazySpans(partial(critical_path, graph, times, task_costs, message_costs)),
    )


def _run(program: Program, timing: Timing, num_groups: int, waits: StragglerWaits | None) -> "_Run":
    """Price what a step consists of, and let it happen."""
    graph = build_sim_graph(program, num_groups, timing.link_class)
    task_costs = [_task_cost(timing, task) if task else NO_TRANSFER for task in graph.tasks]
    message_costs = [timing.message(message.senders[0], message.send) for message in graph.messages]
    if any(cost.posting_s for cost in message_costs):
        task_costs = _with_posting(graph, task_costs, message_costs)
    under_way = {task: _left_under_way(timing, graph.tasks[task]) for task in graph.resumed_by}
    meetings = Meetings()
    if waits is not None and waits.has_any:
        task_costs = _with_waits(graph, task_costs, waits)
        meetings = _meetings(graph, waits)
    seconds = [cost.seconds for cost in task_costs]
    transit = [cost.seconds if cost.nbytes else None for cost in message_costs]
    times = run_events(graph, Durations(seconds, transit, under_way, meetings))
    _raise_if_stuck(graph, times)
    return _Run(graph, task_costs, message_costs, times)


def _task_cost(timing: Timing, task: SimTask) -> TransferCost:
    if isinstance(task.action, Compute):
        return TransferCost(timing.compute(task.action), 0)
    return timing.collective(task.rank, task.action, task.group)


def _with_posting(
    graph: SimGraph, task_costs: Sequence[TransferCost], message_costs: Sequence[TransferCost]
) -> list[TransferCost]:
    """Lengthen each compute task by the time its slowest rank takes to post the messages that follow it."""
    posting = [0.0] * (len(graph.tasks) + 1)
    for participation in graph.participations:
        task = participation.task
        if task is not None and participation.posts:
            of_rank = sum(message_costs[message].posting_s for message in participation.posts)
            posting[task] = max(posting[task], of_rank)
    return [
        cost._replace(seconds=cost.seconds + posting[task]) if is_compute else cost
        for task, (cost, is_compute) in enumerate(zip(task_costs, graph.is_compute, strict=True))
    ]


def _with_waits(graph: SimGraph, task_costs: Sequence[TransferCost], waits: StragglerWaits) -> list[TransferCost]:
    """Lengthen each compute task by what its ranks wait for slower ones of their replica group."""
    return [
        TransferCost(cost.seconds * waits.passes[task.action.mb.unit], cost.nbytes)
        if task is not None and isinstance(task.action, Forward | Backward | Partial)
        else cost
        for task, cost in zip(graph.tasks, task_costs, strict=True)
    ]


def _meetings(graph: SimGraph, waits: StragglerWaits) -> Meetings:
    """Return the collectives at which replica groups wait for the slowest of them."""
    if waits.groups <= 1:
        return Meetings()
    tasks = frozenset(
        number
        for number, task in enumerate(graph.tasks)
        if task is not None and isinstance(task.action, ReduceGrads | Dispatch | Step)
    )
    return Meetings(tasks, waits.groups - 1)


def _left_under_way(timing: Timing, task: SimTask | None) -> float:
    assert task is not None
    assert isinstance(task.action, Partial)
    return timing.left_under_way(task.action)


def _by_rank(graph: SimGraph, values: Sequence[T]) -> dict[int, T]:
    """Give every rank the value of its sim rank."""
    by_rank = {rank: value for ranks, value in zip(graph.ranks, values, strict=True) for rank in ranks}
    return dict(sorted(by_rank.items()))


def _tp_waits(graph: SimGraph, timing: Timing) -> FloatArray:
    """Return by task the seconds that it waits inside its layers for tensor-parallel collectives."""
    return np.array(
        [
            timing.tp_wait(task.action) if task is not None and isinstance(task.action, Compute) else 0.0
            for task in graph.tasks
        ]
    )


def _peaks(graph: SimGraph, timing: Timing) -> dict[int, int]:
    """Return by rank the most bytes of activations alive at once."""
    return _by_rank(graph, [peak_of_events(of_rank, timing.activation_bytes)[0] for of_rank in graph.activation_events])


def _spans(
    graph: SimGraph, times: EventTimes, task_costs: Sequence[TransferCost], message_costs: Sequence[TransferCost]
) -> tuple[Span, ...]:
    """Return everything the ranks do as spans, in the order of their start."""
    spans = []
    for sim_rank, ranks in enumerate(graph.ranks):
        for number, task in chain(graph.tasks_of(sim_rank), graph.launched_by(sim_rank)):
            start, (seconds, nbytes, _) = times.started[number], task_costs[number]
            spans += [Span(rank, start, seconds, task.action, nbytes) for rank in ranks]
    for message, departed, cost in zip(graph.messages, times.departed, message_costs, strict=True):
        if not cost.nbytes:
            continue
        send = message.send
        for rank, peer in zip(message.senders, message.peers, strict=True):
            action = send if peer == send.peer else Send(send.edge, send.src, send.dst, peer, send.payload)
            spans.append(Span(rank, departed, cost.seconds, action, cost.nbytes))
    return tuple(sorted(spans, key=lambda span: (span.start_s, span.rank)))


def _raise_if_stuck(graph: SimGraph, times: EventTimes) -> None:
    if all(start != NEVER or not of for start, of in zip(times.started, graph.participations_of, strict=True)):
        return
    for sim_rank, ranks in enumerate(graph.ranks):
        for position, (number, task) in enumerate(graph.tasks_of(sim_rank)):
            if times.started[number] == NEVER:
                raise ProgramError(
                    f"simulate: rank {ranks[0]} waits forever at `{action_to_text(task.action)}`, number {position} of "
                    "its compute actions and collectives; check_program says why"
                )


@dataclass(frozen=True)
class SlowRankTiming:
    """A `Timing` in which everything that `rank` computes takes `factor` times as long.

    Whoever computes together with the rank waits for it: its TP group, and all replicas of a unit that is sharded.
    """

    timing: ModelTiming
    rank: int
    factor: float

    def compute(self, action: Compute) -> float:
        """See `Timing`."""
        graph = self.timing.graph
        mesh = graph.mesh(action.mb.unit)
        is_sharded = mesh.shard is not None
        together = mesh.ranks if is_sharded else graph.tp_group(action.stage, action.mb.replica)
        return self.timing.compute(action) * (self.factor if self.rank in together else 1.0)

    def left_under_way(self, action: Partial) -> float:
        """See `Timing`."""
        return self.timing.left_under_way(action)

    def tp_wait(self, action: Compute) -> float:
        """See `Timing`: a slow rank communicates as fast as the others."""
        return self.timing.tp_wait(action)

    def message(self, sender: int, action: Send) -> TransferCost:
        """See `Timing`."""
        return self.timing.message(sender, action)

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        """See `Timing`."""
        return self.timing.collective(rank, action, group)

    def link_class(self, ranks: tuple[int, ...]) -> Hashable:
        """See `Timing`."""
        return self.timing.link_class(ranks)

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        """See `Timing`."""
        return self.timing.activation_bytes(stage, mb)
