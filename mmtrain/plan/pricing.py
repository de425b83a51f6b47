"""What layers cost on the drawn batches: for cutting stages, for lower bounds and for the memory rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from mmtrain.costs import (
    CostModel,
    HeldLayers,
    Precision,
    RankMemory,
    TokenLoad,
    model_flops,
    rank_memory,
    upstream_trains,
)
from mmtrain.costs.memory import input_bytes, kept_bytes, layer_state, layer_working
from mmtrain.models.shape import LayerShape, ModelShape
from mmtrain.plan.batches import BatchSample
from mmtrain.plan.graph import graph_of
from mmtrain.plan.layout import MeshSize, disaggregated
from mmtrain.program.builder import in_flight
from mmtrain.program.graph import LLM, Microbatch, StageGraph, StageId
from mmtrain.program.loads import StepLoads, step_loads

FloatArray = npt.NDArray[np.float64]
UNSEEN = 1.1  # of the largest microbatch drawn: room for what three batches of a run do not show
DataParallel = tuple[tuple[str, int], ...]  # (unit, dp) in the order of the model's units


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one stage for every batch, replica and microbatch: (batches, dp, microbatches) each."""

    forward: FloatArray
    backward: FloatArray  # recompute included

    @cached_property
    def busy(self) -> FloatArray:
        """(batches, dp) seconds each replica's ranks work on the stage in a step."""
        return np.asarray((self.forward + self.backward).sum(axis=2))

    @cached_property
    def least_forward(self) -> FloatArray:
        """(batches,) seconds of the shortest forward."""
        return np.asarray(self.forward.min(axis=(1, 2)))

    @cached_property
    def least_backward(self) -> FloatArray:
        """(batches,) seconds of the shortest backward."""
        return np.asarray(self.backward.min(axis=(1, 2)))


@dataclass(frozen=True)
class Line:
    """Consecutive layers that are cut together, of one unit or of all."""

    seconds: FloatArray  # (L,) of one microbatch: forward, backward and recompute
    state_bytes: FloatArray  # (L,) parameters, gradients, optimizer
    kept_bytes: FloatArray  # (L,) activations that one microbatch leaves behind
    working_bytes: FloatArray  # (L,) what lives only while the layer is computed
    input_bytes: FloatArray  # (L,) hidden states that enter the layer

    @classmethod
    def join(cls, lines: Sequence["Line"]) -> "Line":
        """All units' layers one after another."""
        columns = ([getattr(line, f.name) for line in lines] for f in fields(cls))
        return cls(*(np.concatenate(column) for column in columns))


