"""How long actions take: the protocol the simulator asks, and the answer from a cost model."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

from mmtrain.costs.types import CostModel, TokenLoad
from mmtrain.models.shape import LayerShape, ModelShape
from mmtrain.program.actions import (
    Backward,
    Collective,
    Compute,
    Forward,
    GatherParams,
    Partial,
    ReduceGrads,
    ReduceShared,
    Send,
    Share,
    Step,
)
from mmtrain.program.graph import LLM, Edge, Microbatch, Stage, StageGraph, StageId
from mmtrain.program.loads import StepLoads
from mmtrain.program.segments import direction
from mmtrain.program.wiring import Flow, held_stages, needs

GRADIENT_BYTES = 4  # gradients are summed in fp32 whatever the parameters are
NORM_BYTES = 4  # Step agrees on one number


Layers = Sequence[tuple[int, LayerShape, bool]]  # index in the unit, layer, whether it must hand gradients on


class Transport(NamedTuple):
    """What a message or collective takes and moves. Nothing is sent where `nbytes` is 0."""

    seconds: float
    nbytes: int


class Timing(Protocol):
    """What the simulator must know of a step."""

    def compute(self, action: Compute) -> float:
        """Seconds of a forward or backward, or some segments of it, on each rank of its lane.

        Recomputation and tensor parallelism are included.
        """
        ...

    def message(self, sender: int, action: Send) -> Transport:
        """Cost of a message that `sender` sends."""
        ...

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> Transport:
        """Cost of a collective of `group` (global ranks of all replica groups), to which `rank` belongs."""
        ...

    def link(self, ranks: tuple[int, ...]) -> Hashable:
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
        stage, load = self.graph.stage(action.stage), self.loads.loads[action.mb]
        if load.tokens == 0:
            return 0.0
        layers = self._layers[action.stage]
        if isinstance(action, Partial):
            layers = layers[action.lo : action.hi]
            if action.kind == "BI":
                return self._input_gradients(stage, layers, load)
            if action.kind == "BW":
                return self._backward(stage, layers, load) - self._input_gradients(stage, layers, load)
        forward = direction(action) == "F"
        return self._forward(stage, layers, load) if forward else self._backward(stage, layers, load)

    def message(self, sender: int, action: Send) -> Transport:
        """Rows of hidden states inside a unit, or the routed features between units; gradients are as large."""
        nbytes = self._flow_bytes(Flow(action.edge, action.src, action.dst, action.payload))
        same_node = self._same_node((sender, action.peer))
        return Transport(self.costs.transfer(nbytes, same_node) if nbytes else 0.0, nbytes)

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> Transport:
        """Gradients are reduce-scattered and parameters gathered, as the distributed optimizer does."""
        same_node, size = self._same_node(group), len(group)
        match action:
            case Share(edge, mb, payload):
                reader = Forward(edge.dst, mb) if payload == "activation" else Backward(edge.src, mb)
                nbytes = sum(self._flow_bytes(f) for f in needs(self.graph, reader) if f.edge == edge)
                seconds = self.costs.collective("broadcast", nbytes, size, same_node) if nbytes else 0.0
            case ReduceGrads(unit):
                nbytes = self._trained_parameters(rank, unit) * GRADIENT_BYTES
                seconds = self.costs.collective("reduce_scatter", nbytes, size, same_node)
            case GatherParams(unit):
                nbytes = self._trained_parameters(rank, unit) * self.element_bytes
                seconds = self.costs.collective("all_gather", nbytes, size, same_node)
            case ReduceShared():
                table = self.shape.unit(LLM).layers[0]
                nbytes = table.vocab * table.hidden // self.graph.mesh(LLM).tp * GRADIENT_BYTES
                seconds = self.costs.collective("all_reduce", nbytes, size, same_node)
            case Step():
                nbytes = NORM_BYTES
                seconds = self.costs.collective("all_reduce", nbytes, size, same_node) + self._optimizer_s
        return Transport(seconds, nbytes)

    def link(self, ranks: tuple[int, ...]) -> bool:
        """Whether they share a node."""
        return self._same_node(ranks)

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        """Bytes kept by the stage's layers; recomputed ones keep their input."""
        tp, load, node = self.graph.mesh(stage.unit).tp, self.loads.loads[mb], self.graph.stage(stage)
        return sum(
            self.costs.activation_bytes(layer, tp, load, at in node.recompute, input_grad=needed)
            for at, layer, needed in self._layers[stage]
        )

    def _forward(self, stage: Stage, layers: Layers, load: TokenLoad) -> float:
        tp = self.graph.mesh(stage.id.unit).tp
        return sum(self.costs.seconds(layer, tp, load, "forward", input_grad=needed) for _, layer, needed in layers)

    def _backward(self, stage: Stage, layers: Layers, load: TokenLoad) -> float:
        tp = self.graph.mesh(stage.id.unit).tp
        seconds = 0.0
        for at, layer, input_grad in layers:
            if layer.trainable or input_grad:
                seconds += self.costs.seconds(layer, tp, load, "backward", input_grad=input_grad)
                if at in stage.recompute:
                    seconds += self.costs.seconds(layer, tp, load, "recompute")
        return seconds

    @cached_property
    def _optimizer_s(self) -> float:
        """Seconds of the longest optimizer step of a rank."""
        ranks = {stage.lanes[0][0] for stage in self.graph.stages}  # other replicas and lanes do the same
        units = {mesh.unit: mesh.dp for mesh in self.graph.meshes}
        counts = [sum(self._trained_parameters(rank, name) // dp for name, dp in units.items()) for rank in ranks]
        return max(map(self.costs.optimizer, counts))

    def _input_gradients(self, stage: Stage, layers: Layers, load: TokenLoad) -> float:
        """Seconds of the part of a backward that those upstream wait for: what it takes if the layers are frozen."""
        frozen = [(at, replace(layer, trainable=False), needed) for at, layer, needed in layers]
        return self._backward(stage, frozen, load)

    @cached_property
    def _layers(self) -> dict[StageId, Layers]:
        """The layers of every stage."""
        held: dict[StageId, Layers] = {}
        for stage in self.graph.stages:
            layers, wanted = self.shape.unit(stage.id.unit).layers, self.input_grad[stage.id.unit]
            held[stage.id] = [(i, layers[i], wanted[i]) for i in range(*stage.layers)]
        return held

    def _flow_bytes(self, flow: Flow) -> int:
        return self._rows(flow.edge, flow) * self._width(flow.edge) * self.element_bytes

    def _rows(self, edge: Edge, flow: Flow) -> int:
        if edge.crosses_units:
            return self.loads.routes[edge.src.unit, edge.dst.unit].rows(flow.src, flow.dst)
        return self.loads.loads[flow.src].tokens

    def _width(self, edge: Edge) -> int:
        """Features of a row that flows along the edge."""
        if edge.crosses_units:
            return self.shape.edge(edge.src.unit, edge.dst.unit).width
        return self.shape.unit(edge.src.unit).layers[self.graph.stage(edge.src).layers[1] - 1].out

    def _trained_parameters(self, rank: int, unit: str) -> int:
        tp = self.graph.mesh(unit).tp
        held = [sid for sid, _ in held_stages(self.graph, rank) if sid.unit == unit]
        return sum(self.parameters(layer, tp) for sid in held for _, layer, _ in self._layers[sid] if layer.trainable)

    def _same_node(self, ranks: tuple[int, ...]) -> bool:
        return len({rank // self.ranks_per_node for rank in ranks}) == 1
