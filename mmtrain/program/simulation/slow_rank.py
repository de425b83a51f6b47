"""The times of a step in which one rank computes more slowly than planned."""

from collections.abc import Hashable
from dataclasses import dataclass

from mmtrain.program.ir.actions import Collective, Compute, Partial, Send
from mmtrain.program.ir.graph import Microbatch, StageId
from mmtrain.program.simulation.timing import ModelTiming, TransferCost


@dataclass(frozen=True)
class SlowRankTiming:
    """A `Timing` in which everything that `rank` computes takes `factor` times as long.

    Whoever computes together with the rank waits for it: its TP group, and all replicas of a unit that is sharded.
    """

    timing: ModelTiming
    rank: int
    factor: float

    def compute(self, action: Compute) -> float:
        """See `Timing`."""
        graph = self.timing.graph
        mesh = graph.mesh(action.mb.unit)
        is_sharded = mesh.shard is not None
        together = mesh.ranks if is_sharded else graph.tp_group(action.stage, action.mb.replica)
        return self.timing.compute(action) * (self.factor if self.rank in together else 1.0)

    def left_under_way(self, action: Partial) -> float:
        """See `Timing`."""
        return self.timing.left_under_way(action)

    def message(self, sender: int, action: Send) -> TransferCost:
        """See `Timing`."""
        return self.timing.message(sender, action)

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        """See `Timing`."""
        return self.timing.collective(rank, action, group)

    def link_class(self, ranks: tuple[int, ...]) -> Hashable:
        """See `Timing`."""
        return self.timing.link_class(ranks)

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        """See `Timing`."""
        return self.timing.activation_bytes(stage, mb)
