"""What layers cost on the drawn batches: for cutting stages, for lower bounds and for the memory rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt

from mmtrain.costs import (
    CostModel,
    HeldLayers,
    Precision,
    RankMemory,
    TokenLoad,
    input_grad_needed,
    model_flops,
    num_parameters,
    rank_memory,
)
from mmtrain.costs.hardware import ELEMENT_BYTES
from mmtrain.costs.rank_memory import (
    RankLayer,
    hidden_state_bytes,
    layer_activation_bytes,
    layer_state,
    layer_working_bytes,
)
from mmtrain.models.model_shape import LayerShape, ModelShape
from mmtrain.plan.artifact.layout import MeshSize, disaggregated_units
from mmtrain.plan.artifact.plan_graph import build_stage_graph
from mmtrain.plan.estimate.load_arrays import LoadArrays, load_arrays, seconds_of_loads
from mmtrain.plan.estimate.sample_batches import SampledBatches
from mmtrain.program.ir.graph import LLM, StageGraph, StageId
from mmtrain.program.ir.step_loads import StepLoads, step_loads
from mmtrain.program.schedules.builder import in_flight_microbatches

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
UNSAMPLED_LOAD_FACTOR = 1.1  # of the largest microbatch drawn: room for what three batches of a run do not show
RecomputeMode = Literal["none", "all", "auto"]
BatchSplit = tuple[tuple[str, int, int], ...]  # (unit, dp, microbatches of a replica) in the order of the model's units

FORWARD, BACKWARD, RECOMPUTE = range(3)  # what a layer does with a microbatch: `again` is its recomputation


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one stage for every batch, replica and microbatch: (batches, dp, microbatches) each."""

    forward: FloatArray
    backward: FloatArray  # recompute included


@dataclass(frozen=True)
class UnitLayerTimes:
    """What the layers of a unit cost. Layers of one kind cost the same."""

    by_kind: FloatArray  # (K, 3, batches, dp, microbatches) seconds: forward, backward, again
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
        """Seconds of a stage that holds layers [lo, hi) and recomputes some of them."""
        counts = self.count[layers[1]] - self.count[layers[0]]
        again = np.bincount(self.kind[list(recompute)], minlength=len(self.by_kind))
        forward = np.tensordot(counts, self.by_kind[:, FORWARD], 1)
        backward = np.tensordot(counts, self.by_kind[:, BACKWARD], 1) + np.tensordot(
            again, self.by_kind[:, RECOMPUTE], 1
        )
        return StageSeconds(forward, backward)


@dataclass(frozen=True)
class UnitLayerCosts:
    """The layers of one unit as they are cut: mean seconds, and bytes for the largest microbatch."""

    seconds: FloatArray  # (L,) of one microbatch: forward and backward, and recompute where that is fixed
    again: FloatArray  # (L,) what choosing to recompute the layer adds
    state_bytes: FloatArray  # (L,) parameters, gradients, optimizer
    kept_bytes: FloatArray  # (L,) activations that one microbatch leaves behind
    saved_bytes: FloatArray  # (L,) of them, what choosing to recompute spares; 0 where there is no choice
    working_bytes: FloatArray  # (L,) what lives only while the layer is computed
    working_again: FloatArray  # (L,) the same if the layer is recomputed
    input_bytes: FloatArray  # (L,) hidden states that enter the layer
    parameters: FloatArray  # (L,) that train, on one rank
    kind: IntArray  # (L,) layers of one kind are alike in all of this


