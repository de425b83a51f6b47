"""A program in the form that the event loop runs: numbers instead of names, one sim rank for all equivalent ranks.

`sim_graph_builder` makes it once for a program; `event_loop` then runs it with the durations of batch after batch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from mmtrain.program.ir.actions import Collective, Compute, Send
from mmtrain.program.simulation.simulated_bubbles import BubblePattern
from mmtrain.program.verify.live_activations import ActivationEvent


class SimTask(NamedTuple):
    """What sim ranks do together: a forward or backward, a part of one, or a collective.

    It occupies them until it ends, unless it is an `AsyncCollective`.
    """

    action: Compute | Collective
    rank: int  # one of the ranks that run it
    group: tuple[int, ...]  # all ranks that run it, of all replica groups


class SimMessage(NamedTuple):
    """A message that several equivalent ranks send alike: the k-th of `senders` sends it to the k-th of `peers`."""

    send: Send  # of the first sender
    senders: tuple[int, ...]
    peers: tuple[int, ...]


class Participation(NamedTuple):
    """A sim rank's part in a task that occupies it. Those of a sim rank are numbered one after another, in its order.

    The first is its part in the start of the step (`SimGraph.start`). The last has no task: it marks the end.
    """

    task: int | None
    sim_rank: int
    reads: tuple[int, ...]  # messages that must have arrived before the task starts
    posts: tuple[int, ...]  # messages whose end at this sim rank is posted when the task ends
    launches: tuple[int, ...]  # asynchronous collectives that this sim rank starts when the task ends


@dataclass(frozen=True)
class SimGraph:
    """The sim ranks of the simulated replica groups, and the tasks and messages in which they meet.

    A *node* is what a stream can carry: task t has node t, message m has node `first_message_node + m`. Sim rank r has
    two streams besides its compute stream: stream r carries messages and collectives that occupy sim ranks, stream
    `len(ranks) + r` carries asynchronous collectives.
    """

    ranks: tuple[tuple[int, ...], ...]  # by sim rank: the equivalent ranks that it stands for
    tasks: tuple[SimTask | None, ...]  # None where group 0 runs the task for all groups
    messages: tuple[SimMessage, ...]
    participations: tuple[Participation, ...]
    participations_of: tuple[tuple[int, ...], ...]  # by task; none of an asynchronous collective
    streams_of: tuple[tuple[int, ...], ...]  # by task: the streams that it occupies
    awaited_by: Mapping[int, tuple[int, ...]]  # asynchronous collective -> the tasks that wait for its end
    sender: tuple[int, ...]  # by message: the sim rank whose communication stream it occupies
    reader: tuple[int | None, ...]  # by message: the participation that waits for it
    resumed_by: Mapping[int, int]  # part that leaves a collective under way -> the next part of its pass, which waits
    find_activation_events: Callable[[], tuple[tuple[ActivationEvent, ...], ...]]  # by sim rank

    @property
    def start(self) -> int:
        """Number of the task that starts the step."""
        return len(self.tasks)

    @property
    def first_message_node(self) -> int:
        """Node of message 0."""
        return len(self.tasks) + 1

    @cached_property
    def num_dependencies(self) -> tuple[int, ...]:
        """By task: participations that must reach or launch it, and what must arrive or end before it starts."""
        counts = [
            len(numbers) + sum([len(self.participations[number].reads) for number in numbers])
            for numbers in self.participations_of
        ]
        for task in self.resumed_by.values():
            counts[task] += 1
        for participation in self.participations:
            for task in participation.launches:
                counts[task] += 1
        for waiting in self.awaited_by.values():
            for task in waiting:
                counts[task] += 1
        return tuple(counts)

    @cached_property
    def launched_after(self) -> Mapping[int, tuple[int, ...]]:
        """By task: asynchronous collectives launched when it ends, each once for every sim rank that launches it.

        What sim ranks launch first comes first, so that a collective of few ranks does not overtake one of more.
        """
        launched: dict[int, tuple[int, ...]] = {}
        for task, numbers in enumerate(self.participations_of):
            launches = [self.participations[number].launches for number in numbers]
            if any(launches):
                launched[task] = tuple([c for nth in zip_longest(*launches) for c in nth if c is not None])
        return launched

    @cached_property
    def awaits(self) -> Mapping[int, tuple[int, ...]]:
        """By task: the asynchronous collectives for whose end it waits on some sim rank."""
        awaits: dict[int, list[int]] = {}
        for collective, waiting in self.awaited_by.items():
            for task in waiting:
                awaits.setdefault(task, []).append(collective)
        return {task: tuple(collectives) for task, collectives in awaits.items()}

    @cached_property
    def is_compute(self) -> tuple[bool, ...]:
        """By task: whether it runs on compute streams; collectives occupy the others."""
        return tuple([task is not None and isinstance(task.action, Compute) for task in self.tasks])

    @cached_property
    def bubble_patterns(self) -> tuple[BubblePattern, ...]:
        """By sim rank: what its bubbles depend on besides times."""
        patterns = []
        for sim_rank in range(len(self.ranks)):
            launched = {collective for collective, _ in self.launched_by(sim_rank)}
            tasks = list(self.tasks_of(sim_rank))
            awaited = [
                tuple([collective for collective in self.awaits.get(number, ()) if collective in launched])
                for number, _ in tasks
            ]
            patterns.append(
                BubblePattern.of_rank([number for number, _ in tasks], [task.action for _, task in tasks], awaited)
            )
        return tuple(patterns)

    @cached_property
    def activation_events(self) -> tuple[tuple[ActivationEvent, ...], ...]:
        """By sim rank: where it starts and ends to keep activations."""
        return self.find_activation_events()

    def tasks_of(self, sim_rank: int) -> Iterator[tuple[int, SimTask]]:
        """Return the numbered tasks that occupy a sim rank, in order."""
        participation = self.participations_of[self.start][sim_rank] + 1
        while (number := self.participations[participation].task) is not None:
            task = self.tasks[number]
            assert task is not None, "no sim rank takes part in a task that another group runs for it"
            yield number, task
            participation += 1

    def launched_by(self, sim_rank: int) -> Iterator[tuple[int, SimTask]]:
        """Return the numbered asynchronous collectives of a sim rank, in the order in which it starts them."""
        participation = self.participations_of[self.start][sim_rank]
        while self.participations[participation].task is not None:
            for number in self.participations[participation].launches:
                task = self.tasks[number]
                assert task is not None, "no sim rank starts a task that another group runs for it"
                yield number, task
            participation += 1
