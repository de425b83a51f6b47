"""Times for simulated programs."""

from mmtrain.program.ir.actions import Collective, Compute, Forward, Partial, Send
from mmtrain.program.ir.graph import Microbatch, StageId
from mmtrain.program.simulation.timing import TransferCost


class Seconds:
    """Fixed seconds for a forward of each unit, twice that for a backward, none for messages and collectives."""

    def __init__(self, **forward: float) -> None:
        self.forward = forward

    def compute(self, action: Compute) -> float:
        return self.forward[action.stage.unit] * (1 if isinstance(action, Forward) else 2)

    def left_under_way(self, action: Partial) -> float:
        return 0.0

    def tp_wait(self, action: Compute) -> float:
        return 0.0

    def message(self, sender: int, action: Send) -> TransferCost:
        return TransferCost(0.0, 1)

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        return TransferCost(0.0, 0)

    def link_class(self, ranks: tuple[int, ...]) -> int:
        return len(ranks)

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        return 1
