"""A program with its ends tied together: which send meets which receive, which ranks run a collective together.

The deadlock test walks it, and the simulator makes its tracks of it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmtrain.program.ir.actions import Action, Collective, Compute, Recv, Send
from mmtrain.program.ir.data_dependencies import participants, reader_of
from mmtrain.program.ir.graph import StageGraph
from mmtrain.program.ir.segments import expand_all, started_pass


class MatchedMessage(NamedTuple):
    """One message of the step."""

    sender: int
    send: Send


class JointAction(NamedTuple):
    """What holds a rank until it is done: a forward or backward, a part of one, or a collective."""

    action: Compute | Collective
    ranks: tuple[int, ...]  # of this replica group
    group: tuple[int, ...]  # of all replica groups; longer than `ranks` for data-parallel collectives and the step


class Post(NamedTuple):
    """A rank starts its end of a message, and goes on."""

    message: int  # index into `MatchedActions.messages`


class Join(NamedTuple):
    """A rank takes part in a work, once these messages have arrived."""

    joint_action: int  # index into `MatchedActions.joint_actions`
    reads: tuple[int, ...]  # indices into `MatchedActions.messages`


@dataclass(frozen=True)
class MatchedActions:
    """What the ranks of one replica group do, in order, with messages and works as shared objects."""

    messages: tuple[MatchedMessage, ...]
    joint_actions: tuple[JointAction, ...]
    steps: Mapping[int, tuple[Post | Join, ...]]  # rank -> one entry for each thing it does (`segments.expand_all`)


def match_actions(graph: StageGraph, actions: Mapping[int, Sequence[Action]]) -> MatchedActions:
    """Tie sends to receives by what they carry, and the k-th collectives of a group's ranks to each other."""
    messages: dict[tuple[Send, int], int] = {}
    works: dict[tuple[int, int], int] = {}  # number of a group, and how many works it had before -> number of the work
    all_works: list[JointAction] = []
    steps: dict[int, tuple[Post | Join, ...]] = {}
    groups = _Groups(graph, actions)
    for rank, todo in actions.items():
        reads: dict[Action, tuple[int, ...]] = {}
        num_done: dict[int, int] = {}
        out: list[Post | Join] = []
        for action in expand_all(graph, todo):
            if isinstance(action, Send):
                out.append(Post(messages.setdefault((action, rank), len(messages))))
            elif isinstance(action, Recv):
                send = Send(action.edge, action.src, action.dst, rank, action.payload)
                message = messages.setdefault((send, action.peer), len(messages))
                waits = reader_of(graph, action)
                reads[waits] = (*reads.get(waits, ()), message)
                out.append(Post(message))
            else:
                group = groups.number(rank, action)
                nth = num_done[group] = num_done.get(group, 0) + 1
                work = works.setdefault((group, nth), len(works))
                if work == len(all_works):
                    all_works.append(JointAction(action, groups.here[group], groups.everyone[group]))
                reader = started_pass(graph, action) if isinstance(action, Compute) else action
                out.append(Join(work, reads.pop(reader, ()) if reader else ()))
        steps[rank] = tuple(out)
    return MatchedActions(tuple(MatchedMessage(sender, send) for send, sender in messages), tuple(all_works), steps)


class _Groups:
    """Ranks that work together, numbered: of all replica groups (`everyone`), and those that have actions (`here`)."""

    def __init__(self, graph: StageGraph, actions: Collection[int]) -> None:
        self._graph, self._actions = graph, actions
        self._numbers: dict[tuple[int, ...], int] = {}
        self._tp_groups: dict[tuple[str, int, int], int] = {}  # compute, of which there is much, by stage and replica
        self.everyone: list[tuple[int, ...]] = []
        self.here: list[tuple[int, ...]] = []

    def number(self, rank: int, action: Compute | Collective) -> int:
        """The group in which `rank` does this."""
        if not isinstance(action, Compute):
            return self._number_of(participants(self._graph, rank, action))
        tp_group = (action.stage.unit, action.stage.index, action.mb.replica)
        number = self._tp_groups.get(tp_group)
        if number is None:
            number = self._tp_groups[tp_group] = self._number_of(participants(self._graph, rank, action))
        return number

    def _number_of(self, ranks: tuple[int, ...]) -> int:
        number = self._numbers.setdefault(ranks, len(self._numbers))
        if number == len(self.everyone):
            self.everyone.append(ranks)
            self.here.append(tuple(rank for rank in ranks if rank in self._actions))
        return number
