"""Seconds and bytes of a model's layers on the sampled batches: what partitions, lower bounds and memory rest on."""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmtrain.balance.grouping.padding import without_padding
from mmtrain.costs import (
    ComputeKind,
    CostModel,
    RankMemory,
    StateBytes,
    TokenLoad,
    TokenSplit,
    input_grad_needed,
    model_flops,
    num_trained_parameters,
)
from mmtrain.costs.context_parallel_costs import ContextGroup, context_seconds
from mmtrain.costs.cost_model import LayerWork, waiting_seconds
from mmtrain.costs.hardware import ELEMENT_BYTES, Precision
from mmtrain.costs.rank_memory import (
    RankLayer,
    layer_activation_bytes,
    layer_state,
    layer_working_bytes,
    message_bytes,
)
from mmtrain.models.shapes.model_shape import LayerShape
from mmtrain.planning.artifact.graph_memory import GraphMemory, MemoryPhase, communicator_bytes
from mmtrain.planning.layer_costs.sampled_loads import LoadSplit, SampledLoads, load_split, split_of_unit
from mmtrain.planning.space.budget import DEFAULT_BUDGET, SearchBudget
from mmtrain.planning.space.constraints import RecomputeMode
from mmtrain.planning.space.load_arrays import LoadArrays, LoadSeconds, load_arrays
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.planning.space.recently_used import RecentlyUsed
from mmtrain.planning.space.sample_batches import BatchSplit, UnitSplit, batch_split_of
from mmtrain.program.ir.data_dependencies import Bucket, stage_buckets
from mmtrain.program.ir.graph import LLM, StageGraph, StageId
from mmtrain.program.schedules.builder import in_flight_microbatches

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
SpSizes = Mapping[str, frozenset[int]]  # by unit, the tensor-parallel sizes with sequence parallelism
TpChunks = Mapping[str, Mapping[int, int]]  # by unit and tensor-parallel size, chunks of tokens where there are several


