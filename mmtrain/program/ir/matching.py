"""Match the ends of a program: which send meets which receive, and which ranks run a collective together.

The deadlock test walks the result, and the simulator makes its graph of it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmtrain.program.ir.actions import (
    Action,
    AsyncCollective,
    Backward,
    Collective,
    Compute,
    Forward,
    GatherParams,
    Partial,
    Recv,
    ReduceGrads,
    Send,
    Step,
)
from mmtrain.program.ir.channels import ChannelKey, channel_key
from mmtrain.program.ir.data_dependencies import Bucket, awaits_result, covered_buckets, participants, reader_of
from mmtrain.program.ir.graph import Microbatch, StageGraph, StageId
from mmtrain.program.ir.segments import expand_all, started_pass


class MatchedMessage(NamedTuple):
    """One message of the step."""

    sender: int
    send: Send
    channel: int  # number of its (edge, payload, sender, receiver): the messages of a channel have a communicator


class JointAction(NamedTuple):
    """What ranks do together: a forward or backward, a part of one, or a collective.

    It holds its ranks until it ends, unless it is an `AsyncCollective`.
    """

    action: Compute | Collective
    ranks: tuple[int, ...]  # of this replica group
    group: tuple[int, ...]  # of all replica groups; longer than `ranks` for data-parallel collectives and the step


class Post(NamedTuple):
    """A rank starts its end of a message, and goes on."""

    message: int  # index into `MatchedActions.messages`


class Launch(NamedTuple):
    """A rank starts its part in an asynchronous collective, and goes on."""

    joint_action: int  # index into `MatchedActions.joint_actions`


class Join(NamedTuple):
    """A rank takes part in a joint action, once these messages have arrived and these collectives have ended."""

    joint_action: int  # index into `MatchedActions.joint_actions`
    reads: tuple[int, ...]  # indices into `MatchedActions.messages`
    awaits: tuple[int, ...] = ()  # indices into `MatchedActions.joint_actions`, of what the rank has launched


@dataclass(frozen=True)
class MatchedActions:
    """What the ranks of one replica group do, in order, with messages and joint actions as shared objects."""

    messages: tuple[MatchedMessage, ...]
    joint_actions: tuple[JointAction, ...]
    sequences: Mapping[int, tuple[Post | Launch | Join, ...]]  # rank -> its atomic actions in order, one entry each


def match_actions(graph: StageGraph, actions: Mapping[int, Sequence[Action]]) -> MatchedActions:
    """Match sends with receives by what they carry, and the k-th collectives of a group's ranks with each other."""
    messages = _Messages()
    joint_numbers: dict[tuple[int, int], int] = {}  # (group, how many before it in the group) -> number of the action
    joint_actions: list[JointAction] = []
    sequences: dict[int, tuple[Post | Launch | Join, ...]] = {}
    groups = _Groups(graph, actions)
    for rank, actions_of_rank in actions.items():
        reads: dict[Action, list[int]] = {}  # reader -> messages it reads
        num_done: dict[int, int] = {}  # by group
        pending = _PendingCollectives(graph, covered_buckets(graph, rank))
        sequence: list[Post | Launch | Join] = []
        for action in expand_all(graph, actions_of_rank):
            if isinstance(action, Send):
                sequence.append(Post(messages.number(action, rank, action.peer)))
            elif isinstance(action, Recv):
                message = messages.number(action, action.peer, rank)
                reads.setdefault(reader_of(graph, action), []).append(message)
                sequence.append(Post(message))
            else:
                group = groups.number(rank, action)
                nth = num_done[group] = num_done.get(group, 0) + 1
                joint_action = joint_numbers.setdefault((group, nth), len(joint_numbers))
                if joint_action == len(joint_actions):
                    joint_actions.append(JointAction(action, groups.with_actions[group], groups.all_ranks[group]))
                if isinstance(action, ReduceGrads | GatherParams):
                    pending.launch(joint_action, action)
                    sequence.append(Launch(joint_action))
                    continue
                reader = started_pass(graph, action) if isinstance(action, Partial) else action
                awaits = pending.take_awaited(action)
                sequence.append(Join(joint_action, tuple(reads.pop(reader, ())) if reader else (), awaits))
        sequences[rank] = tuple(sequence)
    return MatchedActions(tuple(messages.matched), tuple(joint_actions), sequences)


