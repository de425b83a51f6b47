"""Bubble accounting: why a rank's compute stream is idle, in simulated and measured steps alike."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from mmtrain.program.ir.actions import Collective, Compute, Dispatch, GatherParams, Partial, Pass, Share, Step
from mmtrain.program.ir.segments import direction, pass_of
from mmtrain.program.trace.timeline import BUBBLE_KINDS, BubbleKind

Interval = tuple[float, float]  # start and end in seconds since the start of the step


@dataclass(slots=True)
class BubbleAccount:
    """The idle time of one rank by kind, added up from its compute actions and collectives in their order.

    A wait for data is `pp_warmup` before the rank's first compute, `pp_cooldown` after its last forward, and
    `pp_other` between them. A wait for other stages before shared weights are reduced and before the step is
    `pp_cooldown` too. Collectives that hold the rank are bubbles: `tp` (sharing in a TP group), `dispatch`,
    `dp_gather`, or `dp_reduce` (shared weights, the norm). Reductions of gradients hold it in `Step` only: that wait is
    `dp_reduce` while a reduction runs, and `imbalance` while one waits for other replicas. The gathering of a chunk's
    parameters holds it in the chunk's first forward: that wait is `dp_gather` until they are there. A wait before a
    later part of a forward or backward, for the collective that the part before left under way, is `tp`. What a pass
    waits for its own collectives of tensor parallelism is `tp_layers`: a simulation knows it, a recorded step counts
    it as compute.
    """

    forwards_left: int
    clock: float = 0.0  # end of the last action, in seconds since the start of the step
    has_computed: bool = False
    started: set[Pass] = field(default_factory=set)  # passes that run in parts
    bubbles: dict[BubbleKind, float] = field(default_factory=lambda: dict.fromkeys(BUBBLE_KINDS, 0.0))

    @classmethod
    def for_actions(cls, actions: Iterable[Compute | Collective]) -> "BubbleAccount":
        """Return an empty account for a rank that runs these actions in a step."""
        return cls(sum(is_forward(action) for action in actions))

    def add(
        self,
        action: Compute | Collective,
        start_s: float,
        duration_s: float,
        awaited: Iterable[Interval] = (),
        tp_wait_s: float = 0.0,
    ) -> None:
        """Add the rank's next action, and the wait before it.

        awaited: when the asynchronous collectives ran whose end the action waits for. tp_wait_s: of the duration, how
        long the rank waits for collectives inside layers.
        """
        self.wait_for(action, awaited, start_s)
        waiting, own = self.next_kinds(action)
        self.bubbles[waiting] += start_s - self.clock
        self.bubbles[own] += tp_wait_s if isinstance(action, Compute) else duration_s
        self.clock = start_s + duration_s

    def next_kinds(self, action: Compute | Collective) -> tuple[BubbleKind, BubbleKind]:
        """Go on to the rank's next action; return the kinds of the wait before it and of what it waits for itself."""
        waiting = self._waiting_kind(action)
        if not isinstance(action, Compute):
            return waiting, _own_kind(action)
        self.has_computed = True
        if isinstance(action, Partial):
            self.started.add(pass_of(action))
        self.forwards_left -= is_forward(action)
        return waiting, "tp_layers"

    def close(self, step_time_s: float) -> None:
        """End the step: since its last action the rank has waited for other ranks to end theirs."""
        self.bubbles["imbalance"] += step_time_s - self.clock

    def wait_for(self, action: Compute | Collective, awaited: Iterable[Interval], until_s: float) -> None:
        """Advance the clock by the wait for asynchronous collectives whose end the rank's next action waits for."""
        if isinstance(action, Step):
            self._add_wait_for_reductions(awaited, until_s)
        else:
            self._add_wait_for_gathers(awaited, until_s)

    def _add_wait_for_gathers(self, gathers: Iterable[Interval], until_s: float) -> None:
        """Advance the clock to the end of the last gathering of parameters."""
        for _, gather_end in gathers:
            end = min(gather_end, until_s)
            if end > self.clock:
                self.bubbles["dp_gather"] += end - self.clock
                self.clock = end

    def _add_wait_for_reductions(self, reductions: Iterable[Interval], until_s: float) -> None:
        """Advance the clock to the end of the last reduction."""
        for reduction_start, reduction_end in sorted(reductions):
            start, end = (min(max(time_s, self.clock), until_s) for time_s in (reduction_start, reduction_end))
            if end > self.clock:
                self.bubbles["imbalance"] += start - self.clock
                self.bubbles["dp_reduce"] += end - start
                self.clock = end

    def _waiting_kind(self, action: Compute | Collective) -> BubbleKind:
        """Return the kind of bubble of a wait before `action`."""
        if isinstance(action, Compute | Share | Dispatch):
            if isinstance(action, Partial) and pass_of(action) in self.started:
                return "tp"
            if not self.has_computed:
                return "pp_warmup"
            return "pp_other" if self.forwards_left else "pp_cooldown"
        return "imbalance" if isinstance(action, GatherParams) else "pp_cooldown"


def is_forward(action: Compute | Collective) -> bool:
    """Return whether the action is a forward or a part of one."""
    return isinstance(action, Compute) and direction(action) == "F"


def _own_kind(action: Collective) -> BubbleKind:
    """Return the kind of bubble of a collective itself: no rank computes during it."""
    if isinstance(action, Share):
        return "tp"
    if isinstance(action, Dispatch):
        return "dispatch"
    return "dp_gather" if isinstance(action, GatherParams) else "dp_reduce"
