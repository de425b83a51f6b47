"""`Program`: for each rank an ordered list of actions for one step."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from mmtrain.errors import ProgramError
from mmtrain.program.ir.actions import Action, Backward, Fill, Forward, Partial, Recv, Send, Share
from mmtrain.program.ir.graph import Microbatch, StageGraph
from mmtrain.program.ir.symmetry import Symmetry, symmetry
from mmtrain.program.simulation.rank_equivalence import same_actions
from mmtrain.program.simulation.sim_graph import SimGraph
from mmtrain.program.verify.matching import MatchedActions, match_actions

A = TypeVar("A", bound=Action)


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
                f"rank {rank} holds no stage; the program's ranks are {_spans(sorted(self.symmetry.location))}: "
                "start as many processes as the plan has ranks"
            )
        group, first = self.symmetry.location[rank]
        return tuple(self.translate(action, group) for action in self.actions[first])

    @cached_property
    def matching(self) -> MatchedActions:
        """Messages and collectives of group 0 with their ends matched."""
        return match_actions(self.graph, self.actions)

    @cached_property
    def sim_graphs(self) -> dict[tuple[int, tuple[tuple[int, tuple[int, ...]], ...]], SimGraph]:
        """Cache of `build_sim_graph`, by the number of replica groups and the equivalent ranks."""
        return {}

    def same_actions(self, rank: int, other: int) -> bool:
        """Return whether two ranks of group 0 do the same in the same order, each with its own peers."""
        if (rank, other) not in self._same_actions:
            self._same_actions[rank, other] = same_actions(self.actions.get(rank), self.actions.get(other))
        return self._same_actions[rank, other]

    def translate(self, action: A, group: int) -> A:
        """Return group 0's action as another replica group does it: other replicas, other peers."""
        if group == 0:
            return action
        match action:
            case Forward(stage, mb) | Backward(stage, mb):
                return type(action)(stage, self.shift(mb, group))
            case Partial(stage, mb, kind, lo, hi):
                return type(action)(stage, self.shift(mb, group), kind, lo, hi)
            case Fill(host, gap, partials):
                translated = tuple(self.translate(part, group) for part in partials)
                return type(action)(self.translate(host, group), gap, translated)
            case Share(edge, mb, payload):
                return type(action)(edge, self.shift(mb, group), payload)
            case Send(edge, src, dst, peer, payload) | Recv(edge, src, dst, peer, payload):
                own_peer = self.symmetry.mirrors[group][peer]
                return type(action)(edge, self.shift(src, group), self.shift(dst, group), own_peer, payload)
        return action

    @cached_property
    def _same_actions(self) -> dict[tuple[int, int], bool]:
        return {}

    def shift(self, mb: Microbatch, group: int) -> Microbatch:
        """Return group 0's microbatch as another replica group has it."""
        per_group = self.graph.mesh(mb.unit).num_replicas // self.graph.num_groups
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
