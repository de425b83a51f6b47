"""The replicated placement, predicted: every rank runs every unit, phase by phase, on samples dealt anew (OrchMLLM).

Weights, gradients and optimizer state are sharded over groups of `shard` ranks (FSDP, arXiv 2304.11277; with a group
smaller than the cluster: hybrid shard, ZeRO++'s idea) and gathered layer by layer while the layer before is computed.
Each step is cut into rounds, one mini-batch of every rank each. In a round samples are spread over the ranks by what
they cost the LLM, items by what they cost their encoder, so features travel in one all-to-all between the phases,
their gradients in another. Layers synchronise all ranks, so a phase takes as long as its fullest rank.

This version's runtime cannot run the placement: the planner shows what it would bring.
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
    TokenLoad,
    input_grad_needed,
    num_parameters,
)
from mmtrain.costs.hardware import ELEMENT_BYTES, GIB
from mmtrain.costs.rank_memory import MEMORY_MARGIN, layer_state, microbatch_activation_bytes, stage_working_bytes
from mmtrain.models.model_shape import LayerShape, ModelShape, UnitShape
from mmtrain.plan.artifact.plan import Alternative
from mmtrain.plan.estimate.layer_costs import FloatArray
from mmtrain.plan.estimate.sample_batches import SampledBatches
from mmtrain.plan.replicated.phase_dispatch import DispatchedRounds, PhaseDispatcher

GRADIENT_ELEMENT_BYTES = 4  # gradients are reduced in fp32
NUM_GATHERED_LAYERS = 2  # layers whose whole weights a rank holds: the one computed and the one gathered meanwhile


@dataclass(frozen=True)
class ReplicatedLayout:
    """One way to run all units on all ranks."""

    num_ranks: int
    shard: int  # ranks that share one copy of weights, gradients and optimizer state
    num_rounds: int  # mini-batches of each rank in a step
    recompute: frozenset[str]  # units that keep only their layers' inputs

    def __str__(self) -> str:
        again = f", recompute {' and '.join(sorted(self.recompute))}" if self.recompute else ""
        return f"replicated: {self.num_ranks} ranks, shard {self.shard}, {self.num_rounds} mini-batches{again}"


@dataclass(frozen=True)
class ReplicatedPrediction:
    """What the cost model says of it on the drawn batches (means, seconds of a step)."""

    layout: ReplicatedLayout
    step_time_s: float
    phase_s: Mapping[str, float]  # by unit: its forwards and backwards, exposed collectives included
    exposed_s: float  # part of them that waits for weights and gradients
    dispatch_s: float  # all-to-alls between phases
    max_over_mean: Mapping[str, float]  # by unit: the fullest rank's cost over the mean one's
    memory: RankMemory


@dataclass(frozen=True)
class ReplicatedPredictor:
    """Predicts the replicated placement of one model on one cluster; what layouts share is computed once."""

    shape: ModelShape
    costs: CostModel
    precision: Precision
    batches: SampledBatches
    machine: Hardware
    num_ranks: int
    _priced: dict[tuple[str, int], "_LayerSeconds"] = field(default_factory=dict, repr=False)

    def best(self) -> tuple[list[ReplicatedPrediction], ReplicatedPrediction | None]:
        """All layouts worth a look that fit into memory, fastest first, and the smallest one where none fits.

        More rounds only save memory: once all fit whose state does, no more are tried.
        """
        fitting: list[ReplicatedPrediction] = []
        smallest: ReplicatedPrediction | None = None
        for _, layouts in groupby(self.layouts(), key=lambda layout: layout.num_rounds):
            found = [self.rehearse(layout) for layout in layouts]
            here = [r for r in found if r.memory.total <= self.machine.memory_bytes]
            fitting += here
            smallest = min([*found, *filter(None, [smallest])], key=lambda r: r.memory.total)
            if len(here) == sum(map(self._state_fits, found)) > 0:
                break
        fitting.sort(key=lambda r: (r.step_time_s, len(r.layout.recompute), r.layout.shard))
        return fitting, None if fitting else smallest

    def _state_fits(self, found: ReplicatedPrediction) -> bool:
        memory = found.memory
        return memory.parameters + memory.gradients + memory.optimizer <= self.machine.memory_bytes

    def alternative(self, chosen_step_s: float) -> Alternative:
        """The best layout as a line of the plan's ranking, beside the chosen plan's step time."""
        fitting, smallest = self.best()
        best = fitting[0] if fitting else smallest
        assert best is not None, "there is always one shard group, one round and no recompute"
        limit, binding = self.machine.memory_bytes / GIB, best.memory.binding
        if not fitting:
            reason = f"does not fit: every rank needs {best.memory.total / GIB:.1f} of {limit:.1f} GiB, most {binding}"
        else:
            ratio = best.step_time_s / chosen_step_s
            found = f"{ratio:.2f}x slower" if ratio >= 1 else f"would take {ratio:.2f} of the step"
            waits = (best.exposed_s + best.dispatch_s) / best.step_time_s
            reason = f"{found}, {waits:.0%} of it waiting for weights and features; predicted only, not runnable yet"
        return Alternative(
            summary=str(best.layout),
            placement="replicated",
            step_time_s=best.step_time_s if fitting else None,
            peak_memory_gib=round(best.memory.total / GIB, 4),
            reason=reason,
            runnable=False,
        )

    def layouts(self) -> Iterator[ReplicatedLayout]:
        """Shard groups of whole nodes or inside one, rounds in powers of two, recompute by unit."""
        samples = min(sum(len(g) for g in groups) for groups in self.batches.groups)
        names = [u.name for u in self.shape.units]
        kept = [frozenset(compress(names, flags)) for flags in product((False, True), repeat=len(names))]
        for i in range(max(samples // self.num_ranks, 1).bit_length()):
            for shard, recompute in product(_shards(self.num_ranks, self.machine.ranks_per_node), kept):
                yield ReplicatedLayout(self.num_ranks, shard, 1 << i, recompute)

    def rehearse(self, layout: ReplicatedLayout) -> ReplicatedPrediction:
        """Step time and memory of one layout."""
        dealt = self.dealing.rounds(layout.num_rounds)
        taken = {u.name: self._phase(u, layout) for u in self.shape.units}
        phase_s = {name: busy + waits for name, (busy, waits) in taken.items()}
        return ReplicatedPrediction(
            layout,
            sum(phase_s.values()) + dealt.dispatch_s,
            phase_s,
            sum(waits for _, waits in taken.values()),
            dealt.dispatch_s,
            dealt.max_over_mean,
            self._memory(layout, dealt),
        )

    def _phase(self, unit: UnitShape, layout: ReplicatedLayout) -> tuple[float, float]:
        """Seconds of a unit's forwards and backwards in a step (mean of the batches): computing, and waiting.

        Gradients are reduced inside the shard group each round, between the groups in the last one.
        """
        runs, seconds = self._runs[unit.name], self._seconds_of(unit.name, layout.num_rounds)
        count = [run.count for run in runs]
        gathers = np.repeat([self._gather(run.layer, layout.shard) for run in runs], count)
        forward = np.repeat(seconds.forward, count, axis=0)
        has_backward = np.repeat([run.layer.trainable or run.input_grad for run in runs], count)
        one_way = seconds.backward + (seconds.recompute if unit.name in layout.recompute else 0.0)
        backward = np.repeat(one_way, count, axis=0)[has_backward][::-1]
        reductions = np.zeros_like(backward)
        for place in range(layout.num_rounds):
            last = place == layout.num_rounds - 1
            each = [self._reduce(run.layer, layout.shard, last) if run.layer.trainable else 0.0 for run in runs]
            reductions[:, :, place] = np.repeat(each, count)[has_backward][::-1, None]
        taken = overlapped_seconds(forward, gathers, np.zeros_like(forward))
        taken = taken + overlapped_seconds(backward, gathers[has_backward][::-1], reductions)
        busy = forward.sum(axis=0) + backward.sum(axis=0)
        num_batches = busy.shape[0]
        return float(busy.sum() / num_batches), float((taken - busy).sum() / num_batches)

    @cached_property
    def dealing(self) -> PhaseDispatcher:
        """The drawn batches, dealt out over rounds and ranks."""
        nbytes = ELEMENT_BYTES[self.precision]
        return PhaseDispatcher(
            self.shape, self.costs, nbytes, self.batches, self.num_ranks, self.machine.ranks_per_node
        )

    @cached_property
    def _runs(self) -> dict[str, tuple["_EqualLayers", ...]]:
        """Every unit's layers, equal neighbours together."""
        needs = input_grad_needed(self.shape)
        return {
            u.name: tuple(
                _EqualLayers(*key, len(list(same))) for key, same in groupby(zip(u.layers, needs[u.name], strict=True))
            )
            for u in self.shape.units
        }

    def _seconds_of(self, unit: str, num_rounds: int) -> "_LayerSeconds":
        """(runs, batches, rounds) seconds of one layer of each run, on the fullest rank."""
        if (unit, num_rounds) not in self._priced:
            loads = [[loads[unit] for loads in batch] for batch in self.dealing.rounds(num_rounds).loads]

            def grid(price: Callable[[_EqualLayers, TokenLoad], float]) -> FloatArray:
                return np.array([[[price(run, load) for load in row] for row in loads] for run in self._runs[unit]])

            self._priced[unit, num_rounds] = _LayerSeconds(
                grid(lambda run, load: self.costs.seconds(run.layer, 1, load, "forward")),
                grid(lambda run, load: self.costs.seconds(run.layer, 1, load, "backward", input_grad=run.input_grad)),
                grid(lambda run, load: self.costs.seconds(run.layer, 1, load, "recompute")),
            )
        return self._priced[unit, num_rounds]

    def _gather(self, layer: LayerShape, shard: int) -> float:
        nbytes = num_parameters(layer) * ELEMENT_BYTES[self.precision]
        return self.costs.collective("all_gather", nbytes, shard, shard <= self.machine.ranks_per_node)

    def _reduce(self, layer: LayerShape, shard: int, last: bool) -> float:
        nbytes, inside = num_parameters(layer) * GRADIENT_ELEMENT_BYTES, shard <= self.machine.ranks_per_node
        seconds = self.costs.collective("reduce_scatter", nbytes, shard, inside)
        if last:
            copies, near = self.num_ranks // shard, self.num_ranks <= self.machine.ranks_per_node
            seconds += self.costs.collective("all_reduce", nbytes // shard, copies, near)
        return seconds

    def _memory(self, layout: ReplicatedLayout, dealt: DispatchedRounds) -> RankMemory:
        """Everything of the fullest rank: a shard of the state, one mini-batch of every unit, layers gathered whole."""
        state = np.zeros(3)
        activations = buffers = 0.0
        needs = input_grad_needed(self.shape)
        for unit in self.shape.units:
            state += sum(np.array(layer_state(layer, 1, 1, self.precision)) for layer in unit.layers)
            again = (unit.name in layout.recompute,) * len(unit.layers)
            held = HeldLayers(unit.layers, needs[unit.name], again, 1, 1, 1, dealt.largest[unit.name])
            activations += microbatch_activation_bytes(held, self.costs, self.precision)
            buffers = max(buffers, stage_working_bytes(held, self.costs, self.precision))
        largest = max(num_parameters(layer) for unit in self.shape.units for layer in unit.layers)
        if layout.shard > 1:
            buffers += largest * (NUM_GATHERED_LAYERS * ELEMENT_BYTES[self.precision] + GRADIENT_ELEMENT_BYTES)
        own = state / layout.shard
        total = float(own.sum()) + activations + buffers
        return RankMemory(float(own[0]), float(own[1]), float(own[2]), activations, buffers, MEMORY_MARGIN * total)


@dataclass(frozen=True)
class _EqualLayers:
    """Equal layers one after another."""

    layer: LayerShape
    input_grad: bool  # something below trains
    count: int


@dataclass(frozen=True)
class _LayerSeconds:
    """(runs, batches, rounds) seconds of one layer of each run."""

    forward: FloatArray
    backward: FloatArray
    recompute: FloatArray


def overlapped_seconds(compute: FloatArray, gathers: FloatArray, reductions: FloatArray) -> FloatArray:
    """Seconds for layers one after another whose weights are gathered before, and gradients reduced after, each.

    compute, reductions: (L, ...) seconds; gathers: (L,). Returns (...). While layer i is computed, the weights of layer
    i + 1 arrive and the gradients of layer i - 1 leave; layer i + 1 begins when all three are done. The first gather
    and the last reduction have nothing to hide behind.
    """
    if not len(compute):
        return np.zeros(compute.shape[1:])
    beside = np.zeros_like(compute)
    beside[:-1] += gathers[1:].reshape(-1, *(1,) * (compute.ndim - 1))
    beside[1:] += reductions[:-1]
    return np.asarray(gathers[0] + np.maximum(compute, beside).sum(axis=0) + reductions[-1])


def _shards(num_ranks: int, per_node: int) -> Sequence[int]:
    """Sizes of shard groups: those that divide a node's ranks, and whole nodes by powers of two, up to all ranks."""
    inside = [n for n in range(1, per_node + 1) if math.gcd(num_ranks, per_node) % n == 0]
    nodes = num_ranks // per_node if num_ranks % per_node == 0 else 0
    across = [per_node << i for i in range(1, nodes.bit_length()) if nodes % (1 << i) == 0]
    return sorted({*inside, *across, num_ranks})
