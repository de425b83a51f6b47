"""The least memory and the least time that a unit of some mesh needs: arithmetic, before layers are divided."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from mmtrain.costs import TokenLoad
from mmtrain.costs.hardware import GIB
from mmtrain.costs.layer_arithmetic import context_parallel_load
from mmtrain.costs.rank_memory import (
    MEMORY_MARGIN,
    RankLayer,
    layer_activation_bytes,
    layer_state,
    layer_working_bytes,
    matrix_state,
)
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.artifact.plan import Alternative, Placement
from mmtrain.planning.layer_costs.layer_costs import RECOMPUTE, FloatArray, LayerCosts
from mmtrain.planning.space.budget import DEFAULT_BUDGET, BoundBudget
from mmtrain.planning.space.candidate import UnitTimeBound
from mmtrain.planning.space.sample_batches import unit_split
from mmtrain.program.ir.graph import LLM


@dataclass(frozen=True)
class KindBytes:
    """Bytes of a unit's kinds of layers at one tensor- and data-parallel size, (K,) each, the margin included."""

    count: FloatArray  # layers of the kind
    state: FloatArray
    kept: FloatArray  # of one microbatch, recomputed wherever the recipe lets it be
    kept_without_recompute: FloatArray  # the same where no layer is recomputed that need not be
    layer_peak: FloatArray  # state, one microbatch and the layer's working memory: no rank with such a layer has less

    @cached_property
    def total_state(self) -> float:
        """Bytes of state of all layers."""
        return float(self.count @ self.state)

    @cached_property
    def total_kept(self) -> float:
        """Bytes that one microbatch leaves behind in all layers."""
        return float(self.count @ self.kept)

    @cached_property
    def total_kept_without_recompute(self) -> float:
        """The same without recomputation, as far as the recipe leaves it open."""
        return float(self.count @ self.kept_without_recompute)

    @cached_property
    def max_working(self) -> float:
        """Bytes that are alive only while the largest layer is computed."""
        return float((self.layer_peak - self.state - self.kept).max())

    @cached_property
    def max_layer_peak(self) -> float:
        """Bytes of a rank that holds nothing but the largest layer."""
        return float(self.layer_peak.max())


class UnitMemoryBound:
    """The lower bound of what the fullest rank holds: state under the recipe's freezing, and activations.

    The fullest rank holds at least the weighted mean over all ranks, whatever the weights. We give a stage less weight
    the more microbatches 1F1B keeps in flight there: one, one more for each rank behind it, and those in flight in the
    pipelines that read from it. The LLM's largest microbatch is the same under all meshes. An encoder's holds at least
    its share of a batch.
    """

    def __init__(self, layer_costs: LayerCosts) -> None:
        self._layer_costs = layer_costs
        self._kinds_of = KindBytesByMesh(layer_costs, partial(_largest_load, layer_costs))
        self._bounds: dict[tuple[str, MeshSize, int, int], float] = {}

    def __call__(self, unit: str, mesh: MeshSize, num_microbatches: int | None, in_flight_behind: int = 0) -> float:
        """Return the bytes that the fullest rank of a unit of this mesh holds at least.

        num_microbatches: of a replica; None where they are not known.
        in_flight_behind: the least number of its microbatches that are in flight in the pipelines that read from it.
        """
        key = (unit, mesh, num_microbatches or 0, in_flight_behind)
        if key not in self._bounds:
            self._bounds[key] = self._compute(*key)
        return self._bounds[key]

    def may_fit(
        self,
        unit: str,
        mesh: MeshSize,
        num_microbatches: int | None,
        in_flight_behind: int,
        memory_bytes: float,
    ) -> bool:
        """Return whether the bound is at most `memory_bytes`, without the bound where there is clearly room."""
        kinds = self._kinds_of(unit, mesh, num_microbatches or 0)
        # No weighted mean is above that of ranks which all hold as many microbatches as the first.
        most_in_flight = min(mesh.pp + in_flight_behind, max(num_microbatches or 0, 1))
        max_mean = (kinds.total_state + most_in_flight * kinds.total_kept) / mesh.pp
        if max(max_mean, kinds.max_layer_peak) <= memory_bytes:
            return True
        return self(unit, mesh, num_microbatches, in_flight_behind) <= memory_bytes

    def _compute(self, unit: str, mesh: MeshSize, num_microbatches: int, in_flight_behind: int) -> float:
        kinds = self._kinds_of(unit, mesh, num_microbatches)
        in_flight = np.minimum(np.arange(mesh.pp, 0, -1) + in_flight_behind, max(num_microbatches, 1))
        mean = _weighted_mean(kinds, in_flight)
        shape = self._layer_costs.shape
        if unit == LLM and shape.tied_embeddings:  # held once where both ends of the LLM share a rank
            head = shape.unit(LLM).layers[-1]
            mean -= (1 + MEMORY_MARGIN) * sum(
                matrix_state(head, mesh.tp, mesh.num_replicas, self._layer_costs.state_bytes)
            )
        return max(mean, kinds.max_layer_peak)