@dataclass(frozen=True)
class Pricing:
    """Costs of a model on drawn batches; what is asked twice is computed once."""

    shape: ModelShape
    costs: CostModel
    precision: Precision
    batches: BatchSample
    seq_len: int
    recompute: Mapping[str, bool]  # by unit
    encoder_microbatches: Mapping[str, int] = field(default_factory=dict)  # of encoders whose number the recipe fixes
    sp: Mapping[str, bool] = field(default_factory=dict)  # units with sequence parallelism, where tp is above 1
    _loads: dict[DataParallel, list[StepLoads]] = field(default_factory=dict, repr=False)
    _prefix: dict[tuple[str, int, DataParallel], FloatArray] = field(default_factory=dict, repr=False)
    _stages: dict[tuple[str, int, DataParallel, tuple[int, int]], StageSeconds] = field(
        default_factory=dict, repr=False
    )
    _lines: dict[tuple[str, int, DataParallel], Line] = field(default_factory=dict, repr=False)

    def loads(self, dp: DataParallel) -> list[StepLoads]:
        """Loads of every drawn batch under these data-parallel sizes."""
        if dp not in self._loads:
            num_microbatches = self.num_microbatches(dp)
            # Loads depend on nothing but dp: any graph with these sizes will do.
            sizes = {name: MeshSize(1, 1, n) for name, n in dp}
            cuts = {u.name: (0, len(u.layers)) for u in self.shape.units}
            units = disaggregated(sizes, cuts, dict.fromkeys(sizes, False))
            graph = graph_of(units, num_microbatches, self.shape)
            self._loads[dp] = [step_loads(graph, meta) for meta in self.batches.lay_out(dict(dp), num_microbatches)]
        return self._loads[dp]

    def num_microbatches(self, dp: DataParallel) -> dict[str, int]:
        """Microbatches of each replica, by unit: as many as the LLM's need for the global batch, or a fixed number."""
        return dict.fromkeys(dict(dp), self.batches.global_batch // dict(dp)[LLM]) | dict(self.encoder_microbatches)

    def line(self, unit: str, tp: int, dp: DataParallel) -> Line:
        """The unit's layers as they are cut: mean seconds, and bytes for the largest microbatch."""
        key = (unit, tp, dp)
        if key not in self._lines:
            total = self._prefix_sums(unit, tp, dp).sum(axis=1).mean(axis=(1, 2, 3))
            layers, needs = self.shape.unit(unit).layers, upstream_trains(self.shape)[unit]
            load, again, sp = self.largest_load(unit, dp), self.recompute[unit], self.sp.get(unit, False)
            kept = [
                kept_bytes(layer, tp, load, again, self.costs, self.precision, input_grad=needed, sp=sp)
                for layer, needed in zip(layers, needs, strict=True)
            ]
            self._lines[key] = Line(
                seconds=np.diff(total),
                state_bytes=np.array([sum(layer_state(x, tp, dict(dp)[unit], self.precision)) for x in layers]),
                kept_bytes=np.array(kept, dtype=np.float64),
                working_bytes=np.array(
                    [layer_working(x, tp, load, again, self.costs, self.precision, sp=sp) for x in layers], np.float64
                ),
                input_bytes=np.array([input_bytes(x, load, self.precision) for x in layers], np.float64),
            )
        return self._lines[key]

    def layer_seconds(self, unit: str, tp: int, dp: DataParallel) -> FloatArray:
        """(L, 2) mean seconds of a microbatch's forward, and backward with recompute, in each of the unit's layers."""
        return np.asarray(np.diff(self._prefix_sums(unit, tp, dp).mean(axis=(2, 3, 4)), axis=0))

    def stage_seconds(self, graph: StageGraph) -> dict[StageId, StageSeconds]:
        """What every stage costs in each batch."""
        dp = sizes_of(graph)
        return {s.id: self._seconds_of(s.id.unit, graph.mesh(s.id.unit).tp, dp, s.layers) for s in graph.stages}

    def memory(self, graph: StageGraph, alive: Mapping[StageId, int] | None = None) -> dict[int, RankMemory]:
        """What every rank of the first replica group holds at most; all groups hold the same.

        alive: microbatches that each stage holds between forward and backward at most; by default those of 1F1B.
        """
        needs, alive = upstream_trains(self.shape), in_flight(graph) if alive is None else alive
        held: dict[int, list[HeldLayers]] = {}
        for stage in graph.stages:
            mesh, (lo, hi) = graph.mesh(stage.id.unit), stage.layers
            part = HeldLayers(
                layers=self.shape.unit(stage.id.unit).layers[lo:hi],
                input_grad=needs[stage.id.unit][lo:hi],
                recompute=tuple(i in stage.recompute for i in range(lo, hi)),
                tp=mesh.tp,
                dp=mesh.dp,
                in_flight=alive[stage.id],
                load=self.largest_load(stage.id.unit, sizes_of(graph)),
                sp=self.sp.get(stage.id.unit, False),
            )
            for rank in chain.from_iterable(stage.lanes[: mesh.dp // graph.num_groups]):
                held.setdefault(rank, []).append(part)
        return {r: rank_memory(parts, self.costs, self.precision, graph.tied_embeddings) for r, parts in held.items()}

    def largest_load(self, unit: str, dp: DataParallel) -> TokenLoad:
        """The largest microbatch to make room for: a little more than the largest drawn, which few batches exceed.

        The LLM's never exceed `seq_len`, and may hold the data's longest sample alone.
        """
        seen = [load for loads in self.loads(dp) for mb, load in loads.loads.items() if mb.unit == unit]
        largest = max(seen, key=lambda load: load.tokens)
        if unit != LLM:
            return _scaled(largest, UNSEEN)
        longest = min(self.seq_len, self._longest)
        packed = _scaled(largest, min(UNSEEN, self.seq_len / max(1, largest.tokens)))
        return max(packed, TokenLoad(longest, longest**2, longest, 1), key=lambda load: (load.tokens, load.sum_sq))

    @cached_property
    def _longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.batches.lengths.tokens.max())

    def model_flops(self, dp: DataParallel) -> float:
        """FLOPs that MFU counts, mean over the batches."""
        totals = []
        for loads in self.loads(dp):
            sums: dict[str, TokenLoad] = {}
            for mb, load in loads.loads.items():
                sums[mb.unit] = sums.get(mb.unit, TokenLoad(0, 0, 0, 0)) + load
            totals.append(model_flops(self.shape, sums))
        return float(np.mean(totals))

    def _seconds_of(self, unit: str, tp: int, dp: DataParallel, layers: tuple[int, int]) -> StageSeconds:
        key = (unit, tp, _deciding(unit, dp), layers)
        if key not in self._stages:
            prefix = self._prefix_sums(unit, tp, dp)
            self._stages[key] = StageSeconds(*(prefix[layers[1]] - prefix[layers[0]]))
        return self._stages[key]

    def _prefix_sums(self, unit: str, tp: int, dp: DataParallel) -> FloatArray:
        """(L + 1, 2, batches, dp, microbatches) seconds of layers [0, l): forward, and backward with recompute."""
        key = (unit, tp, _deciding(unit, dp))
        if key not in self._prefix:
            replicas, indices = range(dict(dp)[unit]), range(self.num_microbatches(dp)[unit])
            grid = [[[b.loads[Microbatch(unit, r, i)] for i in indices] for r in replicas] for b in self.loads(dp)]
            self._prefix[key] = self._sum_layers(unit, tp, grid)
        return self._prefix[key]

    def _sum_layers(self, unit: str, tp: int, grid: Sequence[Sequence[Sequence[TokenLoad]]]) -> FloatArray:
        layers, needs = self.shape.unit(unit).layers, upstream_trains(self.shape)[unit]
        known: dict[tuple[LayerShape, bool], FloatArray] = {}
        for key in zip(layers, needs, strict=True):
            if key not in known:
                prices = [[[self._price(unit, *key, tp, load) for load in row] for row in batch] for batch in grid]
                known[key] = np.moveaxis(np.array(prices), -1, 0)
        rows = [known[key] for key in zip(layers, needs, strict=True)]
        total = np.cumsum(rows, axis=0)
        return np.concatenate([np.zeros_like(total[:1]), total])

    def _price(self, unit: str, layer: LayerShape, input_grad: bool, tp: int, load: TokenLoad) -> tuple[float, float]:
        """Seconds of a layer's forward, and of its backward with what that recomputes."""
        forward = self.costs.seconds(layer, tp, load, "forward", input_grad=input_grad)
        backward = self.costs.seconds(layer, tp, load, "backward", input_grad=input_grad)
        if self.recompute[unit] and (layer.trainable or input_grad):
            backward += self.costs.seconds(layer, tp, load, "recompute")
        return forward, backward


def _scaled(load: TokenLoad, factor: float) -> TokenLoad:
    """As many sequences, longer by a factor."""
    tokens, longest = round(load.tokens * factor), round(load.max_len * factor)
    return TokenLoad(tokens, round(load.sum_sq * factor**2), longest, load.num_sequences)


def sizes_of(graph: StageGraph) -> DataParallel:
    """The graph's data-parallel sizes, in the order of its units."""
    return tuple((m.unit, m.dp) for m in graph.meshes)


def _deciding(unit: str, dp: DataParallel) -> DataParallel:
    """The sizes that decide about a unit's loads: the LLM's do not depend on encoders."""
    return tuple(entry for entry in dp if entry[0] == LLM) if unit == LLM else dp