@dataclass(frozen=True)
class LayerCosts:
    """Costs of a model on drawn batches; what is asked twice is computed once."""

    shape: ModelShape
    costs: CostModel
    precision: Precision
    batches: SampledBatches
    seq_len: int
    recompute: Mapping[str, RecomputeMode]  # by unit
    encoder_microbatches: Mapping[str, int] = field(default_factory=dict)  # of units whose number the recipe fixes
    sp: Mapping[str, frozenset[int]] = field(default_factory=dict)  # by unit, the tp with sequence parallelism
    _loads: dict[BatchSplit, list[StepLoads]] = field(default_factory=dict, repr=False)
    _grids: dict[tuple[str, BatchSplit], LoadArrays] = field(default_factory=dict, repr=False)
    _prices: dict[tuple[str, int, BatchSplit], UnitLayerTimes] = field(default_factory=dict, repr=False)
    _lines: dict[tuple[str, int, BatchSplit], UnitLayerCosts] = field(default_factory=dict, repr=False)

    @cached_property
    def input_grad(self) -> Mapping[str, tuple[bool, ...]]:
        """By unit, per layer: does anything below it train."""
        return input_grad_needed(self.shape)

    def has_sp(self, unit: str, tp: int) -> bool:
        """Whether the tensor-parallel ranks of a unit share out the tokens between products."""
        return tp in self.sp.get(unit, ())

    def batch_split(self, dp: Mapping[str, int]) -> BatchSplit:
        """Data-parallel sizes with each unit's microbatches: those that the recipe fixes, else as many as the LLM's."""
        count = self.batches.global_batch // dp[LLM]
        return tuple((name, own, self.encoder_microbatches.get(name, count)) for name, own in dp.items())

    def loads(self, spread: BatchSplit) -> list[StepLoads]:
        """Loads and routes of every drawn batch under these data-parallel sizes."""
        if spread not in self._loads:
            # They depend on nothing but sizes and microbatches: any graph with these will do.
            sizes = {name: MeshSize(1, 1, dp) for name, dp, _ in spread}
            cuts = {u.name: (0, len(u.layers)) for u in self.shape.units}
            graph = build_stage_graph(disaggregated_units(sizes, cuts), num_microbatches_of(spread), self.shape)
            self._loads[spread] = [
                step_loads(graph, meta) for meta in self.batches.lay_out(_dp(spread), num_microbatches_of(spread))
            ]
        return self._loads[spread]

    def microbatch_loads(self, unit: str, spread: BatchSplit) -> LoadArrays:
        """Loads of a unit's microbatches alone, as arrays: (batches, dp, microbatches)."""
        key = (unit, _deciding(unit, spread))
        if key not in self._grids:
            metas = self.batches.lay_out(_dp(spread), num_microbatches_of(spread))
            for name, dp, num_microbatches in spread:
                found = load_arrays(name, metas, dp, num_microbatches)
                self._grids.setdefault((name, _deciding(name, spread)), found)
        return self._grids[key]

    def unit_times(self, unit: str, tp: int, spread: BatchSplit) -> UnitLayerTimes:
        """What the unit's layers cost for each microbatch."""
        key = (unit, tp, _deciding(unit, spread))
        if key not in self._prices:
            kinds = self._kinds(unit)
            distinct = list(dict.fromkeys(kinds))
            loads = self.microbatch_loads(unit, spread)
            by_kind = np.stack([np.stack([self._price(layer, needed, tp, loads, i) for i in range(3)])
                                for layer, needed in distinct])  # fmt: skip
            self._prices[key] = UnitLayerTimes(by_kind, np.array([distinct.index(k) for k in kinds], dtype=np.int64))
        return self._prices[key]

    def unit_costs(self, unit: str, tp: int, spread: BatchSplit) -> UnitLayerCosts:
        """The unit's layers as they are cut."""
        key = (unit, tp, spread)
        if key not in self._lines:
            self._lines[key] = self._line(unit, tp, spread)
        return self._lines[key]

    def stage_seconds(self, graph: StageGraph) -> dict[StageId, StageSeconds]:
        """What every stage costs in each batch."""
        spread = batch_split_of(graph)
        prices = {m.unit: self.unit_times(m.unit, m.tp, spread) for m in graph.meshes}
        return {s.id: prices[s.id.unit].stage(s.layers, s.recompute) for s in graph.stages}

    def memory(self, graph: StageGraph, alive: Mapping[StageId, int] | None = None) -> dict[int, RankMemory]:
        """What every rank of the first replica group holds at most; all groups hold the same.

        alive: microbatches in flight by stage, if they are known; else those of 1F1B are counted.
        """
        alive = in_flight_microbatches(graph) if alive is None else alive
        held: dict[int, list[HeldLayers]] = {}
        for stage in graph.stages:
            mesh, (lo, hi) = graph.mesh(stage.id.unit), stage.layers
            part = HeldLayers(
                layers=self.shape.unit(stage.id.unit).layers[lo:hi],
                input_grad=self.input_grad[stage.id.unit][lo:hi],
                recompute=tuple(i in stage.recompute for i in range(lo, hi)),
                tp=mesh.tp,
                dp=mesh.dp,
                in_flight=alive[stage.id],
                load=self.largest_load(stage.id.unit, batch_split_of(graph)),
                sp=self.has_sp(stage.id.unit, mesh.tp),
            )
            for rank in chain.from_iterable(stage.tp_groups[: mesh.dp // graph.num_groups]):
                held.setdefault(rank, []).append(part)
        alike: dict[tuple[int, ...], RankMemory] = {}  # ranks that hold the same, by what they hold
        found = {}
        for rank, parts in held.items():
            key = tuple(map(id, parts))
            if key not in alike:
                alike[key] = rank_memory(parts, self.costs, self.precision, graph.tied_embeddings)
            found[rank] = alike[key]
        return found

    def largest_load(self, unit: str, spread: BatchSplit) -> TokenLoad:
        """The largest microbatch to make room for: a little more than the largest drawn, which few batches exceed.

        The LLM's never exceed `seq_len`, and may hold the data's longest sample alone.
        """
        largest = self.microbatch_loads(unit, spread).largest()
        if unit != LLM:
            return _scaled(largest, UNSAMPLED_LOAD_FACTOR)
        longest = min(self.seq_len, self._longest)
        packed = _scaled(largest, min(UNSAMPLED_LOAD_FACTOR, self.seq_len / max(1, largest.tokens)))
        return max(packed, TokenLoad(longest, longest**2, longest, 1), key=lambda load: (load.tokens, load.sum_sq))

    @cached_property
    def _longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.batches.lengths.tokens.max())

    def least_message(self, unit: str, tp: int, spread: BatchSplit) -> int:
        """Bytes, at least, that a rank sends to the unit's next stage for a microbatch."""
        rows = int(self.microbatch_loads(unit, spread).tokens.min())
        own = -(-rows // tp) if self.has_sp(unit, tp) else rows
        behind = self.shape.unit(unit).layers[1:]
        return min((layer.input_elements(own, 0) for layer in behind), default=0) * ELEMENT_BYTES[self.precision]

    def model_flops(self, spread: BatchSplit) -> float:
        """FLOPs that MFU counts, mean over the batches."""
        num = len(self.batches.groups)
        totals = [
            model_flops(self.shape, {name: self.microbatch_loads(name, spread).total(batch) for name, _, _ in spread})
            for batch in range(num)
        ]
        return float(np.mean(totals))

    def tokens(self) -> float:
        """LLM tokens in a step, mean over the batches."""
        lengths = self.batches.lengths.tokens
        return float(np.mean([sum(int(lengths[g].sum()) for g in groups) for groups in self.batches.groups]))

    def _kinds(self, unit: str) -> list[tuple[LayerShape, bool]]:
        return list(zip(self.shape.unit(unit).layers, self.input_grad[unit], strict=True))

    def _price(self, layer: LayerShape, input_grad: bool, tp: int, loads: LoadArrays, what: int) -> FloatArray:
        if what == FORWARD:
            return seconds_of_loads(
                lambda load: self.costs.seconds(layer, tp, load, "forward", input_grad=input_grad), loads
            )
        if not (layer.trainable or input_grad):
            return np.zeros(loads.tokens.shape)
        if what == RECOMPUTE:
            return seconds_of_loads(lambda load: self.costs.seconds(layer, tp, load, "recompute"), loads)
        return seconds_of_loads(
            lambda load: self.costs.seconds(layer, tp, load, "backward", input_grad=input_grad), loads
        )

    def _line(self, unit: str, tp: int, spread: BatchSplit) -> UnitLayerCosts:
        prices, mode, sp = self.unit_times(unit, tp, spread), self.recompute[unit], self.has_sp(unit, tp)
        load, kinds = self.largest_load(unit, spread), self._kinds(unit)
        known: dict[tuple[LayerShape, bool], tuple[float, ...]] = {}
        for layer, needed in dict.fromkeys(kinds):
            kept, again = (
                layer_activation_bytes(RankLayer(layer, tp, needed, flag, sp), load, self.costs, self.precision)
                for flag in (False, True)
            )
            if mode == "all":
                kept = again
            known[layer, needed] = (
                sum(layer_state(layer, tp, _dp(spread)[unit], self.precision)),
                kept,
                max(kept - again, 0) if mode == "auto" else 0,
                *(
                    layer_working_bytes(RankLayer(layer, tp, needed, flag, sp), load, self.costs, self.precision)
                    for flag in (mode == "all", mode != "none")
                ),
                hidden_state_bytes(layer, load, self.precision),
            )
        state, kept, saved, working, working_again, inputs = np.array([known[key] for key in kinds], np.float64).T
        own, forced = prices.mean, mode == "all"
        return UnitLayerCosts(
            seconds=own[:, FORWARD] + own[:, BACKWARD] + forced * own[:, RECOMPUTE],
            again=own[:, RECOMPUTE] * (1 - forced),
            state_bytes=state,
            kept_bytes=kept,
            saved_bytes=saved,
            working_bytes=working,
            working_again=working_again,
            input_bytes=inputs,
            parameters=self._trained(unit, tp),
            kind=prices.kind,
        )

    def _trained(self, unit: str, tp: int) -> FloatArray:
        layers = self.shape.unit(unit).layers
        return np.array([num_parameters(layer, tp) if layer.trainable else 0 for layer in layers], dtype=np.float64)


def _scaled(load: TokenLoad, factor: float) -> TokenLoad:
    """As many sequences, longer by a factor."""
    tokens, longest = round(load.tokens * factor), round(load.max_len * factor)
    return TokenLoad(tokens, round(load.sum_sq * factor**2), longest, load.num_sequences)


def batch_split_of(graph: StageGraph) -> BatchSplit:
    """The graph's data-parallel sizes and microbatches, in the order of its units."""
    return tuple((m.unit, m.dp, m.num_microbatches) for m in graph.meshes)


def _dp(spread: BatchSplit) -> dict[str, int]:
    return {name: dp for name, dp, _ in spread}


def num_microbatches_of(spread: BatchSplit) -> dict[str, int]:
    """Microbatches of each replica, by unit."""
    return {name: num for name, _, num in spread}


def _deciding(unit: str, spread: BatchSplit) -> BatchSplit:
    """The sizes that decide about a unit's loads: the LLM's do not depend on encoders."""
    return tuple(entry for entry in spread if entry[0] == LLM) if unit == LLM else spread
