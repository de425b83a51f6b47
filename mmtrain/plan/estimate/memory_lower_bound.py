"""The least bytes that a rank of a unit holds on a mesh: arithmetic that excludes meshes before they are searched."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mmtrain.costs import TokenLoad
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
from mmtrain.program.ir.graph import LLM


class UnitMemoryBound(Protocol):
    """Bytes that the fullest rank of a unit of this mesh holds at least."""

    def __call__(self, unit: str, mesh: MeshSize, num_microbatches: int | None, in_flight_behind: int = 0) -> float:
        """Return the bytes.

        num_microbatches: of a replica; None where they are not known.
        in_flight_behind: the least number of its microbatches that are in flight in the pipelines that read from it.
        """


@dataclass(frozen=True)
class _KindBytes:
    """Bytes of a unit's kinds of layers at one tensor- and data-parallel size, (K,) each, the margin included."""

    count: FloatArray  # layers of the kind
    state: FloatArray
    kept: FloatArray  # of one microbatch, recomputed wherever the recipe lets it be
    layer_peak: FloatArray  # state, one microbatch and the layer's working memory: no rank with such a layer has less


def unit_memory_bound(layer_costs: LayerCosts) -> UnitMemoryBound:
    """Return the lower bound of what the fullest rank holds: state under the recipe's freezing, and activations.

    Some rank holds at least a weighted mean of what all hold, under any weights. Here a stage weighs less the more
    microbatches 1F1B has in flight there: one, one for each rank behind it, and those in flight in the pipelines that
    read from it. The LLM's largest microbatch is the same under all meshes. An encoder's holds at least its share of a
    batch.
    """
    unsplit: BatchSplit = tuple((unit.name, 1, layer_costs.batches.global_batch) for unit in layer_costs.shape.units)
    head = layer_costs.shape.unit(LLM).layers[-1]
    known_kinds: dict[tuple[str, int, int, int], _KindBytes] = {}
    known_bounds: dict[tuple[str, MeshSize, int, int], float] = {}

    def largest_load(unit: str, step_microbatches: int) -> TokenLoad:
        if unit == LLM:
            return layer_costs.largest_load(LLM, unsplit)
        loads = layer_costs.microbatch_loads(unit, unsplit)
        max_tokens = max(loads.total(batch).tokens for batch in range(len(layer_costs.batches.groups)))
        return TokenLoad(max_tokens // step_microbatches if step_microbatches else 0, 0, 0, 0)

    def compute(unit: str, mesh: MeshSize, num_microbatches: int, in_flight_behind: int) -> float:
        step_microbatches = 0 if unit == LLM else num_microbatches * mesh.dp
        key = (unit, mesh.tp, mesh.dp, step_microbatches)
        if key not in known_kinds:
            known_kinds[key] = _kind_bytes(layer_costs, unit, mesh, largest_load(unit, step_microbatches))
        in_flight = np.minimum(np.arange(mesh.pp, 0, -1) + in_flight_behind, max(num_microbatches, 1))
        mean = _weighted_mean(known_kinds[key], in_flight)
        if unit == LLM and layer_costs.shape.tied_embeddings:  # held once where both ends of the LLM share a rank
            mean -= (1 + MEMORY_MARGIN) * sum(matrix_state(head, mesh.tp, mesh.dp, layer_costs.state_bytes))
        return max(mean, float(known_kinds[key].layer_peak.max()))

    def bound(unit: str, mesh: MeshSize, num_microbatches: int | None, in_flight_behind: int = 0) -> float:
        key = (unit, mesh, num_microbatches or 0, in_flight_behind)
        if key not in known_bounds:
            known_bounds[key] = compute(*key)
        return known_bounds[key]

    return bound


def describe_excluded(
    placement: Placement, units: str, bounds_bytes: Sequence[float], memory_bytes: float
) -> Alternative | None:
    """Return a line of the ranking on meshes that were excluded by this bound: how many, and the least that they need.

    units: whose meshes they are. bounds_bytes: the bounds of all meshes that are possible. None where all may fit.
    """
    over = [nbytes for nbytes in bounds_bytes if nbytes > memory_bytes]
    if not over:
        return None
    return Alternative(
        summary=f"{placement}: {len(over)} of {len(bounds_bytes)} mesh sizes of {units}",
        placement=placement,
        step_time_s=None,
        peak_memory_gib=min(over) / GIB,
        reason=f"too large: a rank needs at least {min(over) / GIB:.3g} of {memory_bytes / GIB:.3g} GiB",
    )


def _weighted_mean(kinds: _KindBytes, in_flight: FloatArray) -> float:
    """Return the weighted mean bytes of a rank; a layer counts as on the rank where it counts least."""
    weights = 1 / np.maximum(kinds.count @ kinds.state + in_flight * (kinds.count @ kinds.kept), 1.0)
    fewest_bytes = np.min(weights[:, None] * (kinds.state + in_flight[:, None] * kinds.kept), axis=0)
    return float(kinds.count @ fewest_bytes / weights.sum())


def _kind_bytes(layer_costs: LayerCosts, unit: str, mesh: MeshSize, load: TokenLoad) -> _KindBytes:
    costs, precision = layer_costs.costs, layer_costs.precision
    tp, sp, mode = mesh.tp, layer_costs.has_sp(unit, mesh.tp), layer_costs.recompute[unit]
    kinds = Counter(zip(layer_costs.shape.unit(unit).layers, layer_costs.input_grad[unit], strict=True))
    rows = []
    for (layer, input_grad), count in kinds.items():
        state = sum(layer_state(layer, tp, mesh.dp, layer_costs.state_bytes))
        kept = min(
            layer_activation_bytes(RankLayer(layer, tp, input_grad, recompute, sp), load, costs, precision)
            for recompute in (False, mode != "none")
        )
        working = layer_working_bytes(RankLayer(layer, tp, input_grad, mode == "all", sp), load, costs, precision)
        rows.append((count, *((1 + MEMORY_MARGIN) * nbytes for nbytes in (state, kept, state + kept + working))))
    return _KindBytes(*np.array(rows, dtype=np.float64).T)