class _PendingCollectives:
    """Asynchronous collectives that a rank has launched, and that nothing has waited for yet.

    Passes wait for the parameters of their own stage, and the step for reductions, so only these are looked at.
    """

    def __init__(self, graph: StageGraph, covered: Mapping[AsyncCollective, Bucket]) -> None:
        self._graph = graph
        self._covered = covered
        self._gathers: dict[StageId, dict[int, AsyncCollective]] = {}  # by stage, then by number of the joint action
        self._others: dict[int, AsyncCollective] = {}

    def launch(self, number: int, collective: AsyncCollective) -> None:
        """Add a collective, which is the joint action of this number."""
        bucket = self._covered.get(collective) if isinstance(collective, GatherParams) else None
        (self._others if bucket is None else self._gathers.setdefault(bucket.stage, {}))[number] = collective

    def take_awaited(self, action: Compute | Collective) -> tuple[int, ...]:
        """Remove the collectives whose end the rank's next action waits for; return their numbers."""
        if isinstance(action, Forward | Backward | Partial):
            pending = self._gathers.get(action.stage)
        else:
            pending = self._others if isinstance(action, Step) else None
        if not pending:
            return ()
        awaited = tuple(
            [n for n, collective in pending.items() if awaits_result(self._graph, action, collective, self._covered)]
        )
        for number in awaited:
            del pending[number]
        return awaited


class _Messages:
    """The messages of a step, numbered in the order in which an end of each is seen first."""

    def __init__(self) -> None:
        self.matched: list[MatchedMessage] = []
        self._numbers: dict[tuple[ChannelKey, Microbatch, Microbatch], int] = {}
        self._channels: dict[ChannelKey, int] = {}

    def number(self, end: Send | Recv, sender: int, receiver: int) -> int:
        """Return the number of the message of which `end` is one end."""
        channel = channel_key(end, sender, receiver)
        key = (channel, end.src, end.dst)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.matched)
            send = end if isinstance(end, Send) else Send(end.edge, end.src, end.dst, receiver, end.payload)
            in_channel = self._channels.setdefault(channel, len(self._channels))
            self.matched.append(MatchedMessage(sender, send, in_channel))
        return number


class _Groups:
    """Ranks that act together, numbered. `all_ranks` are of all replica groups, `with_actions` those with actions.

    Ranks that also reduce gradients together have another number there: asynchronous collectives do not hold them.
    """

    def __init__(self, graph: StageGraph, ranks: Collection[int]) -> None:
        self._graph = graph
        self._ranks = ranks
        self._numbers: dict[tuple[tuple[int, ...], bool], int] = {}
        self._tp_groups: dict[tuple[str, int, int], int] = {}  # most actions compute: cached by stage and replica
        self.all_ranks: list[tuple[int, ...]] = []
        self.with_actions: list[tuple[int, ...]] = []

    def number(self, rank: int, action: Compute | Collective) -> int:
        """Return the number of the group in which `rank` runs the action."""
        if not isinstance(action, Compute):
            return self._number_of(participants(self._graph, rank, action), isinstance(action, AsyncCollective))
        tp_group = (action.stage.unit, action.stage.index, action.mb.replica)
        number = self._tp_groups.get(tp_group)
        if number is None:
            number = self._tp_groups[tp_group] = self._number_of(participants(self._graph, rank, action), False)
        return number

    def _number_of(self, ranks: tuple[int, ...], is_async: bool) -> int:
        number = self._numbers.setdefault((ranks, is_async), len(self._numbers))
        if number == len(self.all_ranks):
            self.all_ranks.append(ranks)
            self.with_actions.append(tuple(rank for rank in ranks if rank in self._ranks))
        return number