MAX_KNOWN_LOADS = 320  # whose seconds are kept for a pass of a layer: `max_exact_loads` of one split, and some more
MAX_KEPT_COMMUNICATORS = 64  # graphs whose ranks' communicators are known: layouts of one mesh come one after another
# A layer, its tensor-parallel size, a pass of it with whether it needs gradients, and how ranks share its tokens.
_PassKey = tuple[LayerShape, int, ComputeKind, bool, TokenSplit, ContextGroup]
FORWARD, BACKWARD, RECOMPUTE = range(3)  # index of `UnitLayerTimes.by_kind`: what a layer does with a microbatch


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one stage for every batch, replica and microbatch: (batches, replicas, microbatches) each."""

    forward: FloatArray
    backward: FloatArray  # recompute, and a forward that runs again, included

    def of_each_replica(self, cp: int) -> "StageSeconds":
        """Return the seconds for each of the `cp` replicas that share sequences, where so far one stands for them."""
        if cp == 1:
            return self
        return StageSeconds(self.forward.repeat(cp, axis=1), self.backward.repeat(cp, axis=1))


@dataclass(frozen=True)
class UnitLayerTimes:
    """Seconds of a unit's layers for every microbatch. Layers of one kind take the same time.

    Ranks that share the sequences of a microbatch wait for each other in every block, so they count as one, the slowest
    of them.
    """

    by_kind: FloatArray  # (K, 3, batches, dp, microbatches) seconds: forward, backward, recompute
    kind: IntArray  # (L,) of each layer

    @cached_property
    def count(self) -> IntArray:
        """(L + 1, K) how many of the layers [0, l) are of each kind."""
        counts = np.cumsum(np.eye(len(self.by_kind), dtype=np.int64)[self.kind], axis=0)
        return np.concatenate([np.zeros_like(counts[:1]), counts])

    @cached_property
    def mean(self) -> FloatArray:
        """(L, 3) seconds of a layer for one microbatch, mean over all."""
        return np.asarray(self.by_kind.mean(axis=(2, 3, 4))[self.kind])

    def stage(self, layers: tuple[int, int], recompute: Sequence[int] | frozenset[int]) -> StageSeconds:
        """Return the seconds of a stage that holds layers [lo, hi) and recomputes some of them."""
        counts = self.count[layers[1]] - self.count[layers[0]]
        recomputed = np.bincount(self.kind[list(recompute)], minlength=len(self.by_kind))
        forward = np.tensordot(counts, self.by_kind[:, FORWARD], 1)
        backward = np.tensordot(counts, self.by_kind[:, BACKWARD], 1)
        backward = backward + np.tensordot(recomputed, self.by_kind[:, RECOMPUTE], 1)
        return StageSeconds(forward, backward)


@dataclass(frozen=True, eq=False)
class UnitLayerCosts:
    """Costs of one unit's layers, (L,) each: mean seconds of a microbatch, and bytes for the largest microbatch."""

    seconds: FloatArray  # forward and backward, and recompute where the recipe fixes it
    backward_seconds: FloatArray  # of these, backward and recompute
    recompute_seconds: FloatArray  # what choosing to recompute the layer adds
    state_bytes: FloatArray  # parameters, gradients, optimizer
    kept_bytes: FloatArray  # activations that one microbatch leaves behind
    saved_bytes: FloatArray  # of them, what choosing to recompute saves; 0 where there is no choice
    working_bytes: FloatArray  # what is alive only while the layer is computed
    recompute_working_bytes: FloatArray  # the same if the layer is recomputed
    input_bytes: FloatArray  # hidden states that enter the layer, as a message
    parameters: FloatArray  # parameters that train, on one rank
    kind: IntArray  # layers of one kind are alike in all of this

    @cached_property
    def span_working(self) -> FloatArray:
        """(L + 1, L + 1) bytes of a span of layers that are alive only while it is computed."""
        return _span_working(self.working_bytes, self.kept_bytes, self.input_bytes)

    @cached_property
    def span_recompute_working(self) -> FloatArray:
        """(L + 1, L + 1) the same where all of its layers are recomputed that may be."""
        return _span_working(self.recompute_working_bytes, self.kept_bytes - self.saved_bytes, self.input_bytes)


