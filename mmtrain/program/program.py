"""`Program`: for each rank an ordered list of actions for one step."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from mmtrain.errors import ProgramError
from mmtrain.program.actions import Action, Backward, Fill, Forward, Partial, Recv, Send, Share
from mmtrain.program.graph import Microbatch, StageGraph
from mmtrain.program.links import Links, Message, Work, link
from mmtrain.program.symmetry import Symmetry, symmetry

A = TypeVar("A", bound=Action)


@dataclass(frozen=True)
class Program:
    """One step of a stage graph, stored for replica group 0; the other groups repeat it by symmetry.

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
        if rank not in self.symmetry.place:
            raise ProgramError(
                f"rank {rank} holds no stage; the program's ranks are {_spans(sorted(self.symmetry.place))}: "
                "start as many processes as the plan has ranks"
            )
        group, first = self.symmetry.place[rank]
        return tuple(self._translate(action, group) for action in self.actions[first])

    def links_of(self, group: int) -> Links:
        """Messages and collectives of a replica group with their ends tied together."""
        if group not in self._links:
            self._links[group] = self._translate_links(group) if group else link(self.graph, self.actions)
        return self._links[group]

    def _translate(self, action: A, group: int) -> A:
        """Return group 0's action as another replica group does it: other replicas, other peers."""
        if group == 0:
            return action
        match action:
            case Forward(stage, mb) | Backward(stage, mb):
                return type(action)(stage, self._shift(mb, group))
            case Partial(stage, mb, kind, lo, hi):
                return type(action)(stage, self._shift(mb, group), kind, lo, hi)
            case Fill(host, gap, partials):
                moved = tuple(self._translate(part, group) for part in partials)
                return type(action)(self._translate(host, group), gap, moved)
            case Share(edge, mb, payload):
                return type(action)(edge, self._shift(mb, group), payload)
            case Send(edge, src, dst, peer, payload) | Recv(edge, src, dst, peer, payload):
                there = self.symmetry.ranks[group][peer]
                return type(action)(edge, self._shift(src, group), self._shift(dst, group), there, payload)
        return action

    def _translate_links(self, group: int) -> Links:
        first, mirror = self.links_of(0), self.symmetry.ranks[group]
        messages = tuple(Message(mirror[m.sender], self._translate(m.send, group)) for m in first.messages)
        works = []
        for action, ranks, everyone in first.works:
            there = tuple(mirror[rank] for rank in ranks)
            works.append(Work(self._translate(action, group), there, everyone if len(everyone) > len(ranks) else there))
        return Links(messages, tuple(works), {mirror[rank]: steps for rank, steps in first.steps.items()})

    @cached_property
    def _links(self) -> dict[int, Links]:
        return {}

    def _shift(self, mb: Microbatch, group: int) -> Microbatch:
        per_group = self.graph.mesh(mb.unit).dp // self.graph.num_groups
        return Microbatch(mb.unit, mb.replica + group * per_group, mb.index)


def _spans(ranks: list[int]) -> str:
    """Print ascending ranks as `0-3, 6`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in spans)
