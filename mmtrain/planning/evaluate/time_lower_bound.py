"""The least seconds that a unit's work takes on a mesh: arithmetic that orders ten thousand meshes in a moment."""

import math
from dataclasses import replace

from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.evaluate.memory_lower_bound import UnitMemoryBound
from mmtrain.planning.layer_costs.layer_costs import RECOMPUTE, LayerCosts
from mmtrain.planning.space.batch_split import BatchSplit, UnitSplit, unit_split
from mmtrain.planning.space.budget import DEFAULT_BUDGET, BoundBudget
from mmtrain.planning.space.candidate import UnitTimeBound
from mmtrain.program.ir.graph import LLM


def unit_time_bound(
    layer_costs: LayerCosts,
    memory_bound: UnitMemoryBound,
    memory_bytes: float,
    budget: BoundBudget = DEFAULT_BUDGET.bounds,
) -> UnitTimeBound:
    """Return the lower bound of one unit's part in the step; infinite where it cannot fit into `memory_bytes`.

    A pipeline of P ranks and M microbatches fills and drains. Part p is done no sooner than C if it takes
    (C - way to p) / M for each microbatch, which adds up to all work W of one microbatch for
    C = W / (1 - (1 - 1/M)^P). With several even model chunks per rank, the last rank waits for a microbatch to pass one
    chunk of each other rank.
    """
    global_batch = layer_costs.batches.global_batch
    unsplit: BatchSplit = tuple(UnitSplit(unit.name, 1, global_batch) for unit in layer_costs.shape.units)
    known_seconds: dict[tuple[str, int, int], float] = {}

    def microbatch_seconds(unit: str, mesh: MeshSize) -> float:
        """Seconds of all layers for one microbatch, on the slowest of the ranks that share it."""
        key = (unit, mesh.tp, mesh.cp)
        if key not in known_seconds:
            split = unsplit if mesh.cp == 1 else (unit_split(unit, replace(mesh, dp=1), global_batch),)
            mean = layer_costs.unit_times(unit, mesh.tp, split).mean
            counted = mean.sum() if layer_costs.recompute[unit] == "all" else mean[:, :RECOMPUTE].sum()
            share = 1.0 if unit == LLM else budget.merged_encoder_work_share
            known_seconds[key] = float(counted) * share
        return known_seconds[key]

    def bound(unit: str, mesh: MeshSize, num_microbatches: int | None, in_flight_behind: int = 0) -> float:
        if not memory_bound.may_fit(unit, mesh, num_microbatches, in_flight_behind, memory_bytes):
            return math.inf
        replica_s = microbatch_seconds(unit, mesh) * global_batch / mesh.dp
        if num_microbatches is None:
            return replica_s / mesh.pp
        if mesh.vpp > 1:
            fill = budget.interleaved_fill_share * (mesh.pp - 1) / mesh.vpp / num_microbatches
            return replica_s / mesh.pp * (1 + fill)
        return replica_s / num_microbatches / (1 - (1 - 1 / num_microbatches) ** mesh.pp)

    return bound
