"""What a rank of a unit of some size must hold at least: arithmetic that rules sizes out before they are looked at."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mmtrain.costs import Hardware, TokenLoad
from mmtrain.costs.hardware import GIB
from mmtrain.costs.rank_memory import (
    MEMORY_MARGIN,
    RankLayer,
    layer_activation_bytes,
    layer_state,
    layer_working_bytes,
    matrix_state,
)
from mmtrain.plan.artifact.layout import MeshSize
from mmtrain.plan.artifact.plan import Alternative, Placement
from mmtrain.plan.estimate.layer_costs import BatchSplit, FloatArray, LayerCosts
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.plan.search.mesh_enumeration import MeshAssignment, unit_mesh_sizes
from mmtrain.program.ir.graph import LLM


class UnitMemoryBound(Protocol):
    """Bytes that the fullest rank of a unit of this size holds at least."""

    def __call__(self, unit: str, size: MeshSize, count: int, behind: int = 0) -> float:
        """count: microbatches of a replica, 0 if unknown; behind: of these, those under way in what reads from it."""


@dataclass(frozen=True)
class _Layers:
    """Kinds of a unit's layers at one tensor-parallel and data-parallel size, (K,) each, in bytes with the margin."""

    count: FloatArray
    state: FloatArray
    kept: FloatArray  # of one microbatch, recomputed wherever that may be
    alone: FloatArray  # state, one microbatch and what the layer needs for a while: a rank that holds it holds that


def unit_memory_bound(layer_costs: LayerCosts) -> UnitMemoryBound:
    """Make the bound of what the fullest rank holds: state under the recipe's freezing, and activations.

    Some rank holds at least a weighted mean of what all hold, under any weights; here they are such that stages weigh
    less the more microbatches 1F1B has under way there: one, one for each rank behind, and those under way in the
    pipelines that read from it. The LLM's largest microbatch is the same under all sizes. An encoder's holds at least
    its share of a batch.
    """
    alone: BatchSplit = tuple((unit.name, 1, layer_costs.batches.global_batch) for unit in layer_costs.shape.units)
    head = layer_costs.shape.unit(LLM).layers[-1]
    known: dict[tuple[str, int, int, int], _Layers] = {}
    bounds: dict[tuple[str, MeshSize, int, int], float] = {}

    def load(unit: str, num_microbatches: int) -> TokenLoad:
        if unit == LLM:
            return layer_costs.largest_load(LLM, alone)
        most = max(
            layer_costs.microbatch_loads(unit, alone).total(batch).tokens
            for batch in range(len(layer_costs.batches.groups))
        )
        return TokenLoad(most // num_microbatches if num_microbatches else 0, 0, 0, 0)

    def bound(unit: str, size: MeshSize, count: int, behind: int) -> float:
        num_microbatches = 0 if unit == LLM else count * size.dp
        key = (unit, size.tp, size.dp, num_microbatches)
        if key not in known:
            known[key] = _layers(layer_costs, unit, size.tp, size.dp, load(unit, num_microbatches))
        mean = _mean(known[key], np.minimum(np.arange(size.pp, 0, -1) + behind, max(count, 1)))
        if unit == LLM and layer_costs.shape.tied_embeddings:  # held once where both ends of the LLM share a rank
            mean -= (1 + MEMORY_MARGIN) * sum(matrix_state(head, size.tp, size.dp, layer_costs.precision))
        return max(mean, float(known[key].alone.max()))

    def room(unit: str, size: MeshSize, count: int, behind: int = 0) -> float:
        key = (unit, size, max(count, 0), behind)
        if key not in bounds:
            bounds[key] = bound(*key)
        return bounds[key]

    return room


def rejected_by_memory_bound(
    choices: Mapping[str, UnitChoices],
    world_size: int,
    assignments: Sequence[MeshAssignment],
    room: UnitMemoryBound,
    machine: Hardware,
) -> list[Alternative]:
    """What to say of sizes that are left out as they cannot fit: how many, and what they need at least.

    assignments: those that are searched, which say what placements there are.
    """
    limit, placements = machine.memory_bytes, {assignment.placement for assignment in assignments}
    found = []
    for name in choices if "disaggregated" in placements else ():
        needs = [room(name, size, 0) for size in unit_mesh_sizes(choices, name, world_size)]
        found.append(_left_out("disaggregated", name, needs, limit))
    if "unified" in placements:
        together = [s for s in assignments if s.placement == "unified"]
        needs = [max(room(name, size, s.paces[name]) for name, size in s.meshes.items()) for s in together]
        found.append(_left_out("unified", " and ".join(choices), needs, limit))
    return [loser for loser in found if loser is not None]


def _left_out(placement: Placement, units: str, needs: Sequence[float], limit: float) -> Alternative | None:
    over = [need for need in needs if need > limit]
    if not over:
        return None
    return Alternative(
        summary=f"{placement}: {len(over)} of {len(needs)} sizes of {units}",
        placement=placement,
        step_time_s=None,
        peak_memory_gib=min(over) / GIB,
        reason=f"cannot fit: they need at least {min(over) / GIB:.3g} of {limit / GIB:.3g} GiB",
    )


def _mean(layers: _Layers, alive: FloatArray) -> float:
    """Bytes per rank, weighted: wherever a layer lies, it counts no less than on the rank where it counts least."""
    weights = 1 / np.maximum(layers.count @ layers.state + alive * (layers.count @ layers.kept), 1.0)
    least = np.min(weights[:, None] * (layers.state + alive[:, None] * layers.kept), axis=0)
    return float(layers.count @ least / weights.sum())


def _layers(layer_costs: LayerCosts, unit: str, tp: int, dp: int, load: TokenLoad) -> _Layers:
    costs, precision, sp = layer_costs.costs, layer_costs.precision, layer_costs.has_sp(unit, tp)
    mode, found = layer_costs.recompute[unit], []
    kinds = Counter(zip(layer_costs.shape.unit(unit).layers, layer_costs.input_grad[unit], strict=True))
    for (layer, needed), count in kinds.items():
        state = sum(layer_state(layer, tp, dp, precision))
        kept = min(
            layer_activation_bytes(RankLayer(layer, tp, needed, again, sp), load, costs, precision)
            for again in (False, mode != "none")
        )
        working = layer_working_bytes(RankLayer(layer, tp, needed, mode == "all", sp), load, costs, precision)
        found.append((count, *((1 + MEMORY_MARGIN) * nbytes for nbytes in (state, kept, state + kept + working))))
    return _Layers(*np.array(found, dtype=np.float64).T)
