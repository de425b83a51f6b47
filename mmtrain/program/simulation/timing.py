"""How long actions take: the protocol that the simulator uses, and its implementation with a cost model."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from mmtrain.costs.collectives import GroupLayout
from mmtrain.costs.context_parallel_costs import ContextGroup, context_seconds
from mmtrain.costs.cost_model import (
    ComputeKind,
    CostModel,
    LayerWork,
    PieceCost,
    TokenLoad,
    TokenSplit,
    waiting_seconds,
)
from mmtrain.costs.gradient_reduction import BYTES_PER_GRADIENT, GradientReduction
from mmtrain.costs.hardware import ELEMENT_BYTES, Precision
from mmtrain.costs.layer_arithmetic import num_apart_parameters
from mmtrain.costs.sharded_layers import ShardedLayers, overlapped_seconds
from mmtrain.costs.time_spread import NO_SPREAD, TimeSpread
from mmtrain.models.shapes.layer_shape import expert_shard
from mmtrain.models.shapes.model_shape import LayerShape, ModelShape
from mmtrain.program.ir.actions import (
    Collective,
    Compute,
    Direction,
    Dispatch,
    GatherParams,
    Partial,
    ReduceGrads,
    ReduceShared,
    Send,
    Share,
    Step,
)
from mmtrain.program.ir.data_dependencies import Bucket, gradient_buckets, participants
from mmtrain.program.ir.graph import LLM, Edge, Microbatch, StageGraph, StageId, UnitMesh
from mmtrain.program.ir.segments import direction, finished_pass
from mmtrain.program.ir.step_loads import IntArray, Route, StepLoads
from mmtrain.program.simulation.muon_timing import muon_seconds
from mmtrain.program.simulation.straggler_waits import StragglerWaits, straggler_waits

NORM_BYTES = 4  # `Step` all-reduces one fp32 number


class StageLayer(NamedTuple):
    """A layer of a stage."""

    layer: LayerShape
    input_grad: bool  # whether its backward computes the gradient of its input
    recompute: bool


# What a layer takes on the replica that computes it longest: its direction, its layer -> seconds.
SlowestReplica = Callable[[Direction, StageLayer], float]


class StageContent(NamedTuple):
    """What the costs of a stage depend on. Stages of one `number` have the same layers and cost the same."""

    number: int
    tp: int
    layers: tuple[StageLayer, ...]
    split: TokenSplit


class _Cut(NamedTuple):
    """Seconds of some segments of a pass that stops behind them."""

    compute_s: float  # of all that runs until the pass stops
    collective_s: float  # of the collective that is left under way
    waiting_s: float  # of `compute_s`, for collectives between the segments


def _works(kind: Direction, held: StageLayer, content: StageContent, load: TokenLoad) -> Iterator[LayerWork]:
    """Yield what a rank does in a layer of a stage in one direction."""
    name: ComputeKind = "forward" if kind == "F" else "backward"
    work = LayerWork(held.layer, content.tp, load, name, held.input_grad, content.split)
    if kind == "F" or work.has_gradient:
        yield work
        if kind == "B" and held.recompute:
            yield LayerWork(held.layer, content.tp, load, "recompute", split=content.split)


class _ReducedPart(NamedTuple):
    """Parameters whose gradients the same ranks reduce."""

    num_parameters: int
    replicas: GroupLayout


class TransferCost(NamedTuple):
    """The time of a message or collective and the bytes it moves. Nothing is sent if `nbytes` is 0."""

    seconds: float
    nbytes: int
    posting_s: float = 0.0  # how long each end of a message keeps its rank from computing


NO_TRANSFER = TransferCost(0.0, 0)


class Timing(Protocol):
    """What the simulator must know of a step."""

    def compute(self, action: Compute) -> float:
        """Return the seconds of a forward or backward, or some segments of it, on each rank of its TP group.

        Recomputation and tensor parallelism are included.
        """
        ...

    def left_under_way(self, action: Partial) -> float:
        """Return the seconds of the collective that a part leaves under way; `compute` does not include them.

        Called for parts that do not finish their forward or backward, of stages whose layers are cut into pieces.
        """
        ...

    def tp_wait(self, action: Compute) -> float:
        """Return the seconds of `compute` in which the ranks wait for tensor-parallel collectives inside layers."""
        ...

    def message(self, sender: int, action: Send) -> TransferCost:
        """Return the cost of a message that `sender` sends."""
        ...

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        """Return the cost of a collective of `group` (global ranks of all replica groups), to which `rank` belongs."""
        ...

    def link_class(self, ranks: tuple[int, ...]) -> Hashable:
        """Return a key of the links among these ranks: with equal keys, moving the same bytes costs the same."""
        ...

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        """Return the bytes a rank keeps of a microbatch between the stage's forward and backward."""
        ...


