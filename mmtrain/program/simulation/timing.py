"""How long actions take: the protocol the simulator asks, and the answer from a cost model."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

from mmtrain.costs.cost_model import ComputeKind, CostModel, PieceCost, TokenLoad
from mmtrain.models.model_shape import LayerShape, ModelShape
from mmtrain.program.ir.actions import (
    Backward,
    Collective,
    Compute,
    Forward,
    GatherParams,
    Partial,
    PartKind,
    ReduceGrads,
    ReduceShared,
    Send,
    Share,
    Step,
)
from mmtrain.program.ir.data_dependencies import Flow, input_flows
from mmtrain.program.ir.graph import LLM, Edge, Microbatch, StageGraph, StageId
from mmtrain.program.ir.segments import direction, finished_pass
from mmtrain.program.ir.step_loads import StepLoads

BYTES_PER_GRADIENT = 4  # gradients are summed in fp32 whatever the parameters are
NORM_BYTES = 4  # Step agrees on one number


class StageLayer(NamedTuple):
    """A layer of a stage."""

    layer: LayerShape
    input_grad: bool  # must hand gradients on
    recompute: bool


class StageContent(NamedTuple):
    """What a stage costs by: its layers and how they are shared out. Stages of one `number` cost the same."""

    number: int
    tp: int
    layers: tuple[StageLayer, ...]


class TransferCost(NamedTuple):
    """What a message or collective takes and moves. Nothing is sent where `nbytes` is 0."""

    seconds: float
    nbytes: int
    posting_s: float = 0.0  # for which each end of a message keeps its rank from computing


NO_TRANSFER = TransferCost(0.0, 0)


class Timing(Protocol):
    """What the simulator must know of a step."""

    def compute(self, action: Compute) -> float:
        """Seconds of a forward or backward, or some segments of it, on each rank of its TP group.

        Recomputation and tensor parallelism are included.
        """
        ...

    def left_under_way(self, action: Partial) -> float:
        """Seconds of the collective that a part leaves under way; `compute` is without it.

        Asked of parts that do not end their forward or backward, of stages whose layers are cut.
        """
        ...

    def message(self, sender: int, action: Send) -> TransferCost:
        """Cost of a message that `sender` sends."""
        ...

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        """Cost of a collective of `group` (global ranks of all replica groups), to which `rank` belongs."""
        ...

    def link_class(self, ranks: tuple[int, ...]) -> Hashable:
        """What messages and collectives among these ranks cost by, beside what they move: equal ones cost the same."""
        ...

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        """Bytes a rank keeps of a microbatch between the stage's forward and backward."""
        ...


