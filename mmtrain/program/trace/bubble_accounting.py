"""The bubble account: what a rank's compute stream was idle for, simulated or measured."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from mmtrain.program.ir.actions import Collective, Compute, GatherParams, Partial, Pass, ReduceGrads, Share
from mmtrain.program.ir.segments import direction, pass_of
from mmtrain.program.trace.timeline import BUBBLE_KINDS, BubbleKind


@dataclass(slots=True)
class BubbleAccount:
    """Takes one rank's compute and collectives as they come, one after another, and books the time between them.

    A wait for data before the rank's first compute is `pp_warmup`, after its last forward `pp_cooldown`, between them
    `pp_other`; `pp_cooldown` also counts the wait for other stages before shared weights and the step, `imbalance`
    that for other replicas before a reduction. Collectives themselves count as `tp` (sharing in a TP group),
    `dp_gather` or `dp_reduce` (gradients, shared weights, the norm). Tensor parallelism inside compute is compute; a
    wait before a later part of a forward or backward, for what the part before has left under way, is `tp`.
    """

    forwards_left: int
    clock: float = 0.0  # end of the work done so far
    computed: bool = False
    begun: set[Pass] = field(default_factory=set)  # of what runs in parts
    bubbles: dict[BubbleKind, float] = field(default_factory=lambda: dict.fromkeys(BUBBLE_KINDS, 0.0))

    @classmethod
    def for_actions(cls, todo: Iterable[Compute | Collective]) -> "BubbleAccount":
        """An empty account for a rank that has this to do."""
        return cls(sum(_is_forward(action) for action in todo))

    def add(self, action: Compute | Collective, start_s: float, duration_s: float) -> None:
        """Take what the rank does next."""
        self.bubbles[self._waiting_kind(action)] += start_s - self.clock
        if isinstance(action, Compute):
            self.computed = True
            if isinstance(action, Partial):
                self.begun.add(pass_of(action))
            self.forwards_left -= _is_forward(action)
        else:
            self.bubbles[_own_kind(action)] += duration_s
        self.clock = start_s + duration_s

    def close(self, step_time_s: float) -> None:
        """The step ends; until then the rank had nothing left to do but to wait for the last parameters."""
        self.bubbles["dp_gather"] += step_time_s - self.clock

    def _waiting_kind(self, action: Compute | Collective) -> BubbleKind:
        """The bubble that a wait before `action` is."""
        if isinstance(action, Compute | Share):
            if isinstance(action, Partial) and pass_of(action) in self.begun:
                return "tp"
            if not self.computed:
                return "pp_warmup"
            return "pp_other" if self.forwards_left else "pp_cooldown"
        return "imbalance" if isinstance(action, ReduceGrads | GatherParams) else "pp_cooldown"


def _is_forward(action: Compute | Collective) -> bool:
    return isinstance(action, Compute) and direction(action) == "F"


def _own_kind(action: Collective) -> BubbleKind:
    """The bubble that a collective itself is: no rank computes during it."""
    if isinstance(action, Share):
        return "tp"
    return "dp_gather" if isinstance(action, GatherParams) else "dp_reduce"