@dataclass(frozen=True)
class ModelTiming:
    """The times of one step: a cost model's layers summed over stages, for the loads of the step.

    A stage's backward covers the layers from the first that trains or computes an input gradient; recomputed layers
    among them cost a forward again, and so do all layers of a stage that reruns its forward. A pass of a sharded unit
    is one of all replicas: each layer takes as long as on the rank with most work, and hides the weights that come and
    the gradients that leave meanwhile. `Step` all-reduces the gradient norm and runs the optimizer of the rank with
    most parameters (replicas share the parameters), since the end of the step waits for it. Replicas that share the
    sequences of a microbatch wait for each other in every block, so a pass takes as long as on the slowest of them.
    """

    graph: StageGraph
    shape: ModelShape
    costs: CostModel
    loads: StepLoads
    input_grad: Mapping[str, tuple[bool, ...]]  # unit -> by layer: whether anything below it trains
    trained_parameters: Callable[[LayerShape, int], int]  # (layer, tp) -> of the layer on one rank
    element_bytes: int  # of an activation and of a parameter
    ranks_per_node: int
    overlap_slowdown: float = 0.0  # share of a hidden collective's time that compute beside it loses
    rail_hop_s: float = 0.0  # see `Hardware.rail_hop_s`
    time_spread: TimeSpread = NO_SPREAD  # of the ranks
    slowest_rank_ratio: float = 1.0  # that `costs` hold, see `Hardware`
    grad_reduce: Precision = "fp32"  # in which replicas send each other gradients
    orthogonalizes: bool = False  # whether Muon trains the weights of linears

    @cached_property
    def waits(self) -> StragglerWaits:
        """What the ranks of the step wait for slower ones."""
        return straggler_waits(
            self.graph, self.time_spread, self.slowest_rank_ratio, costs_hold_tp_waits=self.costs.holds_tp_waits
        )

    def compute(self, action: Compute) -> float:
        """Return the seconds of a forward or backward, or of some of its segments."""
        content, mb = self._contents[action.stage], action.mb
        if self.graph.mesh(mb.unit).shard is not None:
            return self.sharded_pass(action)
        if isinstance(action, Partial):
            if self.graph.stage(action.stage).pieces:
                return self._cut(action).compute_s
            kind, lo, hi = action.kind, action.lo, action.hi
        else:
            kind, lo, hi = direction(action), 0, len(content.layers)
        key = (content.number, kind, lo, hi, mb.replica, mb.index)
        if key not in self._compute_s:
            sharing = self.graph.mesh(mb.unit).joint_replicas(mb.replica)
            parts = [self.loads.loads[Microbatch(mb.unit, replica, mb.index)] for replica in sharing]
            group = self._context_groups[mb.unit]
            passes = self._passes(action, content, kind, lo, hi)
            self._compute_s[key] = max(
                sum(self._part_seconds(way, run, content, load, group) for way, run in passes) for load in parts
            )
        return self._compute_s[key]

    def _passes(
        self, action: Compute, content: StageContent, kind: Direction, lo: int, hi: int
    ) -> list[tuple[Direction, Sequence[StageLayer]]]:
        """Return what runs in layers [lo, hi) of a pass: a backward may begin with another forward of all layers."""
        passes: list[tuple[Direction, Sequence[StageLayer]]] = [(kind, content.layers[lo:hi])]
        if kind == "B" and hi == len(content.layers) and self.graph.reruns_forward(action.stage):
            passes.insert(0, ("F", content.layers))
        return passes

    def _part_seconds(
        self, kind: Direction, layers: Sequence[StageLayer], content: StageContent, load: TokenLoad, group: ContextGroup
    ) -> float:
        """Return the seconds of one of the replicas that share a microbatch's sequences: all wait for the slowest."""
        if not load.tokens:
            return 0.0
        seconds = self._seconds(kind, layers, content, load)
        if group.cp == 1:
            return seconds
        exchanged_s = 0.0
        for held in layers:
            passes: tuple[ComputeKind, ...] = ("forward",)
            if kind == "B":
                passes = ("backward", "recompute") if held.recompute else ("backward",)
                passes = passes if held.layer.trainable or held.input_grad else ()
            for name in passes:
                work = LayerWork(held.layer, content.tp, load, name)
                exchanged_s += context_seconds(work, self.costs, group, self.element_bytes)
        return seconds + exchanged_s

    @cached_property
    def _context_groups(self) -> dict[str, ContextGroup]:
        """Return by unit the ranks that share sequences."""
        return {
            mesh.unit: ContextGroup.of_mesh(mesh.tp, mesh.cp, mesh.cp_method == "ring", self.ranks_per_node)
            for mesh in self.graph.meshes
        }

    def left_under_way(self, action: Partial) -> float:
        """Return the seconds of the collective at the end of the part's last segment."""
        return self._cut(action).collective_s

    def tp_wait(self, action: Compute) -> float:
        """Return the seconds of `compute` in which the ranks wait for tensor-parallel collectives inside layers."""
        content, mb = self._contents[action.stage], action.mb
        if content.tp == 1:
            return 0.0
        kind, lo, hi = direction(action), 0, len(content.layers)
        if isinstance(action, Partial):
            if self.graph.stage(action.stage).pieces:
                return self._cut(action).waiting_s
            lo, hi = action.lo, action.hi
        key = (content.number, kind, lo, hi, mb.replica, mb.index)
        if key not in self._waiting_s:
            load = self.loads.loads[mb]
            self._waiting_s[key] = sum(
                count * waiting_seconds(self.costs, work)
                for way, layers in self._passes(action, content, kind, lo, hi)
                for held, count in Counter(layers).items()
                for work in _works(way, held, content, load)
            )
        return self._waiting_s[key]

    def message(self, sender: int, action: Send) -> TransferCost:
        """Return the cost of sending hidden states inside a unit, or routed features between units.

        Gradients are as large as the activations.
        """
        rows = self._route(action.edge).rows(action.src, action.dst) if action.edge.crosses_units else None
        if rows == 0:  # most pairs of microbatches of two units
            return NO_TRANSFER
        same_node = sender // self.ranks_per_node == action.peer // self.ranks_per_node
        hops = not same_node and sender % self.ranks_per_node != action.peer % self.ranks_per_node
        if rows is not None:
            return self._transfer(self._row_bytes(action.edge, rows), same_node, hops)
        # Inside a unit, most messages of a step are alike: each microbatch passes many edges, there and back.
        key = (self._edge_numbers[action.edge], action.src.replica, action.src.index, same_node, hops)
        if key not in self._transfers:
            self._transfers[key] = self._transfer(self._bytes_inside(action.edge, action.src), same_node, hops)
        return self._transfers[key]

    def _transfer(self, nbytes: int, same_node: bool, hops: bool) -> TransferCost:
        """Return the cost of a message; `hops`: it goes to another rail of another node."""
        if not nbytes:
            return NO_TRANSFER
        hop_s = self.rail_hop_s if hops else 0.0
        return TransferCost(self.costs.transfer(nbytes, same_node) + hop_s, nbytes, self._posting_s)

    @cached_property
    def _transfers(self) -> dict[tuple[int, int, int, bool, bool], TransferCost]:
        """Cache of `message` inside units, by number of the edge, replica and index of the microbatch, and link."""
        return {}

    @cached_property
    def _edge_numbers(self) -> dict[Edge, int]:
        """Numbers of the edges inside units; over edges of one number, a microbatch takes as many bytes."""
        numbers: dict[tuple[str, LayerShape, int], int] = {}
        return {
            edge: numbers.setdefault((edge.src.unit, layer, self._num_slices(edge)), len(numbers))
            for edge, layer in self._entered.items()
        }

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        """Return the cost of a collective; gradients are reduce-scattered and parameters all-gathered (ZeRO-1).

        What else reducing gradients in bf16 takes delays their collective, or lengthens `Step`.
        """
        layout = self.link_class(group)
        match action:
            case Share(edge, mb, payload):
                nbytes = self._row_bytes(edge, self._route(edge).received_rows(mb, payload == "gradient"))
                seconds = self.costs.collective("broadcast", nbytes, layout) if nbytes else 0.0
            case Dispatch():
                return self._dispatch(action)
            case ReduceGrads():
                parts = self._reduced_parts(rank, action, group)
                nbytes = sum(self._reduction.nbytes(count) for count, _ in parts)
                seconds = sum(
                    self._reduction.rounding_seconds(*part) + self._reduction.seconds(*part) for part in parts
                )
            case GatherParams(unit, chunk, bucket):
                parts = self._reduced_parts(rank, ReduceGrads(unit, chunk, bucket), group)  # the same parameters
                nbytes = sum(count for count, _ in parts) * self.element_bytes
                seconds = sum(
                    self.costs.collective("all_gather", count * self.element_bytes, replicas)
                    for count, replicas in parts
                )
            case ReduceShared():
                table = self.shape.unit(LLM).layers[0]
                nbytes = table.vocab * table.hidden // self.graph.mesh(LLM).tp * BYTES_PER_GRADIENT
                seconds = self.costs.collective("all_reduce", nbytes, layout)
            case Step():
                nbytes = NORM_BYTES
                seconds = self.costs.collective("all_reduce", nbytes, layout) + self._adding_s + self._optimizer_s
        return TransferCost(seconds, nbytes)

    def _dispatch(self, action: Dispatch) -> TransferCost:
        """Return the cost of an exchange of all replicas. Nothing is sent where all rows stay on their rank."""
        if action not in self._dispatch_costs:
            mesh = self.graph.mesh(action.edge.src.unit)
            # The ranks at one place in the TP groups exchange with each other, and all places do the same at once.
            ranks, layout = np.array(mesh.ranks[:: mesh.tp]), self.link_class(mesh.ranks[:: mesh.tp])
            route = self.loads.routes[mesh.unit, action.edge.dst.unit]
            sender, receiver, rows = route.exchanged(action.src, action.dst, action.payload == "gradient")
            nbytes = rows * (self._widths[action.edge] * self.element_bytes)
            if (sender == receiver).all():
                cost = NO_TRANSFER
            elif mesh.exchange == "all_gather":
                gathered = mesh.dp * int(np.bincount(sender, nbytes).max())  # each replica's padded to the largest
                cost = TransferCost(self.costs.collective("all_gather", gathered, layout), gathered)
            else:
                cost = self._all_to_all(ranks[sender], ranks[receiver], nbytes * (sender != receiver), layout)
            self._dispatch_costs[action] = cost
        return self._dispatch_costs[action]

    def _all_to_all(self, sender: IntArray, receiver: IntArray, nbytes: IntArray, layout: GroupLayout) -> TransferCost:
        """Return the cost of an all-to-all, and the bytes that leave the rank which sends most.

        sender, receiver, nbytes: (pairs,) two ranks and what one sends to the other.

        It ends with the rank that sends or receives most.
        """
        same_node = sender // self.ranks_per_node == receiver // self.ranks_per_node
        most, largest = [], 0
        for on_link in (nbytes * same_node, nbytes * ~same_node):
            sent, received = (int(np.bincount(ranks, on_link).max(initial=0)) for ranks in (sender, receiver))
            largest += sent
            most.append(max(sent, received))
        on_node_bytes, off_node_bytes = most
        is_off_rail = ~same_node & (sender % self.ranks_per_node != receiver % self.ranks_per_node) & (nbytes > 0)
        hop_s = self.rail_hop_s if is_off_rail.any() else 0.0
        return TransferCost(self.costs.all_to_all(on_node_bytes, off_node_bytes, layout) + hop_s, largest)

    def link_class(self, ranks: tuple[int, ...]) -> GroupLayout:
        """Return how the ranks lie on nodes."""
        return GroupLayout.of_ranks(ranks, self.ranks_per_node)

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        """Return the bytes that the stage's layers keep; recomputed layers keep their input.

        The stage also keeps what came beside its input, in the same message.
        """
        content = self._contents[stage]
        key = (content.number, mb.replica, mb.index)
        if key not in self._kept_bytes:
            load, bytes_of = self.loads.loads[mb], self.costs.activation_bytes
            first = content.layers[0]
            num_carried = first.layer.carried_in if first.layer.trainable or first.input_grad else 0
            received = num_carried * first.layer.hidden * load.tokens * self.element_bytes
            self._kept_bytes[key] = received + sum(
                bytes_of(held.layer, content.tp, load, held.recompute, input_grad=held.input_grad)
                for held in content.layers
            )
        return self._kept_bytes[key]

    def sharded_pass(self, action: Compute, slowest: SlowestReplica | None = None) -> float:
        """Return the seconds of a forward or backward of all replicas of a sharded unit.

        slowest: where it is known, the seconds of a layer on the replica that computes it longest.
        """
        kind, mb = direction(action), action.mb
        seconds = self._gathered_pass(action.stage, kind, mb, slowest)
        if kind == "B" and self.graph.reruns_forward(action.stage):
            seconds += self._gathered_pass(action.stage, "F", mb, slowest, is_again=True)
        return seconds

    def _gathered_pass(
        self,
        stage: StageId,
        kind: Direction,
        mb: Microbatch,
        slowest: SlowestReplica | None,
        is_again: bool = False,
    ) -> float:
        """Return the seconds of a sharded stage's layers in one direction; is_again: a forward before its backward."""
        content, mesh = self._contents[stage], self.graph.mesh(mb.unit)
        key = (content.number, kind, int(is_again), len(content.layers), 0, mb.index)
        if key not in self._compute_s:
            layers = content.layers
            if kind == "B":
                layers = tuple(held for held in reversed(layers) if held.layer.trainable or held.input_grad)
            distinct = {held: number for number, held in enumerate(dict.fromkeys(layers))}
            number_of = [distinct[held] for held in layers]
            slowest = slowest or partial(self._slowest_replica, mb.unit, mb.index)
            prices = self._sharded_layers[mb.unit]
            is_last = mb.index == mesh.num_microbatches - 1
            # Kept weights are gathered by the first forward of a step alone.
            is_gathered = not mesh.keeps_weights or (kind == "F" and mb.index == 0 and not is_again)
            compute, gathers, reductions = (np.zeros(len(distinct)) for _ in range(3))
            for number, held in enumerate(distinct):
                compute[number] = slowest(kind, held)
                if is_gathered:
                    gathers[number] = prices.gather_seconds(held.layer)
                    compute[number] += prices.gather_copies_seconds(held.layer)
                if kind == "B":
                    reductions[number] = prices.reduce_seconds(held.layer, is_last)
                    compute[number] += prices.reduce_copies_seconds(held.layer, is_first=mb.index == 0)
                    compute[number] += prices.rounded_copies_seconds(held.layer)
            seconds = overlapped_seconds(
                compute[number_of], gathers[number_of], reductions[number_of], self.overlap_slowdown
            )
            self._compute_s[key] = float(seconds)
        return self._compute_s[key]

    def _slowest_replica(self, unit: str, index: int, kind: Direction, held: StageLayer) -> float:
        replicas, group = range(self.graph.mesh(unit).num_replicas), self._context_groups[unit]
        loads = [self.loads.loads[Microbatch(unit, replica, index)] for replica in replicas]
        content = next(content for stage, content in self._contents.items() if stage.unit == unit)
        return max(self._part_seconds(kind, (held,), content, load, group) for load in loads)

    @cached_property
    def _sharded_layers(self) -> dict[str, ShardedLayers]:
        """What prices the collectives of sharded units, by unit."""
        return {
            mesh.unit: ShardedLayers(
                self.costs,
                mesh.num_replicas,
                mesh.shard,
                self.element_bytes,
                self.ranks_per_node,
                mesh.tp,
                self.grad_reduce,
            )
            for mesh in self.graph.meshes
            if mesh.shard is not None
        }

    def _seconds(self, kind: Direction, layers: Sequence[StageLayer], content: StageContent, load: TokenLoad) -> float:
        return sum(self.costs.seconds(work) for held in layers for work in _works(kind, held, content, load))

    def _cut(self, action: Partial) -> "_Cut":
        """Return what some segments take, without the collective that they leave under way."""
        content, kind, mb = self._contents[action.stage], action.kind, action.mb
        key = (content.number, kind, mb.replica, mb.index)
        if key not in self._pieces:
            load = self.loads.loads[mb]
            stage = self.graph.stage(action.stage)
            pieces = [
                piece
                for held, num_pieces in zip(content.layers, stage.pieces, strict=True)
                for piece in self._of_layer(kind, held, num_pieces, content, load)
            ]
            seconds = [0.0, *accumulate(piece.total_s for piece in pieces)]
            computing = [0.0, *accumulate(piece.compute_s for piece in pieces)]
            self._pieces[key] = seconds, computing, pieces
        seconds, computing, pieces = self._pieces[key]
        seconds_in_pass = seconds[action.hi] - seconds[action.lo]
        waiting_s = seconds_in_pass - (computing[action.hi] - computing[action.lo])
        if finished_pass(self.graph, action):
            return _Cut(seconds_in_pass, 0.0, waiting_s)
        last = pieces[action.hi - 1 if kind == "F" else action.lo]
        cut_s = self.costs.cut() if self.loads.loads[mb].tokens else 0.0
        # Nothing that follows in the pass hides the collective.
        left_s = last.collective_s - last.hidden_s
        return _Cut(seconds_in_pass - left_s + cut_s, last.collective_s, waiting_s - left_s)

    def _of_layer(
        self, kind: Direction, held: StageLayer, num_pieces: int, content: StageContent, load: TokenLoad
    ) -> tuple[PieceCost, ...]:
        if num_pieces == 1:
            return (PieceCost(self._seconds(kind, (held,), content, load) if load.tokens else 0.0, 0.0),)
        name: ComputeKind = "forward" if kind == "F" else "backward"
        tp, split = content.tp, content.split
        return self.costs.pieces(LayerWork(held.layer, tp, load, name, input_grad=held.input_grad, split=split))

    @cached_property
    def _pieces(self) -> dict[tuple[int, Direction, int, int], tuple[list[float], list[float], list[PieceCost]]]:
        """By number of the stage, kind, replica and index: seconds and compute before each segment; the segments."""
        return {}

    @cached_property
    def _posting_s(self) -> float:
        return self.costs.posting()

    @property
    def _reduction(self) -> GradientReduction:
        return GradientReduction(self.costs, self.grad_reduce)

    @cached_property
    def _adding_s(self) -> float:
        """Seconds in which the rank with most gradients adds up those that replicas sent it."""
        if self.grad_reduce == "fp32":
            return 0.0
        seconds_of_ranks = dict.fromkeys(self._ranks_of_stages, 0.0)
        for rank in seconds_of_ranks:
            for reduction in gradient_buckets(self.graph, rank):
                parts = self._reduced_parts(rank, reduction, participants(self.graph, rank, reduction))
                seconds_of_ranks[rank] += sum(self._reduction.adding_seconds(*part) for part in parts)
        return max(seconds_of_ranks.values())

    @property
    def _ranks_of_stages(self) -> set[int]:
        """One rank of each stage: other replicas and TP ranks do the same."""
        return {stage.tp_groups[0][0] for stage in self.graph.stages}

    @cached_property
    def _optimizer_s(self) -> float:
        """Seconds of the longest optimizer step of a rank."""
        precision: Precision = "bf16" if self.element_bytes == ELEMENT_BYTES["bf16"] else "fp32"
        muon_s = dict.fromkeys(self._ranks_of_stages, 0.0)
        if self.orthogonalizes:
            muon_s = muon_seconds(self.graph, self.shape, self.costs, precision, self.ranks_per_node)
        counts = {rank: sum(self._num_updated(rank, mesh) for mesh in self.graph.meshes) for rank in muon_s}
        return max(self.costs.optimizer(count) + muon_s[rank] for rank, count in counts.items())

    def _num_updated(self, rank: int, mesh: UnitMesh) -> int:
        """Return the parameters of a unit that the optimizer of a rank updates."""
        num_replicas, num_same_experts = mesh.num_replicas, mesh.num_replicas // mesh.ep
        if mesh.shard is not None:
            num_replicas, num_same_experts = mesh.shard, expert_shard(mesh.shard, mesh.ep)
        held = [stage for stage, _ in self.graph.held_by(rank) if stage.unit == mesh.unit]
        apart = sum(sum(self._apart_by_layer(stage)) for stage in held)
        joint = sum(sum(self._trained_by_layer(stage)) for stage in held) - apart
        return joint // num_replicas + apart // num_same_experts

    @cached_property
    def _contents(self) -> dict[StageId, StageContent]:
        numbers: dict[object, int] = {}
        contents: dict[StageId, StageContent] = {}
        for stage in self.graph.stages:
            unit = stage.id.unit
            layers, input_grad = self.shape.unit(unit).layers, self.input_grad[unit]
            held = tuple(StageLayer(layers[i], input_grad[i], i in stage.recompute) for i in range(*stage.layers))
            number = numbers.setdefault((unit, held), len(numbers))
            mesh = self.graph.mesh(unit)
            contents[stage.id] = StageContent(number, mesh.tp, held, TokenSplit(stage.sp, mesh.tp_chunks))
        return contents

    @cached_property
    def _compute_s(self) -> dict[tuple[int, Direction, int, int, int, int], float]:
        """Cache of `compute`, by number of the stage, kind, segments, replica and index of the microbatch."""
        return {}

    @cached_property
    def _waiting_s(self) -> dict[tuple[int, Direction, int, int, int, int], float]:
        """Cache of `tp_wait`, with the keys of `compute`."""
        return {}

    @cached_property
    def _kept_bytes(self) -> dict[tuple[int, int, int], int]:
        """Cache of `activation_bytes`, by number of the stage, replica and index of the microbatch."""
        return {}

    def _route(self, edge: Edge) -> Route:
        return self.loads.routes[edge.src.unit, edge.dst.unit]

    def _row_bytes(self, edge: Edge, rows: int) -> int:
        """Return the bytes of rows that flow between units."""
        return rows * self._widths[edge] * self.element_bytes

    def _bytes_inside(self, edge: Edge, mb: Microbatch) -> int:
        """Return the bytes of a microbatch's hidden states over an edge inside its unit."""
        load = self.loads.loads[mb]
        tokens = -(-load.tokens // self._num_slices(edge))
        return self._entered[edge].input_elements(tokens, load.num_sequences) * self.element_bytes

    def _num_slices(self, edge: Edge) -> int:
        """Return 1; with sequence parallelism, the ranks of a TP group, each of which sends a slice of the tokens."""
        return self.graph.mesh(edge.src.unit).tp if self.graph.stage(edge.src).sp else 1

    @cached_property
    def _dispatch_costs(self) -> dict[Dispatch, TransferCost]:
        """Cache of `_dispatch`."""
        return {}

    @cached_property
    def _widths(self) -> dict[Edge, int]:
        """Width of a row that flows between units, by edge."""
        crossing = [edge for edge in self.graph.edges if edge.crosses_units]
        return {edge: self.shape.edge(edge.src.unit, edge.dst.unit).width for edge in crossing}

    @cached_property
    def _entered(self) -> dict[Edge, LayerShape]:
        """Layer that an edge inside a unit enters, by edge."""
        inside = [edge for edge in self.graph.edges if not edge.crosses_units]
        return {e: self.shape.unit(e.dst.unit).layers[self.graph.stage(e.dst).layers[0]] for e in inside}

    def _reduced_parts(self, rank: int, reduction: ReduceGrads, group: tuple[int, ...]) -> "list[_ReducedPart]":
        """Return what a rank reduces of a bucket: with all of `group`, and experts with those that hold the same."""
        joint, apart = self._num_reduced(rank, reduction)
        same_experts = group[:: self.graph.mesh(reduction.unit).ep]
        parts = [_ReducedPart(joint, self.link_class(group))]
        return [*parts, _ReducedPart(apart, self.link_class(same_experts))] if apart else parts

    def _num_reduced(self, rank: int, reduction: ReduceGrads) -> tuple[int, int]:
        """Return the parameters of a bucket whose gradients a rank reduces: all but experts apart, and these."""
        key = rank, reduction
        if key not in self._reduced:
            for of_rank, bucket in gradient_buckets(self.graph, rank).items():
                num_trained = sum(self._trained_by_layer(bucket.stage)[bucket.lo : bucket.hi])
                apart = sum(self._apart_by_layer(bucket.stage)[bucket.lo : bucket.hi])
                self._reduced[rank, of_rank] = num_trained - apart - self._counted_twice(bucket, num_trained), apart
        return self._reduced[key]

    @cached_property
    def _reduced(self) -> dict[tuple[int, ReduceGrads], tuple[int, int]]:
        """Cache of `_num_reduced`."""
        return {}

    def _counted_twice(self, bucket: Bucket, num_trained: int) -> int:
        """Return the parameters of a tied matrix at the head, if the rank also holds the embedding, which counts it."""
        if not self.graph.tied_embeddings or bucket.stage.unit != LLM or self.graph.mesh(LLM).pp > 1:
            return 0
        layers = self.shape.unit(LLM).layers
        if self.graph.stage(bucket.stage).layers[0] + bucket.hi < len(layers):
            return 0
        matrix = layers[-1].vocab * layers[-1].hidden // self.graph.mesh(LLM).tp
        return matrix if num_trained >= matrix else 0

    def _apart_by_layer(self, stage: StageId) -> tuple[int, ...]:
        """Return how many of `_trained_by_layer` belong to experts of which replicas hold different ones."""
        if stage not in self._apart:
            tp = self.graph.mesh(stage.unit).tp
            self._apart[stage] = tuple(num_apart_parameters(held.layer, tp) for held in self._contents[stage].layers)
        return self._apart[stage]

    @cached_property
    def _apart(self) -> dict[StageId, tuple[int, ...]]:
        """Cache of `_apart_by_layer`."""
        return {}

    def _trained_by_layer(self, stage: StageId) -> tuple[int, ...]:
        """Return how many parameters of each layer of a stage train on one rank."""
        if stage not in self._trained:
            tp = self.graph.mesh(stage.unit).tp
            layers = self._contents[stage].layers
            self._trained[stage] = tuple(self.trained_parameters(held.layer, tp) for held in layers)
        return self._trained[stage]

    @cached_property
    def _trained(self) -> dict[StageId, tuple[int, ...]]:
        """Cache of `_trained_by_layer`."""
        return {}
