"""The times of a plan's step, stretched for replica group 0 alone on one machine."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from mmtrain.program import Compute, Microbatch, ModelTiming, Partial, Send, StageId, TransferCost
from mmtrain.program.ir.actions import Collective
from mmtrain.program.ir.data_dependencies import participants
from tests.rehearsal.first_group import FirstGroup


@dataclass(frozen=True)
class StretchedTiming:
    """A `Timing` for replica group 0 of a plan, whose messages and collectives cost what they cost in the whole plan.

    Every time is `stretch` times as long as planned, so that what this machine needs for an action hardly counts.
    """

    timing: ModelTiming  # of the whole plan
    group: FirstGroup
    stretch: float

    def compute(self, action: Compute) -> float:
        """See `Timing`."""
        return self.timing.compute(action) * self.stretch

    def left_under_way(self, action: Partial) -> float:
        """See `Timing`."""
        return self.timing.left_under_way(action) * self.stretch

    def tp_wait(self, action: Compute) -> float:
        """Return 0: records of a step count it as compute."""
        return 0.0

    def message(self, sender: int, action: Send) -> TransferCost:
        """See `Timing`. Posting costs what it costs this machine."""
        sent = replace(action, peer=self.group.ranks[action.peer])
        return self._stretched(self.timing.message(self.group.ranks[sender], sent))

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        """See `Timing`; data-parallel groups have their size in the whole plan."""
        plan_rank = self.group.ranks[rank]
        members = participants(self.timing.graph, plan_rank, action)
        return self._stretched(self.timing.collective(plan_rank, action, members))

    def link_class(self, ranks: tuple[int, ...]) -> Hashable:
        """See `Timing`."""
        return self.timing.link_class(tuple(self.group.ranks[rank] for rank in ranks))

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        """See `Timing`."""
        return self.timing.activation_bytes(stage, mb)

    def _stretched(self, cost: TransferCost) -> TransferCost:
        return TransferCost(cost.seconds * self.stretch, cost.nbytes)