class LayerCosts:
    """Costs of a model's layers on the sampled batches. Each is computed once and kept."""

    def __init__(
        self,
        problem: PlanningProblem,
        sp: SpSizes | None = None,
        budget: SearchBudget = DEFAULT_BUDGET,
        chunks: TpChunks | None = None,
        loads: SampledLoads | None = None,
    ):
        """Take shapes, cost model and batches from the problem.

        Args:
            problem: what is planned.
            sp: where sequence parallelism is used; nowhere by default. See `token_splits`.
            budget: how exactly loads are priced.
            chunks: where chunks of tokens hide communication; nowhere by default. See `token_splits`.
            loads: of the same batches, if they are known already.
        """
        self.shape = problem.shape
        self.costs = problem.costs
        self.precision = problem.precision
        self.state_bytes = problem.state_bytes
        self.batches = problem.batches
        self.encoder_microbatches = problem.constraints.encoder_microbatches
        self.recompute: Mapping[str, RecomputeMode] = problem.constraints.recompute
        self.bucket_parameters = problem.recipe.parallel.bucket_parameters
        self.grad_reduce: Precision = problem.recipe.train.grad_reduce
        self.orthogonalizes = problem.recipe.train.optimizer.kind == "muon"
        self.sp: SpSizes = sp or {}
        self.chunks: TpChunks = chunks or {}
        self.budget = budget
        self.loads = loads or SampledLoads(problem, budget)
        self._unit_times = self._no_unit_times()
        self._known_seconds: dict[_PassKey, dict[TokenLoad, float]] = {}
        self._unit_costs: dict[tuple[str, int, LoadSplit], UnitLayerCosts] = {}
        self._waiting_shares: dict[tuple[str, int], FloatArray] = {}
        self._machine = problem.hardware
        self._communicators: RecentlyUsed[Mapping[int, float]] = RecentlyUsed(MAX_KEPT_COMMUNICATORS)

    def with_settings(
        self,
        *,
        recompute: Mapping[str, RecomputeMode] | None = None,
        sp: SpSizes | None = None,
        chunks: TpChunks | None = None,
        state: StateBytes | None = None,
        costs: CostModel | None = None,
    ) -> "LayerCosts":
        """Return the same layers under other recompute modes, ways to split tokens, bytes of state, or cost model.

        Loads depend on none of them and stay shared, seconds on the cost model and on chunks of tokens, which hide
        more with sequence parallelism; bytes are computed anew.
        """
        changed = copy(self)
        changed.chunks = self.chunks if chunks is None else chunks
        if costs is not None or changed.chunks != self.chunks or (changed.chunks and sp is not None):
            changed.costs = costs or self.costs
            changed._known_seconds = {}
            changed._unit_times = self._no_unit_times()
        changed.recompute = self.recompute if recompute is None else recompute
        changed.sp = self.sp if sp is None else sp
        changed.state_bytes = self.state_bytes if state is None else state
        changed._unit_costs = {}
        changed._waiting_shares = {}
        return changed

    @property
    def host_memory_bytes(self) -> float:
        """Host memory that a rank may fill with activations."""
        return self._machine.host_memory_bytes

    @cached_property
    def input_grad(self) -> Mapping[str, tuple[bool, ...]]:
        """By unit, for each layer: whether anything below it trains, so that its input needs a gradient."""
        return input_grad_needed(self.shape)

    def has_sp(self, unit: str, tp: int) -> bool:
        """Return whether the unit uses sequence parallelism at this tensor-parallel size."""
        return tp in self.sp.get(unit, ())

    def num_chunks(self, unit: str, tp: int) -> int:
        """Return the chunks of tokens in which the unit's linears run at this tensor-parallel size."""
        return self.chunks.get(unit, {}).get(tp, 1)

    def token_split(self, unit: str, tp: int) -> TokenSplit:
        """Return how a TP group of this size divides the unit's tokens."""
        return TokenSplit(self.has_sp(unit, tp), self.num_chunks(unit, tp))

    def batch_split(self, dp: Mapping[str, int], num_microbatches: Mapping[str, int] | None = None) -> BatchSplit:
        """Return data-parallel degrees with each unit's microbatches.

        Units that `num_microbatches` does not name have those that the recipe fixes, else the LLM's number.
        """
        num_llm = self.batches.global_batch // dp[LLM]
        chosen = {**self.encoder_microbatches, **(num_microbatches or {})}
        return tuple(UnitSplit(unit, degree, chosen.get(unit, num_llm)) for unit, degree in dp.items())

    def seconds_of(self, unit: str, tp: int, load: TokenLoad) -> float:
        """Return the seconds of all of a unit's layers for one microbatch, as far as the recipe fixes recomputation."""
        kinds: list[ComputeKind] = ["forward", "backward", "recompute"]
        split, num_kinds = self.token_split(unit, tp), 3 if self.recompute[unit] == "all" else 2
        return sum(
            count * self.costs.seconds(LayerWork(layer, tp, load, kind, input_grad, split))
            for (layer, input_grad), count in Counter(self._layer_kinds(unit)).items()
            for kind in kinds[: num_kinds if layer.trainable or input_grad else 1]
        )

    def unit_times(self, unit: str, tp: int, split: BatchSplit) -> UnitLayerTimes:
        """Return the seconds of the unit's layers for each microbatch."""
        key = (unit, tp, load_split(unit, split))
        return self._unit_times.get(key, partial(self._compute_unit_times, unit, tp, split))

    def forget_times(self) -> None:
        """Free what is kept of seconds of layers; it is computed again for whoever asks."""
        self._unit_times.clear()

    def _no_unit_times(self) -> RecentlyUsed[UnitLayerTimes]:
        return RecentlyUsed(self.budget.evaluation.max_kept_time_bytes, lambda times: times.by_kind.nbytes)

    def merged_times(self, unit: str, tp: int, num_merged: int) -> UnitLayerTimes:
        """Return the seconds of the unit's layers for microbatches that hold `num_merged` groups of the batch each.

        The groups are neighbours, which stands for however a plan arranges them. Unless the recipe recomputes all
        layers, `RECOMPUTE` may be left out.
        """
        undivided = self.loads.undivided
        if num_merged == 1:
            return self.unit_times(unit, tp, undivided)
        loads = self.loads.of_unit(unit, undivided).merged(num_merged)
        return self._times_of_loads(unit, tp, undivided, loads, with_recompute=self.recompute[unit] == "all")

    def _compute_unit_times(self, unit: str, tp: int, split: BatchSplit) -> UnitLayerTimes:
        return self._times_of_loads(unit, tp, split, self.loads.of_unit(unit, split))

    def _times_of_loads(
        self, unit: str, tp: int, split: BatchSplit, loads: LoadArrays, with_recompute: bool = True
    ) -> UnitLayerTimes:
        numbers = self._kind_numbers[unit]
        of_all = LoadSeconds(loads, self.budget.loads)
        priced = _PricedLoads(
            tp,
            of_all,
            of_all if loads.targets is None else LoadSeconds(loads.of_targets(), self.budget.loads),
            self.context_group(split_of_unit(unit, split), tp),
            self.token_split(unit, tp),
            with_recompute,
        )
        by_kind = [self._layer_seconds(*layer_kind, priced) for layer_kind in numbers]
        kind = np.array([numbers[layer_kind] for layer_kind in self._layer_kinds(unit)], dtype=np.int64)
        return UnitLayerTimes(np.stack(by_kind), kind)

    def unit_costs(self, unit: str, tp: int, split: BatchSplit) -> UnitLayerCosts:
        """Return mean seconds and bytes of the unit's layers."""
        key = (unit, tp, load_split(unit, split))
        if key not in self._unit_costs:
            self._unit_costs[key] = self._compute_unit_costs(unit, tp, split)
        return self._unit_costs[key]

    def stage_seconds(self, graph: StageGraph) -> dict[StageId, StageSeconds]:
        """Return the seconds of every stage in each batch."""
        split = batch_split_of(graph)
        times = {mesh.unit: self.unit_times(mesh.unit, mesh.tp, split) for mesh in graph.meshes}
        cp = {mesh.unit: mesh.cp for mesh in graph.meshes}
        seconds = {
            stage.id: times[stage.id.unit].stage(stage.layers, stage.recompute).of_each_replica(cp[stage.id.unit])
            for stage in graph.stages
        }
        for stage_id in filter(graph.reruns_forward, seconds):
            forward, backward = seconds[stage_id].forward, seconds[stage_id].backward
            seconds[stage_id] = StageSeconds(forward, backward + forward)
        return seconds

    def bucket_seconds(self, graph: StageGraph) -> dict[Bucket, StageSeconds]:
        """Return the seconds of every bucket's layers in each batch, of stages with several buckets.

        The backward of a stage that reruns its forward begins with all of it, in its last bucket.
        """
        split, seconds = batch_split_of(graph), {}
        for stage in graph.stages:
            if len(stage.bucket_starts) == 1:
                continue
            mesh, first = graph.mesh(stage.id.unit), stage.layers[0]
            times = self.unit_times(stage.id.unit, mesh.tp, split)
            for bucket in stage_buckets(graph, stage.id):
                layers = (first + bucket.lo, first + bucket.hi)
                of_bucket = times.stage(layers, stage.recompute.intersection(range(*layers)))
                if graph.reruns_forward(stage.id) and layers[1] == stage.layers[1]:
                    whole = times.stage(stage.layers, ())
                    of_bucket = StageSeconds(of_bucket.forward, of_bucket.backward + whole.forward)
                seconds[bucket] = of_bucket.of_each_replica(mesh.cp)
        return seconds

    def tp_wait_shares(self, graph: StageGraph) -> dict[StageId, tuple[float, float]]:
        """Return the shares of each stage's forward and backward in which its ranks wait for collectives inside layers.

        Stages without tensor parallelism are left out. The shares are those of microbatches of mean size.
        """
        split, shares = batch_split_of(graph), {}
        for stage in graph.stages:
            unit, tp, (lo, hi) = stage.id.unit, graph.mesh(stage.id.unit).tp, stage.layers
            if tp == 1:
                continue
            seconds = self.unit_times(unit, tp, split).mean[lo:hi].copy()
            seconds[[layer not in stage.recompute for layer in range(lo, hi)], RECOMPUTE] = 0.0
            waiting = seconds * self._layer_waiting_shares(unit, tp)[lo:hi]
            backward = [FORWARD, BACKWARD, RECOMPUTE] if graph.reruns_forward(stage.id) else [BACKWARD, RECOMPUTE]
            shares[stage.id] = (
                _share(waiting[:, FORWARD].sum(), seconds[:, FORWARD].sum()),
                _share(waiting[:, backward].sum(), seconds[:, backward].sum()),
            )
        return shares

    def _layer_waiting_shares(self, unit: str, tp: int) -> FloatArray:
        """Return (L, 3) the share of each layer's passes of a mean microbatch that is waiting for its TP group."""
        if (unit, tp) not in self._waiting_shares:
            load, split = self.loads.of_unit(unit, self.loads.undivided).mean(), self.token_split(unit, tp)
            kinds = self._layer_kinds(unit)
            passes: tuple[ComputeKind, ...] = ("forward", "backward", "recompute")
            by_layer = {}
            for layer, input_grad in dict.fromkeys(kinds):
                works = [LayerWork(layer, tp, load, kind, input_grad, split) for kind in passes]
                by_layer[layer, input_grad] = [
                    _share(waiting_seconds(self.costs, work), self.costs.seconds(work)) for work in works
                ]
            self._waiting_shares[unit, tp] = np.array([by_layer[kind] for kind in kinds])
        return self._waiting_shares[unit, tp]

    def memory(self, graph: StageGraph, num_in_flight: Mapping[StageId, int] | None = None) -> dict[int, RankMemory]:
        """Return what every rank of the first replica group holds at its peak; all groups hold the same.

        num_in_flight: microbatches of each stage between forward and backward, where known; by default those of 1F1B.
        """
        in_flight = in_flight_microbatches(graph) if num_in_flight is None else num_in_flight
        return self.graph_memory(graph).by_rank(graph, in_flight, self._communicator_bytes(graph))

    def phase_memory(self, graph: StageGraph, phase: MemoryPhase) -> dict[int, RankMemory]:
        """Return what every rank of the first replica group holds at the peak of one phase of a step."""
        return self.graph_memory(graph).in_phase(graph, phase, self._communicator_bytes(graph))

    def graph_memory(self, graph: StageGraph) -> GraphMemory:
        """Return what counts the bytes of the graph's ranks, for the largest microbatches of its split."""
        split = batch_split_of(graph)
        return GraphMemory(
            self.shape,
            self.costs,
            self.precision,
            self.state_bytes,
            {mesh.unit: self.loads.largest(mesh.unit, split) for mesh in graph.meshes},
            frozenset(mesh.unit for mesh in graph.meshes if self.has_sp(mesh.unit, mesh.tp)),
        )

    def _communicator_bytes(self, graph: StageGraph) -> Mapping[int, float]:
        # Layers do not matter, and many layouts differ in nothing else.
        key = (graph.meshes, graph.edges, tuple(stage.trainable for stage in graph.stages))
        return self._communicators.get(key, partial(communicator_bytes, graph, self._machine))

    def min_message_bytes(self, unit: str, tp: int, split: BatchSplit) -> int:
        """Return the least bytes that a rank sends to the unit's next stage for a microbatch."""
        rows = int(self.loads.of_unit(unit, split).tokens.min())
        rows_of_rank = -(-rows // tp) if self.has_sp(unit, tp) else rows
        receiving = self.shape.unit(unit).layers[1:]
        elements = min((layer.input_elements(rows_of_rank, 0) for layer in receiving), default=0)
        return elements * ELEMENT_BYTES[self.precision]

    def model_flops(self, split: BatchSplit) -> float:
        """Return the FLOPs of a step that MFU counts, mean over the batches; padding does not count."""
        arrays = {entry.unit: self.loads.of_unit(entry.unit, split) for entry in split}
        if self.batches.pad:
            unpadded = [without_padding(batch) for batch in self.loads.lay_out(split)]
            arrays = {
                entry.unit: load_arrays(entry.unit, unpadded, entry.dp, entry.num_microbatches) for entry in split
            }
        totals = []
        for batch in range(len(self.batches.groups)):
            loads = {unit: array.total(batch) for unit, array in arrays.items()}
            totals.append(model_flops(self.shape, loads))
        return float(np.mean(totals))

    def _layer_kinds(self, unit: str) -> list[tuple[LayerShape, bool]]:
        """List each layer with whether its input needs a gradient: layers with equal entries cost the same."""
        return list(zip(self.shape.unit(unit).layers, self.input_grad[unit], strict=True))

    def number_of_kind(self, unit: str, layer: LayerShape, input_grad: bool) -> int:
        """Return the number of a kind of layer of the unit, see `UnitLayerTimes.by_kind`."""
        return self._kind_numbers[unit][layer, input_grad]

    @cached_property
    def _kind_numbers(self) -> Mapping[str, Mapping[tuple[LayerShape, bool], int]]:
        """By unit, its kinds of layers, numbered."""
        kinds = {unit.name: dict.fromkeys(self._layer_kinds(unit.name)) for unit in self.shape.units}
        return {unit: {kind: number for number, kind in enumerate(of_unit)} for unit, of_unit in kinds.items()}

    def context_group(self, split: UnitSplit, tp: int) -> ContextGroup:
        """Return the ranks that share sequences of a unit."""
        return ContextGroup.of_mesh(tp, split.cp, split.cp_method == "ring", self._machine.ranks_per_node)

    def _layer_seconds(self, layer: LayerShape, input_grad: bool, priced: "_PricedLoads") -> FloatArray:
        """Return (3, batches, dp, microbatches) seconds of one layer: forward, backward, recompute."""
        loads = priced.of_head if layer.kind == "head" else priced.of_all
        element_bytes = ELEMENT_BYTES[self.precision]

        def seconds(kind: ComputeKind, needs_grad: bool = True) -> FloatArray:
            # Splits arrange the same groups of the batch, so that the LLM's loads come again and again.
            key = layer, priced.tp, kind, needs_grad, priced.token_split, priced.group
            known = self._known_seconds.setdefault(key, {})
            if len(known) > MAX_KNOWN_LOADS:
                known.clear()

            def of_load(load: TokenLoad) -> float:
                seconds_of_load = known.get(load)
                if seconds_of_load is None:
                    work = LayerWork(layer, priced.tp, load, kind, needs_grad, priced.token_split)
                    seconds_of_load = self.costs.seconds(work)
                    seconds_of_load += context_seconds(work, self.costs, priced.group, element_bytes)
                    known[load] = seconds_of_load
                return seconds_of_load

            of_replicas, cp = loads.of(of_load), priced.group.cp
            if cp == 1:
                return of_replicas
            num_batches, num_replicas, num_microbatches = of_replicas.shape
            return np.asarray(of_replicas.reshape(num_batches, num_replicas // cp, cp, num_microbatches).max(axis=2))

        forward = seconds("forward", input_grad)
        nothing = np.zeros_like(forward)
        if not (layer.trainable or input_grad):
            return np.stack([forward, nothing, nothing])
        recompute = seconds("recompute") if priced.with_recompute else nothing
        return np.stack([forward, seconds("backward", input_grad), recompute])

    def _compute_unit_costs(self, unit: str, tp: int, split: BatchSplit) -> UnitLayerCosts:
        times = self.unit_times(unit, tp, split)
        of_unit = split_of_unit(unit, split)
        num_replicas, load = of_unit.dp * of_unit.cp, self.loads.largest(unit, split)
        kinds = self._layer_kinds(unit)
        known = {
            (layer, input_grad): self._layer_bytes(unit, layer, input_grad, tp, num_replicas, load)
            for layer, input_grad in dict.fromkeys(kinds)
        }
        state, kept, saved, working, recompute_working, inputs = np.array([known[k] for k in kinds], np.float64).T
        mean, is_fixed = times.mean, self.recompute[unit] == "all"
        backward = mean[:, BACKWARD] + is_fixed * mean[:, RECOMPUTE]
        return UnitLayerCosts(
            seconds=mean[:, FORWARD] + backward,
            backward_seconds=backward,
            recompute_seconds=mean[:, RECOMPUTE] * (1 - is_fixed),
            state_bytes=state,
            kept_bytes=kept,
            saved_bytes=saved,
            working_bytes=working,
            recompute_working_bytes=recompute_working,
            input_bytes=inputs,
            parameters=self._trained_parameters(unit, tp),
            kind=times.kind,
        )

    def _layer_bytes(
        self, unit: str, layer: LayerShape, input_grad: bool, tp: int, num_replicas: int, load: TokenLoad
    ) -> tuple[float, ...]:
        """Return state, kept, saved, working, working if recomputed, and input bytes: see `UnitLayerCosts`."""
        mode, sp = self.recompute[unit], self.has_sp(unit, tp)

        def kept_bytes(recompute: bool) -> int:
            held = RankLayer(layer, tp, input_grad, recompute, sp)
            return layer_activation_bytes(held, load, self.costs, self.precision)

        def working(recompute: bool) -> int:
            held = RankLayer(layer, tp, input_grad, recompute, sp)
            return layer_working_bytes(held, load, self.costs, self.precision)

        full, recomputed = kept_bytes(False), kept_bytes(True)
        return (
            sum(layer_state(layer, tp, num_replicas, self.state_bytes)),
            recomputed if mode == "all" else full,
            max(full - recomputed, 0) if mode == "auto" else 0,
            working(mode == "all"),
            working(mode != "none"),
            message_bytes(RankLayer(layer, tp, input_grad, sp=sp), load, self.precision),
        )

    def _trained_parameters(self, unit: str, tp: int) -> FloatArray:
        layers = self.shape.unit(unit).layers
        return np.array([num_trained_parameters(layer, tp) for layer in layers], dtype=np.float64)


class _PricedLoads(NamedTuple):
    """Loads of a unit, and what their seconds depend on besides layers."""

    tp: int
    of_all: LoadSeconds
    of_head: LoadSeconds  # of the LLM's targets
    group: ContextGroup
    token_split: TokenSplit
    with_recompute: bool


def _span_working(working: FloatArray, kept: FloatArray, inputs: FloatArray) -> FloatArray:
    """Return (L + 1, L + 1) the most working bytes of a layer in [lo, hi), plus the messages at both ends.

    They come on top of what the span keeps. By then the layers behind have freed their part: see `stage_working_bytes`.
    """
    num_layers = len(working)
    nbytes = np.zeros((num_layers + 1, num_layers + 1))
    most = np.zeros(num_layers)  # by lo, of spans that end before the layer
    for layer in range(num_layers):
        most[: layer + 1] = np.maximum(most[: layer + 1] - kept[layer], working[layer])
        nbytes[: layer + 1, layer + 1] = most[: layer + 1] + inputs[: layer + 1] + inputs[layer]
    return nbytes


def _share(part_s: float, whole_s: float) -> float:
    """Return the share of a pass; 0 of one that does nothing."""
    return float(part_s / whole_s) if whole_s else 0.0
