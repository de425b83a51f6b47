"""Predict a step of the replicated placement: every rank runs every unit, phase by phase (OrchMLLM).

Weights, gradients and optimizer state are sharded over groups of `shard` ranks (FSDP, arXiv 2304.11277; hybrid sharding
where a group is smaller than the cluster) and gathered layer by layer while the layer before is computed. A step has
one or more rounds, each one mini-batch of every rank. In a round samples are balanced over the ranks by their cost in
the LLM, and items by their cost in their encoder. So features move in an all-to-all between the phases, and their
gradients in another. Every layer synchronizes all ranks, so a phase takes as long as its most expensive rank.

The runtime runs mini-batches of one group each (`replicated_search`); the planner shows what others would bring.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, groupby, product

import numpy as np

from mmtrain.costs import (
    CostModel,
    Hardware,
    HeldLayers,
    Precision,
    RankMemory,
    StateBytes,
    TokenLoad,
    input_grad_needed,
    num_trained_parameters,
)
from mmtrain.costs.collectives import GroupLayout
from mmtrain.costs.hardware import ELEMENT_BYTES, GIB
from mmtrain.costs.rank_memory import (
    MEMORY_MARGIN,
    gathered_bytes,
    layer_state,
    microbatch_activation_bytes,
    stage_working_bytes,
)
from mmtrain.costs.sharded_layers import ShardedLayers, overlapped_seconds
from mmtrain.models.model_shape import LayerShape, ModelShape, UnitShape
from mmtrain.plan.artifact.plan import Alternative
from mmtrain.plan.estimate.layer_costs import FloatArray
from mmtrain.plan.estimate.sample_batches import SampledBatches
from mmtrain.plan.problem import PlanningProblem
from mmtrain.plan.replicated.phase_dispatch import DispatchedRounds, PhaseDispatcher
from mmtrain.program.simulation.timing import NORM_BYTES

NUM_REPLICATED_COMMUNICATORS = 2  # of all ranks, and of the ranks that share the state


@dataclass(frozen=True)
class ReplicatedLayout:
    """One way to run all units on all ranks."""

    num_ranks: int
    shard: int  # ranks that share one copy of weights, gradients and optimizer state
    num_rounds: int  # mini-batches of each rank in a step
    recompute: frozenset[str]  # units that keep only their layers' inputs

    def __str__(self) -> str:
        recompute = f", recompute {' and '.join(sorted(self.recompute))}" if self.recompute else ""
        return f"replicated: {self.num_ranks} ranks, shard {self.shard}, {self.num_rounds} mini-batches{recompute}"


@dataclass(frozen=True)
class ReplicatedPrediction:
    """What the cost model predicts for a layout on the sampled batches: means, in seconds of a step."""

    layout: ReplicatedLayout
    step_time_s: float
    phase_s: Mapping[str, float]  # by unit: its forwards and backwards, exposed collectives included
    exposed_s: float  # part of the phases that waits for weights and gradients
    dispatch_s: float  # all-to-alls between phases
    max_over_mean: Mapping[str, float]  # by unit: cost of the most expensive rank over the mean rank's
    memory: RankMemory


@dataclass
class ReplicatedPredictor:
    """Predicts the replicated placement of one model on one cluster; what layouts share is computed once."""

    shape: ModelShape
    costs: CostModel
    precision: Precision
    state_bytes: StateBytes
    batches: SampledBatches
    machine: Hardware
    num_ranks: int
    overlap_slowdown: float = 0.0  # share of a hidden collective's time that compute beside it loses
    _layer_seconds: dict[tuple[str, int], "_LayerSeconds"] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, problem: PlanningProblem) -> "ReplicatedPredictor":
        """Return the predictor of a problem's model on all ranks of its cluster."""
        return cls(
            problem.shape,
            problem.costs,
            problem.precision,
            problem.state_bytes,
            problem.batches,
            problem.hardware,
            problem.cluster.num_ranks,
            problem.hardware.overlap_slowdown,
        )

    def predict_all(self) -> tuple[list[ReplicatedPrediction], ReplicatedPrediction | None]:
        """Return all layouts that fit, the fastest first, and the one with least memory where none fits.

        More rounds only save memory, so no more are tried once every layout fits whose state does.
        """
        fitting: list[ReplicatedPrediction] = []
        smallest: ReplicatedPrediction | None = None
        for _, layouts in groupby(self.layouts(), key=lambda layout: layout.num_rounds):
            predictions = [self.predict(layout) for layout in layouts]
            newly_fitting = [p for p in predictions if p.memory.total <= self.machine.memory_bytes]
            fitting += newly_fitting
            candidates = predictions if smallest is None else [*predictions, smallest]
            smallest = min(candidates, key=lambda p: p.memory.total)
            num_with_fitting_state = sum(map(self._state_fits, predictions))
            if num_with_fitting_state and len(newly_fitting) == num_with_fitting_state:
                break
        fitting.sort(key=lambda p: (p.step_time_s, len(p.layout.recompute), p.layout.shard))
        return fitting, None if fitting else smallest

    def _state_fits(self, prediction: ReplicatedPrediction) -> bool:
        memory = prediction.memory
        return memory.parameters + memory.gradients + memory.optimizer <= self.machine.memory_bytes

    def alternative(self, chosen_step_s: float) -> Alternative:
        """Return the best layout as a line of the plan's ranking, compared with the chosen plan's step time."""
        fitting, smallest = self.predict_all()
        best = fitting[0] if fitting else smallest
        assert best is not None, "there is always a layout with one shard group, one round and no recompute"
        if fitting:
            ratio = best.step_time_s / chosen_step_s
            comparison = f"{ratio:.2f}x slower" if ratio >= 1 else f"{1 / ratio:.2f}x faster"
            waiting = (best.exposed_s + best.dispatch_s) / best.step_time_s
            reason = (
                f"{comparison}, {waiting:.0%} of the step waits for weights and features; "
                "predicted only, not runnable yet"
            )
        else:
            needed_gib, limit_gib = best.memory.total / GIB, self.machine.memory_bytes / GIB
            largest_kind = best.memory.binding
            reason = f"does not fit: every rank needs {needed_gib:.1f} of {limit_gib:.1f} GiB, most for {largest_kind}"
        return Alternative(
            summary=str(best.layout),
            placement="replicated",
            step_time_s=best.step_time_s if fitting else None,
            peak_memory_gib=round(best.memory.total / GIB, 4),
            reason=reason,
            runnable=False,
        )

    def layouts(self) -> Iterator[ReplicatedLayout]:
        """Return all layouts: shard groups in or of whole nodes, rounds in powers of two, recompute by unit."""
        min_samples = min(sum(len(group) for group in groups) for groups in self.batches.groups)
        units = [unit.name for unit in self.shape.units]
        recompute_choices = [frozenset(compress(units, flags)) for flags in product((False, True), repeat=len(units))]
        shards = shard_sizes(self.num_ranks, self.machine.ranks_per_node)
        for i in range(max(min_samples // self.num_ranks, 1).bit_length()):
            for shard, recompute in product(shards, recompute_choices):
                yield ReplicatedLayout(self.num_ranks, shard, 1 << i, recompute)

    def predict(self, layout: ReplicatedLayout) -> ReplicatedPrediction:
        """Predict step time and memory of one layout."""
        rounds = self.dispatcher.dispatch(layout.num_rounds)
        phases = {unit.name: self._predict_phase(unit, layout) for unit in self.shape.units}
        phase_s = {unit: compute_s + exposed_s for unit, (compute_s, exposed_s) in phases.items()}
        return ReplicatedPrediction(
            layout=layout,
            step_time_s=sum(phase_s.values()) + rounds.dispatch_s + self._optimizer_seconds(layout),
            phase_s=phase_s,
            exposed_s=sum(exposed_s for _, exposed_s in phases.values()),
            dispatch_s=rounds.dispatch_s,
            max_over_mean=rounds.max_over_mean,
            memory=self._predict_memory(layout, rounds),
        )

    def _optimizer_seconds(self, layout: ReplicatedLayout) -> float:
        """Return the seconds in which a rank updates its shard, once all ranks have summed the gradient norm."""
        num_trained = sum(num_trained_parameters(layer) for unit in self.shape.units for layer in unit.layers)
        norm_s = self.costs.collective("all_reduce", NORM_BYTES, self._shard_group(self.num_ranks))
        return norm_s + self.costs.optimizer(num_trained // layout.shard)

    def _predict_phase(self, unit: UnitShape, layout: ReplicatedLayout) -> tuple[float, float]:
        """Return the seconds that a unit's forwards and backwards compute, and wait, in a step; mean of the batches.

        Gradients are reduced inside the shard group in each round, between the groups in the last one.
        """
        runs = self._runs_of_equal_layers[unit.name]
        seconds = self._seconds_of_layers(unit.name, layout.num_rounds)
        count = [run.count for run in runs]
        collectives = self._collectives(layout.shard)
        gathers = np.repeat([collectives.gather_seconds(run.layer) for run in runs], count)
        forward = np.repeat(seconds.forward, count, axis=0)
        has_backward = np.repeat([run.layer.trainable or run.input_grad for run in runs], count)
        backward_per_run = seconds.backward + (seconds.recompute if unit.name in layout.recompute else 0.0)
        backward = np.repeat(backward_per_run, count, axis=0)[has_backward][::-1]
        reductions = np.zeros_like(backward)
        for i in range(layout.num_rounds):
            is_last = i == layout.num_rounds - 1
            per_run = [collectives.reduce_seconds(run.layer, is_last) for run in runs]
            reductions[:, :, i] = np.repeat(per_run, count)[has_backward][::-1, None]
        slowdown = self.overlap_slowdown
        elapsed = overlapped_seconds(forward, gathers, np.zeros_like(forward), slowdown)
        elapsed = elapsed + overlapped_seconds(backward, gathers[has_backward][::-1], reductions, slowdown)
        compute = forward.sum(axis=0) + backward.sum(axis=0)  # (batches, rounds)
        num_batches = compute.shape[0]
        return float(compute.sum() / num_batches), float((elapsed - compute).sum() / num_batches)

    @cached_property
    def dispatcher(self) -> PhaseDispatcher:
        """Dispatches the sampled batches over rounds and ranks."""
        nbytes = ELEMENT_BYTES[self.precision]
        return PhaseDispatcher(
            self.shape, self.costs, nbytes, self.batches, self.num_ranks, self.machine.ranks_per_node
        )

    @cached_property
    def _runs_of_equal_layers(self) -> dict[str, tuple["_EqualLayers", ...]]:
        """Every unit's layers, equal neighbours together."""
        input_grad = input_grad_needed(self.shape)
        runs = {}
        for unit in self.shape.units:
            layers = zip(unit.layers, input_grad[unit.name], strict=True)
            runs[unit.name] = tuple(_EqualLayers(*layer, len(list(equal))) for layer, equal in groupby(layers))
        return runs

    def _seconds_of_layers(self, unit: str, num_rounds: int) -> "_LayerSeconds":
        """Return the seconds of one layer of each run of equal layers, on the most expensive rank."""
        key = (unit, num_rounds)
        if key not in self._layer_seconds:
            loads = [[loads[unit] for loads in batch] for batch in self.dispatcher.dispatch(num_rounds).loads]
            runs = self._runs_of_equal_layers[unit]

            def tabulate(seconds: Callable[[_EqualLayers, TokenLoad], float]) -> FloatArray:
                return np.array([[[seconds(run, load) for load in batch] for batch in loads] for run in runs])

            def backward(run: _EqualLayers, load: TokenLoad) -> float:
                return self.costs.seconds(run.layer, 1, load, "backward", input_grad=run.input_grad)

            self._layer_seconds[key] = _LayerSeconds(
                tabulate(lambda run, load: self.costs.seconds(run.layer, 1, load, "forward")),
                tabulate(backward),
                tabulate(lambda run, load: self.costs.seconds(run.layer, 1, load, "recompute")),
            )
        return self._layer_seconds[key]

    def _collectives(self, shard: int) -> ShardedLayers:
        """Return the prices of collectives with these shards."""
        element_bytes = ELEMENT_BYTES[self.precision]
        return ShardedLayers(self.costs, self.num_ranks, shard, element_bytes, self.machine.ranks_per_node)

    def _shard_group(self, shard: int) -> GroupLayout:
        """Return the layout of the ranks that share one copy of the parameters."""
        return GroupLayout.strided(shard, 1, self.machine.ranks_per_node)

    def _predict_memory(self, layout: ReplicatedLayout, rounds: DispatchedRounds) -> RankMemory:
        """Return the memory of the fullest rank.

        It holds a shard of the state, activations of one mini-batch of every unit, and the layers gathered whole.
        """
        state = np.zeros(3)  # parameters, gradients, optimizer
        activations = buffers = 0.0
        input_grad = input_grad_needed(self.shape)
        for unit in self.shape.units:
            state += sum(np.array(layer_state(layer, 1, 1, self.state_bytes)) for layer in unit.layers)
            recompute = (unit.name in layout.recompute,) * len(unit.layers)
            held = HeldLayers(unit.layers, input_grad[unit.name], recompute, 1, 1, 1, rounds.largest[unit.name])
            activations += microbatch_activation_bytes(held, self.costs, self.precision)
            buffers = max(buffers, stage_working_bytes(held, self.costs, self.precision))
        if layout.shard > 1:
            layers = [layer for unit in self.shape.units for layer in unit.layers]
            buffers += max(gathered_bytes(layer, self.precision) for layer in layers)
        sharded = state / layout.shard
        total = float(sharded.sum()) + activations + buffers
        parameters, gradients, optimizer = map(float, sharded)
        communicators = NUM_REPLICATED_COMMUNICATORS * self.machine.communicator_bytes
        return RankMemory(parameters, gradients, optimizer, activations, buffers, MEMORY_MARGIN * total, communicators)


@dataclass(frozen=True)
class _EqualLayers:
    """Equal layers one after another."""

    layer: LayerShape
    input_grad: bool  # whether anything before the layer trains
    count: int


@dataclass(frozen=True)
class _LayerSeconds:
    """Seconds of one layer of each run of equal layers: (runs, batches, rounds) each."""

    forward: FloatArray
    backward: FloatArray
    recompute: FloatArray


def shard_sizes(num_ranks: int, ranks_per_node: int) -> Sequence[int]:
    """Return sizes of shard groups: divisors of a node's ranks, and whole nodes by powers of two, up to all ranks."""
    common = math.gcd(num_ranks, ranks_per_node)
    in_node = [size for size in range(1, ranks_per_node + 1) if common % size == 0]
    num_nodes = num_ranks // ranks_per_node if num_ranks % ranks_per_node == 0 else 0
    across_nodes = [ranks_per_node << i for i in range(1, num_nodes.bit_length()) if num_nodes % (1 << i) == 0]
    return sorted({*in_node, *across_nodes, num_ranks})
