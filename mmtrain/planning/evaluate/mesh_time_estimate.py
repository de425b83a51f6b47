"""How long a unit's part of the step takes on a mesh whose memory makes it recompute layers.

The lower bounds of time and memory each leave the other out, so a mesh that just fits with every layer recomputed
looks as fast as one with room. This estimate joins them, to order meshes. It proves nothing.
"""

import math
from functools import partial

import numpy as np

from mmtrain.costs import TokenLoad
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.evaluate.lower_bounds import KindBytesByMesh, MeshTimes, UnitMemoryBound
from mmtrain.planning.layer_costs.layer_costs import RECOMPUTE, FloatArray, LayerCosts
from mmtrain.program.ir.graph import LLM

MAX_NEWTON_STEPS = 50  # from below on a concave, piecewise linear function: a handful reach the solution
TOLERANCE = 1e-6  # of the unit that may be left over


class MeshTimeEstimate:
    """Seconds that a unit of this mesh needs in a step, with layers recomputed where its ranks lack memory.

    Layers are divided as if they were a liquid, so that all ranks finish together: a rank that holds more microbatches
    recomputes more and gets less of the unit. Stages are not, so the real step may be a little shorter or longer.
    """

    def __init__(
        self, layer_costs: LayerCosts, times: MeshTimes, memory_bound: UnitMemoryBound, memory_bytes: float
    ) -> None:
        """Estimate under these costs.

        times: the seconds without any recomputation. memory_bytes: of a rank.
        """
        self._layer_costs = layer_costs
        self._times = times
        self._memory_bound = memory_bound
        self._memory_bytes = memory_bytes
        self._kinds_of = KindBytesByMesh(layer_costs, partial(_largest_load, layer_costs))
        self._seconds: dict[tuple[str, int], tuple[float, float]] = {}
        self._ratios: dict[tuple[str, MeshSize, int, int], float] = {}

    def __call__(self, unit: str, mesh: MeshSize, num_microbatches: int, in_flight_behind: int = 0) -> float:
        """Return the seconds; infinite where too little memory is left even with all layers recomputed."""
        key = (unit, mesh, num_microbatches, in_flight_behind)
        if key not in self._ratios:
            may_fit = self._memory_bound.may_fit(*key, self._memory_bytes)
            self._ratios[key] = self._recompute_ratio(*key) if may_fit else math.inf
        return self._times.filled_seconds(unit, mesh, num_microbatches) * self._ratios[key]

    def _recompute_ratio(self, unit: str, mesh: MeshSize, num_microbatches: int, in_flight_behind: int) -> float:
        """Return how many times as long the slowest rank computes as without recomputation."""
        kinds = self._kinds_of(unit, mesh, num_microbatches)
        room = self._memory_bytes - kinds.max_working
        most_in_flight = min(_in_flight_on_first_rank(mesh) + in_flight_behind, num_microbatches)
        if kinds.total_state + most_in_flight * kinds.total_kept_without_recompute <= room * mesh.pp:
            return 1.0
        per_rank_behind = 1 if mesh.vpp == 1 else 2 / mesh.vpp
        in_flight = _in_flight_on_first_rank(mesh) + in_flight_behind - per_rank_behind * np.arange(mesh.pp)
        in_flight = np.minimum(in_flight, num_microbatches)
        held = kinds.total_state + in_flight * kinds.total_kept_without_recompute
        saved = in_flight * (kinds.total_kept_without_recompute - kinds.total_kept)
        if room <= 0 or (room / (held - saved)).sum() < 1:
            return math.inf
        work_s, recompute_s = self._seconds_of(unit, mesh.tp)
        return balanced_seconds(work_s, recompute_s, held, saved, room) * mesh.pp / work_s

    def _seconds_of(self, unit: str, tp: int) -> tuple[float, float]:
        """Return the seconds of all layers for one microbatch, and of recomputing them."""
        if (unit, tp) not in self._seconds:
            layer_costs = self._layer_costs
            mean = layer_costs.unit_times(unit, tp, layer_costs.loads.undivided).mean
            self._seconds[unit, tp] = (float(mean[:, :RECOMPUTE].sum()), float(mean[:, RECOMPUTE].sum()))
        return self._seconds[unit, tp]


def _largest_load(layer_costs: LayerCosts, unit: str, step_microbatches: int) -> TokenLoad:
    """Return about the largest microbatch: larger ones vary less, as sums of independent parts do."""
    sampled, batches = layer_costs.loads, layer_costs.batches
    largest = sampled.largest(unit, sampled.undivided)
    if unit == LLM:
        return largest
    loads = sampled.of_unit(unit, sampled.undivided)
    total = max(loads.total(batch).tokens for batch in range(len(batches.groups)))
    excess = max(0.0, largest.tokens * batches.global_batch / max(1, total) - 1)
    merged = max(1.0, batches.global_batch / step_microbatches)
    return TokenLoad(math.ceil(total / step_microbatches * (1 + excess / math.sqrt(merged))), 0, 0, 0)


def _in_flight_on_first_rank(mesh: MeshSize) -> float:
    """Return how many microbatches the first rank's layers hold in 1F1B; chunks count by their share of the rank.

    Each rank further on holds one less, or with V chunks 2 passes of 1 / V less.
    """
    if mesh.vpp == 1:
        return mesh.pp
    return (2 * (mesh.pp - 1) + (mesh.vpp - 1) * mesh.pp + 1) / mesh.vpp


def balanced_seconds(work_s: float, recompute_s: float, held: FloatArray, saved: FloatArray, room: float) -> float:
    """Return the least seconds in which ranks share a unit, each with as much recomputation as its share needs.

    A rank with share x of the unit holds x `held` bytes. Recomputation frees up to x `saved` of them, in proportion to
    the seconds that it takes. In T seconds a rank can take the least of three shares: what it computes without
    recomputation, what it computes if it recomputes until `room` suffices, and what fits with everything recomputed.
    The shares of all ranks add up to 1.

    Args:
        work_s: of the whole unit without recomputation.
        recompute_s: of recomputing all of it.
        held: (P,) bytes of the whole unit on each rank.
        saved: (P,) of these, what recomputing all of it frees.
        room: bytes of a rank.
    """
    seconds_per_byte = recompute_s / np.maximum(saved, 1.0)
    largest = np.where(saved > 0, room / (held - saved), room / held)
    slope = 1 / (work_s + seconds_per_byte * held)
    offset = seconds_per_byte * room * slope
    step_s = work_s / len(held)
    for _ in range(MAX_NEWTON_STEPS):
        free = step_s / work_s
        recomputing = offset + step_s * slope
        shares = np.minimum(np.minimum(recomputing, free), largest)
        missing = 1 - float(shares.sum())
        growth = np.where(recomputing < free, slope, 1 / work_s)
        total_growth = float(growth[shares < largest].sum())
        if missing <= TOLERANCE or total_growth == 0:
            break
        step_s += missing / total_growth
    return float(step_s)
