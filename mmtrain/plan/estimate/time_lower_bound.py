"""What a unit's work takes at least on so many ranks: arithmetic that orders ten thousand sizes in a moment."""

import math
from collections.abc import Mapping

from mmtrain.costs import Hardware
from mmtrain.plan.artifact.layout import MeshSize
from mmtrain.plan.estimate.layer_costs import RECOMPUTE, BatchSplit, LayerCosts
from mmtrain.plan.estimate.memory_lower_bound import unit_memory_bound
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.plan.search.mesh_enumeration import UnitTimeBound
from mmtrain.program.ir.graph import LLM

INTERLEAVED_FILL_SHARE = (
    0.9  # of the wait for the first microbatch in interleaved pipelines, that uneven chunks may leave
)
MERGED_ENCODER_WORK_SHARE = (
    0.9  # of an encoder's work, that larger microbatches may leave: fixed costs of kernels are shared
)


def unit_time_bound(layer_costs: LayerCosts, choices: Mapping[str, UnitChoices], machine: Hardware) -> UnitTimeBound:
    """Make the bound of one unit's part in the step; infinite where what it must hold is too much for memory.

    A pipeline of P ranks and M microbatches fills and drains: part p has done its work no sooner than C if it takes
    (C - way to p) / M for each, which adds up to all work W of one microbatch for C = W / (1 - (1 - 1/M)^P). With
    several chunks on a rank, even ones, the last rank waits for a microbatch to pass one chunk of all others.
    """
    batch = choices[LLM].batch
    alone: BatchSplit = tuple((unit.name, 1, batch) for unit in layer_costs.shape.units)
    work: dict[tuple[str, int], float] = {}
    room = unit_memory_bound(layer_costs)

    def seconds(unit: str, tp: int) -> float:
        if (unit, tp) not in work:
            mean = layer_costs.unit_times(unit, tp, alone).mean
            used = mean.sum() if layer_costs.recompute[unit] == "all" else mean[:, :RECOMPUTE].sum()
            work[unit, tp] = float(used) * (1.0 if unit == LLM else MERGED_ENCODER_WORK_SHARE)
        return work[unit, tp]

    def bound(unit: str, size: MeshSize, count: int, behind: int = 0) -> float:
        if room(unit, size, count, behind) > machine.memory_bytes:
            return math.inf
        total = seconds(unit, size.tp) * batch / size.dp  # of one replica
        if count < 0:
            return total / size.pp
        if size.vpp > 1:
            return total / size.pp * (1 + INTERLEAVED_FILL_SHARE * (size.pp - 1) / size.vpp / count)
        return total / count / (1 - (1 - 1 / count) ** size.pp)

    return bound