@dataclass(frozen=True)
class ModelTiming:
    """Sums a cost model's layers over stages, for the loads of one step.

    A stage's backward covers the layers from the first that trains or must hand gradients on; recomputed layers among
    them pay a forward again. `Step` is the agreement on the gradient norm, and the optimizer of the rank with most
    parameters (replicas share them out), for which the step's end waits.
    """

    graph: StageGraph
    shape: ModelShape
    costs: CostModel
    loads: StepLoads
    input_grad: Mapping[str, tuple[bool, ...]]  # unit -> per layer: does anything below it train
    parameters: Callable[[LayerShape, int], int]  # (layer, tp) -> parameters of the layer on one rank
    element_bytes: int  # of an activation and of a parameter
    ranks_per_node: int

    def compute(self, action: Compute) -> float:
        """Seconds of a forward or backward, or of some of its layers."""
        content, mb = self._contents[action.stage], action.mb
        if isinstance(action, Partial):
            if self.graph.stage(action.stage).pieces:
                total, under_way = self._cut(action)
                return total - under_way
            kind, lo, hi = action.kind, action.lo, action.hi
        else:
            kind, lo, hi = direction(action), 0, len(content.layers)
        key = (content.number, kind, lo, hi, mb.replica, mb.index)
        if key not in self._known:
            load, layers = self.loads.loads[mb], content.layers[lo:hi]
            self._known[key] = self._seconds(kind, layers, content.tp, load) if load.tokens else 0.0
        return self._known[key]

    def left_under_way(self, action: Partial) -> float:
        """Seconds of the collective that ends the part's last segment."""
        return self._cut(action)[1]

    def message(self, sender: int, action: Send) -> TransferCost:
        """Rows of hidden states inside a unit, or the routed features between units; gradients are as large."""
        nbytes = self._flow_bytes(Flow(action.edge, action.src, action.dst, action.payload))
        same_node = sender // self.ranks_per_node == action.peer // self.ranks_per_node
        return TransferCost(self.costs.transfer(nbytes, same_node), nbytes, self._posting_s) if nbytes else NO_TRANSFER

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        """Gradients are reduce-scattered and parameters gathered, as the distributed optimizer does."""
        same_node, size = self._same_node(group), len(group)
        match action:
            case Share(edge, mb, payload):
                reader = Forward(edge.dst, mb) if payload == "activation" else Backward(edge.src, mb)
                nbytes = sum(self._flow_bytes(f) for f in input_flows(self.graph, reader) if f.edge == edge)
                seconds = self.costs.collective("broadcast", nbytes, size, same_node) if nbytes else 0.0
            case ReduceGrads(unit):
                nbytes = self._trained_parameters(rank, unit) * BYTES_PER_GRADIENT
                seconds = self.costs.collective("reduce_scatter", nbytes, size, same_node)
            case GatherParams(unit):
                nbytes = self._trained_parameters(rank, unit) * self.element_bytes
                seconds = self.costs.collective("all_gather", nbytes, size, same_node)
            case ReduceShared():
                table = self.shape.unit(LLM).layers[0]
                nbytes = table.vocab * table.hidden // self.graph.mesh(LLM).tp * BYTES_PER_GRADIENT
                seconds = self.costs.collective("all_reduce", nbytes, size, same_node)
            case Step():
                nbytes = NORM_BYTES
                seconds = self.costs.collective("all_reduce", nbytes, size, same_node) + self._optimizer_s
        return TransferCost(seconds, nbytes)

    def link_class(self, ranks: tuple[int, ...]) -> bool:
        """Whether they share a node."""
        return self._same_node(ranks)

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        """Bytes kept by the stage's layers; recomputed ones keep their input."""
        content = self._contents[stage]
        key = (content.number, mb.replica, mb.index)
        if key not in self._kept:
            load, bytes_of = self.loads.loads[mb], self.costs.activation_bytes
            self._kept[key] = sum(
                bytes_of(h.layer, content.tp, load, h.recompute, input_grad=h.input_grad) for h in content.layers
            )
        return self._kept[key]

    def _seconds(self, kind: PartKind, layers: Sequence[StageLayer], tp: int, load: TokenLoad) -> float:
        seconds = self.costs.seconds
        if kind == "F":
            return sum(seconds(h.layer, tp, load, "forward", input_grad=h.input_grad) for h in layers)
        if kind == "BI":  # what those upstream wait for: a backward of layers that are frozen
            layers = [h._replace(layer=replace(h.layer, trainable=False)) for h in layers]
        if kind == "BW":
            return self._seconds("B", layers, tp, load) - self._seconds("BI", layers, tp, load)
        total = 0.0
        for h in layers:
            if h.layer.trainable or h.input_grad:
                total += seconds(h.layer, tp, load, "backward", input_grad=h.input_grad)
                if h.recompute:
                    total += seconds(h.layer, tp, load, "recompute")
        return total

    def _cut(self, action: Partial) -> tuple[float, float]:
        """Seconds of some segments with all their collectives, and of the one that is left under way."""
        content, kind, mb = self._contents[action.stage], action.kind, action.mb
        assert kind in ("F", "B"), "a split backward is not cut inside its layers"
        key = (content.number, kind, mb.replica, mb.index)
        if key not in self._pieces:
            load = self.loads.loads[mb]
            stage = self.graph.stage(action.stage)
            each = [
                p
                for h, n in zip(content.layers, stage.pieces, strict=True)
                for p in self._of_layer(kind, h, n, content.tp, load, stage.sp)
            ]
            sums = [0.0, *accumulate(map(sum, each))]
            self._pieces[key] = sums, [piece.collective_s for piece in each]
        sums, collectives = self._pieces[key]
        last = action.hi - 1 if kind == "F" else action.lo
        return sums[action.hi] - sums[action.lo], 0.0 if finished_pass(self.graph, action) else collectives[last]

    def _of_layer(
        self, kind: PartKind, held: StageLayer, num_pieces: int, tp: int, load: TokenLoad, sliced: bool
    ) -> tuple[PieceCost, ...]:
        if num_pieces == 1:
            return (PieceCost(self._seconds(kind, (held,), tp, load) if load.tokens else 0.0, 0.0),)
        name: ComputeKind = "forward" if kind == "F" else "backward"
        return self.costs.pieces(held.layer, tp, load, name, input_grad=held.input_grad, sp=sliced)

    @cached_property
    def _pieces(self) -> dict[tuple[int, PartKind, int, int], tuple[list[float], list[float]]]:
        """Of a stage by number, kind, replica and index: seconds before each segment, and of its collective."""
        return {}

    @cached_property
    def _posting_s(self) -> float:
        return self.costs.posting()

    @cached_property
    def _optimizer_s(self) -> float:
        """Seconds of the longest optimizer step of a rank."""
        ranks = {stage.tp_groups[0][0] for stage in self.graph.stages}  # other replicas and TP groups do the same
        units = {mesh.unit: mesh.dp for mesh in self.graph.meshes}
        counts = [sum(self._trained_parameters(rank, name) // dp for name, dp in units.items()) for rank in ranks]
        return max(map(self.costs.optimizer, counts))

    @cached_property
    def _contents(self) -> dict[StageId, StageContent]:
        numbers: dict[object, int] = {}
        found: dict[StageId, StageContent] = {}
        for stage in self.graph.stages:
            unit = stage.id.unit
            layers, wanted = self.shape.unit(unit).layers, self.input_grad[unit]
            held = tuple(StageLayer(layers[i], wanted[i], i in stage.recompute) for i in range(*stage.layers))
            number = numbers.setdefault((unit, held), len(numbers))
            found[stage.id] = StageContent(number, self.graph.mesh(unit).tp, held)
        return found

    @cached_property
    def _known(self) -> dict[tuple[int, PartKind, int, int, int, int], float]:
        """Seconds so far asked for: of stages by number, kind, segments, replica and index of the microbatch."""
        return {}

    @cached_property
    def _kept(self) -> dict[tuple[int, int, int], int]:
        """Bytes of activations so far asked for, likewise."""
        return {}

    def _flow_bytes(self, flow: Flow) -> int:
        edge = flow.edge
        if edge.crosses_units:
            rows = self.loads.routes[edge.src.unit, edge.dst.unit].rows(flow.src, flow.dst)
            return rows * self._widths[edge] * self.element_bytes
        load, sharers = self.loads.loads[flow.src], 1
        if self.graph.stage(edge.src).sp:  # each rank of the TP group sends its own rows
            sharers = self.graph.mesh(edge.src.unit).tp
        return self._entered[edge].input_elements(-(-load.tokens // sharers), load.num_sequences) * self.element_bytes

    @cached_property
    def _widths(self) -> dict[Edge, int]:
        """Features of a row that flows between units."""
        crossing = [edge for edge in self.graph.edges if edge.crosses_units]
        return {edge: self.shape.edge(edge.src.unit, edge.dst.unit).width for edge in crossing}

    @cached_property
    def _entered(self) -> dict[Edge, LayerShape]:
        """The layer that an edge inside a unit enters."""
        inside = [edge for edge in self.graph.edges if not edge.crosses_units]
        return {e: self.shape.unit(e.dst.unit).layers[self.graph.stage(e.dst).layers[0]] for e in inside}

    def _trained_parameters(self, rank: int, unit: str) -> int:
        tp = self.graph.mesh(unit).tp
        held = [sid for sid, _ in self.graph.held_by(rank) if sid.unit == unit]
        return sum(
            self.parameters(h.layer, tp) for sid in held for h in self._contents[sid].layers if h.layer.trainable
        )

    def _same_node(self, ranks: tuple[int, ...]) -> bool:
        node = ranks[0] // self.ranks_per_node
        return all(rank // self.ranks_per_node == node for rank in ranks)
