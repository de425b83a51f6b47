"""`Program`: for each rank an ordered list of actions for one step."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, cast

from mmtrain.errors import ProgramError
from mmtrain.program.ir.actions import Action, Backward, Fill, Forward, Partial, Recv, Send, Share
from mmtrain.program.ir.graph import StageGraph
from mmtrain.program.ir.matching import MatchedActions, match_actions
from mmtrain.program.ir.symmetry import Symmetry, symmetry

A = TypeVar("A", bound=Action)
T = TypeVar("T")


@dataclass(frozen=True)
class Program:
    """The actions of one step of a stage graph, stored for replica group 0; the other groups mirror it.

    `actions` maps the global ranks of group 0 to what they do, in order.
    """

    graph: StageGraph
    actions: Mapping[int, tuple[Action, ...]]

    @cached_property
    def symmetry(self) -> Symmetry:
        """How ranks mirror those of group 0."""
        return symmetry(self.graph)

    def for_rank(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of any global rank.

        Raises:
            ProgramError: the rank holds no stage of the graph.
        """
        if rank not in self.symmetry.location:
            raise ProgramError(
                f"rank {rank} holds no stage; the program's ranks are {ranges_text(sorted(self.symmetry.location))}: "
                "start as many processes as the plan has ranks"
            )
        group, first = self.symmetry.location[rank]
        return tuple(self.translate(action, group) for action in self.actions[first])

    @cached_property
    def matching(self) -> MatchedActions:
        """Messages and collectives of group 0 with their ends matched."""
        return match_actions(self.graph, self.actions)

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned for this key before, or now; it is kept as long as the program.

        key: the same key stands for results of one type.
        """
        if key not in self._remembered:
            self._remembered[key] = make()
        return cast(T, self._remembered[key])

    def same_actions(self, rank: int, other: int) -> bool:
        """Return whether two ranks of group 0 do the same in the same order, each with its own peers."""
        actions = self.actions
        return self.remembered(
            ("same actions", rank, other), lambda: _same_actions(actions.get(rank), actions.get(other))
        )

    def translate(self, action: A, group: int) -> A:
        """Return group 0's action as another replica group does it: other replicas, other peers."""
        if group == 0:
            return action
        match action:
            case Forward(stage, mb) | Backward(stage, mb):
                return type(action)(stage, self.graph.shift(mb, group))
            case Partial(stage, mb, kind, lo, hi):
                return type(action)(stage, self.graph.shift(mb, group), kind, lo, hi)
            case Fill(host, gap, partials):
                translated = tuple(self.translate(part, group) for part in partials)
                return type(action)(self.translate(host, group), gap, translated)
            case Share(edge, mb, payload):
                return type(action)(edge, self.graph.shift(mb, group), payload)
            case Send(edge, src, dst, peer, payload) | Recv(edge, src, dst, peer, payload):
                own_peer = self.symmetry.mirrors[group][peer]
                return type(action)(edge, self.graph.shift(src, group), self.graph.shift(dst, group), own_peer, payload)
        return action

    @cached_property
    def _remembered(self) -> dict[Hashable, object]:
        return {}


def ranges_text(numbers: Sequence[int]) -> str:
    """Write numbers with ascending runs shortened to ranges.

    >>> ranges_text((0, 1, 2, 5))
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _same_actions(actions: Sequence[Action] | None, others: Sequence[Action] | None) -> bool:
    """Return whether two ranks do the same in the same order, each with its own peers; False if one is unknown."""
    if actions is None or others is None or len(actions) != len(others):
        return False
    return all(a is b or a == b or _without_peer(a) == _without_peer(b) for a, b in zip(actions, others, strict=True))


def _without_peer(action: Action) -> tuple[object, ...]:
    if not isinstance(action, Send | Recv):
        return (action,)
    return type(action), action.edge, action.src, action.dst, action.payload
