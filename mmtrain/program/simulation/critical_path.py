"""The critical path: the chain of actions, each started by the end of the one before, that makes the step's time."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mmtrain.program.simulation.event_loop import EventTimes
from mmtrain.program.simulation.sim_graph import SimGraph
from mmtrain.program.simulation.timing import TransferCost
from mmtrain.program.trace.timeline import Span


def critical_path(
    graph: SimGraph, times: EventTimes, task_costs: Sequence[TransferCost], message_costs: Sequence[TransferCost]
) -> tuple[Span, ...]:
    """Return compute, messages and collectives from the start of the step to its end, without a gap between them.

    The action that ends last has waited for something that ended when it started, and so on back to the start of the
    step. Where several such chains exist, the one returned stays on its rank as long as it can. A message without rows
    is in no chain: the chain goes through it to what its ends waited for. A part is shown together with the collective
    that it left under way if that collective was waited for, and a collective together with its wait for stragglers. A
    task of several ranks is shown on one of those that kept the others waiting.
    """
    return tuple(_Walk(graph, times, task_costs, message_costs).backwards())[::-1]


class _Cause(NamedTuple):
    """What a task waited for last."""

    node: int  # of the task or message that ended when the waiting one started; see `SimGraph`
    sim_rank: int  # where it was waited for
    under_way_s: float = 0.0  # how long after its end the collective it left under way kept the other one waiting


class _Walk:
    def __init__(
        self,
        graph: SimGraph,
        times: EventTimes,
        task_costs: Sequence[TransferCost],
        message_costs: Sequence[TransferCost],
    ) -> None:
        self.graph = graph
        self.times = times
        self.task_costs = task_costs
        self.message_costs = message_costs
        self.posters: dict[int, list[int]] = {}  # message -> participations that post an end of it
        self.launchers: dict[int, list[int]] = {}  # asynchronous collective -> participations that start it
        for number, participation in enumerate(graph.participations):
            for message in participation.posts:
                self.posters.setdefault(message, []).append(number)
            for collective in participation.launches:
                self.launchers.setdefault(collective, []).append(number)
        self.awaited: dict[int, list[int]] = {}  # task -> asynchronous collectives that it waits for
        for collective, tasks in graph.awaited_by.items():
            for task in tasks:
                self.awaited.setdefault(task, []).append(collective)
        self.resumes = {task: part for part, task in graph.resumed_by.items()}
        self.stream_place = [{node: place for place, node in enumerate(nodes)} for nodes in times.stream_order]

    def backwards(self) -> Iterator[Span]:
        """Yield the spans of the path, the last one first."""
        graph, times = self.graph, self.times
        node = max(range(len(graph.tasks)), key=lambda task: times.ended[task])
        under_way_s = 0.0
        while node != graph.start:
            if node < graph.start:
                task = graph.tasks[node]
                assert task is not None
                started, nbytes = times.started[node], self.task_costs[node].nbytes
                start = times.reached.get(node, started)
                seconds = started - start + self.task_costs[node].seconds
                cause = self._before_task(node, start)
                yield Span(graph.ranks[cause.sim_rank][0], start, seconds + under_way_s, task.action, nbytes)
                node, under_way_s = cause.node, cause.under_way_s
            else:
                message = node - graph.first_message_node
                sent, (seconds, nbytes, _) = graph.messages[message], self.message_costs[message]
                if nbytes:
                    yield Span(sent.senders[0], times.departed[message], seconds, sent.send, nbytes)
                node = self._before_message(message)

    def _before_task(self, task: int, start: float) -> _Cause:
        """Return what ended when the task's ranks came to it at `start`, or when its stream was free.

        The rank's own order comes first, then what it waits for, then streams.
        """
        participations = self.graph.participations
        numbers = self.graph.participations_of[task]
        for number in numbers:
            before = self._task_of(number - 1)
            if self.times.ended[before] == start:
                return _Cause(before, participations[number].sim_rank)
        for number in self.launchers.get(task, ()):
            before = self._task_of(number)
            if self.times.ended[before] == start:
                return _Cause(before, participations[number].sim_rank)
        if task in self.resumes:
            before = self.resumes[task]
            under_way_s = self.times.under_way[before]
            if self.times.ended[before] + under_way_s == start:
                return _Cause(before, participations[numbers[0]].sim_rank, under_way_s)
        for number in numbers:
            for message in participations[number].reads:
                if self.times.arrived[message] == start:
                    return _Cause(self.graph.first_message_node + message, participations[number].sim_rank)
        for collective in self.awaited.get(task, ()):
            if self.times.ended[collective] == start:
                return _Cause(collective, participations[numbers[0]].sim_rank)
        for stream in self.graph.streams_of[task]:
            if (on_stream := self._before_on_stream(stream, task, start)) is not None:
                return _Cause(on_stream, stream % len(self.graph.ranks))
        raise AssertionError("a task starts when what it waits for ends")

    def _before_message(self, message: int) -> int:
        """Return the node that ended when the message departed: a task of one of its ends, or one on its stream."""
        departed = self.times.departed[message]
        for number in self.posters[message]:
            task = self._task_of(number)
            if self.times.ended[task] == departed:
                return task
        node = self.graph.first_message_node + message
        before = self._before_on_stream(self.graph.sender[message], node, departed)
        assert before is not None, "a message departs when what it waits for ends"
        return before

    def _task_of(self, participation: int) -> int:
        task = self.graph.participations[participation].task
        assert task is not None, "only the end of a sim rank's order has no task"
        return task

    def _before_on_stream(self, stream: int, node: int, start: float) -> int | None:
        """Return the node that the stream carried right before, if it ended at `start`."""
        place = self.stream_place[stream].get(node, 0)
        if place == 0:
            return None
        before = self.times.stream_order[stream][place - 1]
        first_message = self.graph.first_message_node
        ended = self.times.ended[before] if before < first_message else self.times.arrived[before - first_message]
        return before if ended == start else None