def _largest_load(layer_costs: LayerCosts, unit: str, step_microbatches: int) -> TokenLoad:
    """Return the least that the largest microbatch can be."""
    sampled = layer_costs.loads
    if unit == LLM:
        return sampled.largest(LLM, sampled.undivided)
    loads = sampled.of_unit(unit, sampled.undivided)
    max_tokens = max(loads.total(batch).tokens for batch in range(len(layer_costs.batches.groups)))
    return TokenLoad(max_tokens // step_microbatches if step_microbatches else 0, 0, 0, 0)


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


def _weighted_mean(kinds: KindBytes, in_flight: FloatArray) -> float:
    """Return the weighted mean bytes of a rank; a layer counts as on the rank where it counts least."""
    weights = 1 / np.maximum(kinds.total_state + in_flight * kinds.total_kept, 1.0)
    fewest_bytes = np.min(weights[:, None] * (kinds.state + in_flight[:, None] * kinds.kept), axis=0)
    return float(kinds.count @ fewest_bytes / weights.sum())


class KindBytesByMesh:
    """The bytes of a unit's kinds of layers on each mesh, computed once for meshes that share what they depend on."""

    def __init__(self, layer_costs: LayerCosts, largest_load: Callable[[str, int], TokenLoad]) -> None:
        """Compute under these costs.

        largest_load: returns the load of a unit's largest microbatch, for so many microbatches in a step of all its
            replicas; for 0 where the number is not known or does not matter, as for the LLM.
        """
        self._layer_costs = layer_costs
        self._largest_load = largest_load
        self._kinds: dict[tuple[str, int, int, int, int], KindBytes] = {}

    def __call__(self, unit: str, mesh: MeshSize, num_microbatches: int) -> KindBytes:
        """Return the bytes on this mesh, with `num_microbatches` of each replica; 0 where they are not known."""
        step_microbatches = 0 if unit == LLM else num_microbatches * mesh.dp
        key = (unit, mesh.tp, mesh.num_replicas, mesh.cp, step_microbatches)
        if key not in self._kinds:
            load = self._largest_load(unit, step_microbatches)
            if mesh.cp > 1:
                load = context_parallel_load(load, mesh.cp)
            self._kinds[key] = _kind_bytes(self._layer_costs, unit, mesh, load)
        return self._kinds[key]


def _kind_bytes(layer_costs: LayerCosts, unit: str, mesh: MeshSize, load: TokenLoad) -> KindBytes:
    """Return the bytes of a unit's kinds of layers, where a microbatch has this load."""
    costs, precision = layer_costs.costs, layer_costs.precision
    tp, sp, mode = mesh.tp, layer_costs.has_sp(unit, mesh.tp), layer_costs.recompute[unit]
    kinds = Counter(zip(layer_costs.shape.unit(unit).layers, layer_costs.input_grad[unit], strict=True))
    rows = []
    for (layer, input_grad), count in kinds.items():
        state = sum(layer_state(layer, tp, mesh.num_replicas, layer_costs.state_bytes))
        kept_by_mode = {
            recompute: layer_activation_bytes(RankLayer(layer, tp, input_grad, recompute, sp), load, costs, precision)
            for recompute in {False, mode != "none"}
        }
        kept, without = min(kept_by_mode.values()), kept_by_mode[mode == "all"]
        working = layer_working_bytes(RankLayer(layer, tp, input_grad, mode == "all", sp), load, costs, precision)
        rows.append(
            (count, *((1 + MEMORY_MARGIN) * nbytes for nbytes in (state, kept, without, state + kept + working)))
        )
    return KindBytes(*np.array(rows, dtype=np.float64).T)


class MeshTimes:
    """The seconds of one unit's part in the step, by arithmetic on the mean microbatch, whether or not it fits.

    A pipeline of P ranks and M microbatches fills and drains. Part p is done no sooner than C if it takes
    (C - way to p) / M for each microbatch, which adds up to all work W of one microbatch for
    C = W / (1 - (1 - 1/M)^P). With several even model chunks per rank, the last rank waits for a microbatch to pass one
    chunk of each other rank.
    """

    def __init__(self, layer_costs: LayerCosts, budget: BoundBudget = DEFAULT_BUDGET.bounds) -> None:
        self._layer_costs = layer_costs
        self._budget = budget
        self._known_seconds: dict[tuple[str, int, int, int], float] = {}

    def seconds(self, unit: str, mesh: MeshSize, num_microbatches: int | None) -> float:
        """Return the least seconds, however layers are divided.

        num_microbatches: of a replica; None where they are not known, or do not decide how the pipeline fills.
        """
        if num_microbatches is None:
            return self._replica_seconds(unit, mesh, None) / mesh.pp
        replica_s = self._replica_seconds(unit, mesh, num_microbatches)
        if mesh.vpp > 1:
            fill = self._budget.interleaved_fill_share * (mesh.pp - 1) / mesh.vpp / num_microbatches
            return replica_s / mesh.pp * (1 + fill)
        return replica_s / num_microbatches / (1 - (1 - 1 / num_microbatches) ** mesh.pp)

    def filled_seconds(self, unit: str, mesh: MeshSize, num_microbatches: int) -> float:
        """Return the seconds if layers are divided evenly: P - 1 parts of a microbatch fill and drain the pipeline."""
        fill = (mesh.pp - 1) / mesh.vpp / num_microbatches
        return self._replica_seconds(unit, mesh, num_microbatches) / mesh.pp * (1 + fill)

    def round_trip(self, unit: str, mesh: MeshSize, num_microbatches: int) -> float:
        """Return the seconds in which a mean microbatch passes all layers of the unit, down and back."""
        return self._replica_seconds(unit, mesh, num_microbatches) / num_microbatches

    def _replica_seconds(self, unit: str, mesh: MeshSize, num_microbatches: int | None) -> float:
        """Seconds of all layers for all microbatches of a replica, on the slowest of the ranks that share them."""
        global_batch = self._layer_costs.batches.global_batch
        num_merged = 1 if num_microbatches is None else max(1, global_batch // (mesh.dp * num_microbatches))
        key = (unit, mesh.tp, mesh.cp, num_merged)
        if key not in self._known_seconds:
            self._known_seconds[key] = self._group_seconds(*key)
        return self._known_seconds[key] * global_batch / mesh.dp

    def _group_seconds(self, unit: str, tp: int, cp: int, num_merged: int) -> float:
        """Seconds of all layers for a group of the batch, in microbatches of `num_merged` groups."""
        costs = self._layer_costs
        if cp == 1:
            times = costs.merged_times(unit, tp, num_merged)
        else:  # the LLM alone, whose microbatches are groups
            mesh, global_batch = MeshSize(tp, 1, 1, cp=cp), costs.batches.global_batch
            times = costs.unit_times(unit, tp, (unit_split(unit, mesh, global_batch),))
        mean = times.mean
        counted = mean.sum() if costs.recompute[unit] == "all" else mean[:, :RECOMPUTE].sum()
        return float(counted) / num_merged


def unit_time_bound(times: MeshTimes, memory_bound: UnitMemoryBound, memory_bytes: float) -> UnitTimeBound:
    """Return the least seconds of one unit's part in the step; infinite where it cannot fit into `memory_bytes`."""

    def bound(unit: str, mesh: MeshSize, num_microbatches: int | None, in_flight_behind: int = 0) -> float:
        if not memory_bound.may_fit(unit, mesh, num_microbatches, in_flight_behind, memory_bytes):
            return math.inf
        return times.seconds(unit, mesh, num_microbatches)

    return bound
