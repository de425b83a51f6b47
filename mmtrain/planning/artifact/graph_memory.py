"""What the ranks of a stage graph hold at their peak: the search counts it to choose, and a run to start."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from mmtrain.costs import (
    CostModel,
    Hardware,
    HeldLayers,
    Precision,
    RankMemory,
    StateBytes,
    TokenLoad,
    input_grad_needed,
)
from mmtrain.costs.hardware import ELEMENT_BYTES
from mmtrain.costs.layer_arithmetic import feature_rows
from mmtrain.costs.rank_memory import (
    MEMORY_MARGIN,
    RankLayer,
    message_bytes,
    microbatch_activation_bytes,
    microbatch_host_bytes,
    rank_memory,
)
from mmtrain.models.shapes.layer_shape import expert_shard
from mmtrain.models.shapes.model_shape import ModelShape
from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.program.ir.channels import graph_channels
from mmtrain.program.ir.data_dependencies import shared_embedding_stages
from mmtrain.program.ir.graph import LLM, Edge, Microbatch, Stage, StageGraph, StageId, UnitMesh
from mmtrain.program.ir.program import Program
from mmtrain.program.schedules.builder import build_compute, in_flight_microbatches
from mmtrain.program.verify.check import MemoryLimit
from mmtrain.program.verify.deadlock import MIN_SEND_WINDOW
from mmtrain.program.verify.live_activations import peak_in_flight_by_stage

HOST_REMEDY = (
    "a larger cluster.host_memory_gib, if the node has it, offload: inputs or none, train.peer_copies.every: 0, or a "
    "smaller data.seq_len"
)
ROUNDING_BYTES = 1.0  # bytes are counted in floats where state is sharded


class MemoryPhase(NamedTuple):
    """A part of a step in which some of the stages compute."""

    num_in_flight: Mapping[StageId, int]  # microbatches of each stage between forward and backward, at most
    computed: Collection[StageId]  # the stages that compute; of others a rank holds state and activations alone
    without_gradients: Collection[StageId] = ()  # sharded stages before the first of their backwards in the step


@dataclass(frozen=True)
class GraphMemory:
    """Counts the bytes of ranks that run stages of one model."""

    shape: ModelShape
    costs: CostModel
    precision: Precision
    state_bytes: StateBytes
    largest_load: Mapping[str, TokenLoad]  # by unit, of the largest microbatch that memory is planned for
    sequence_parallel: Collection[str]  # units with sequence parallelism

    @cached_property
    def _input_grad(self) -> Mapping[str, tuple[bool, ...]]:
        return input_grad_needed(self.shape)

    def held_layers(self, graph: StageGraph, stage: Stage, num_in_flight: int) -> HeldLayers:
        """Return what one rank of a stage holds."""
        unit, mesh = stage.id.unit, graph.mesh(stage.id.unit)
        lo, hi = stage.layers
        return HeldLayers(
            layers=self.shape.unit(unit).layers[lo:hi],
            input_grad=self._input_grad[unit][lo:hi],
            recompute=tuple(layer in stage.recompute for layer in range(lo, hi)),
            tp=mesh.tp,
            dp=mesh.num_replicas,
            in_flight=num_in_flight,
            load=self.largest_load[unit],
            sp=unit in self.sequence_parallel,
            num_microbatches=mesh.num_microbatches,
            shard=mesh.shard,
            keeps_weights=mesh.keeps_weights,
            held_features=self._held_features(graph, stage),
            gathered_elements=self._gathered_elements(graph, stage),
            read_feature_bytes=self._read_feature_bytes(graph, stage),
            under_way_bytes=self._under_way_bytes(graph, stage, num_in_flight),
        )

    def _held_features(self, graph: StageGraph, stage: Stage) -> int:
        """Return how many microbatches of features a rank holds that runs its encoders before the LLM.

        They are those of the whole step, and of one microbatch more: the LLM's, which reads its share of them, and then
        the encoder's, whose gradients are put together.
        """
        is_encoder = self.shape.unit(stage.id.unit).kind == "encoder"
        return graph.mesh(stage.id.unit).num_microbatches + 1 if graph.encoder_first and is_encoder else 0

    def _gathered_elements(self, graph: StageGraph, stage: Stage) -> int:
        """Return how many numbers a rank holds while rows between a unit and the LLM, or their gradients, are gathered.

        They are those of all replicas, padded to the largest, and its own. A replica's LLM reads or makes no more such
        rows than it has tokens; how many those are is not known here, so all tokens count.
        """
        mesh, kind = graph.mesh(stage.id.unit), self.shape.unit(stage.id.unit).kind
        is_gathered = mesh.dispatch == "all" and mesh.exchange == "all_gather" and mesh.dp > 1
        if not is_gathered or kind == "llm":
            return 0
        ends = (mesh.unit, LLM) if kind == "encoder" else (LLM, mesh.unit)
        return (mesh.dp + 1) * self.largest_load[LLM].tokens * self.shape.edge(*ends).width

    def _read_feature_bytes(self, graph: StageGraph, stage: Stage) -> int:
        """Return the bytes of features that a microbatch of the LLM keeps until their gradients are made.

        Where encoders run first, a rank holds those of the whole step already.
        """
        if graph.encoder_first or not graph.needs_backward(stage.id):
            return 0
        return sum(self._message_bytes(graph, edge) for edge in graph.inputs(stage.id) if edge.crosses_units)

    def _under_way_bytes(self, graph: StageGraph, stage: Stage, num_in_flight: int) -> int:
        """Return the bytes of a stage's messages that a rank holds beside those of the microbatch it computes.

        For each channel a rank keeps the messages that it sent last (`program.verify.send_window`), and it posts a
        receive one action ahead. Gradients need no room of their own: a microbatch whose gradient was sent is no longer
        in flight, and it held more than its gradient.
        """
        nbytes = 0
        for edge in graph.outputs(stage.id):
            nbytes += self._num_kept(graph, edge, stage.id, edge.dst) * self._message_bytes(graph, edge)
        for edge in graph.inputs(stage.id):
            num_kept = 0
            if graph.carries_gradient(edge):
                num_ended = graph.mesh(stage.id.unit).num_microbatches - num_in_flight
                num_kept = min(self._num_kept(graph, edge, stage.id, edge.src), max(num_ended, 0))
            is_received = _num_peers(graph, edge, stage.id, edge.src) > 0
            nbytes += (num_kept + is_received) * self._message_bytes(graph, edge)
        return nbytes

    def _num_kept(self, graph: StageGraph, edge: Edge, sender: StageId, receiver: StageId) -> int:
        """Return of how many of the sender's microbatches a rank keeps what it sent along an edge."""
        num_peers = _num_peers(graph, edge, sender, receiver)
        return min(MIN_SEND_WINDOW * num_peers, graph.mesh(sender.unit).num_microbatches)

    def _message_bytes(self, graph: StageGraph, edge: Edge) -> int:
        """Return the bytes that pass along an edge for a microbatch of its destination, or back.

        Features are those of as many of the encoder's largest microbatches as one of the LLM reads on average, and no
        more rows than it has tokens. What a generator reads is little and not counted.
        """
        src, dst = graph.mesh(edge.src.unit), graph.mesh(edge.dst.unit)
        if not edge.crosses_units:
            first = graph.stage(edge.dst).layers[0]
            layer = RankLayer(self.shape.unit(dst.unit).layers[first], dst.tp, sp=dst.unit in self.sequence_parallel)
            return message_bytes(layer, self.largest_load[dst.unit], self.precision)
        if dst.unit != LLM:
            return 0
        projector = self.shape.unit(src.unit).layers[-1]
        num_rows = feature_rows(projector, self.largest_load[src.unit]) * src.num_replicas * src.num_microbatches
        num_rows = math.ceil(num_rows / (dst.num_replicas * dst.num_microbatches))
        num_rows = min(num_rows, self.largest_load[LLM].tokens)
        return num_rows * projector.out_width * ELEMENT_BYTES[self.precision]

    def by_rank(
        self, graph: StageGraph, num_in_flight: Mapping[StageId, int], communicator_bytes: Mapping[int, float]
    ) -> dict[int, RankMemory]:
        """Return what every rank of the first replica group holds at its peak; all groups hold the same.

        Args:
            graph: the stages.
            num_in_flight: microbatches of each stage between forward and backward, at most, in the whole step.
            communicator_bytes: by rank of the first replica group.
        """
        phases = memory_phases(graph, num_in_flight)
        first, *others = [self.in_phase(graph, phase, communicator_bytes) for phase in phases]
        for of_phase in others:
            first = {rank: max(first[rank], of_phase[rank], key=_total_bytes) for rank in first}
        return first

    def in_phase(
        self, graph: StageGraph, phase: MemoryPhase, communicator_bytes: Mapping[int, float]
    ) -> dict[int, RankMemory]:
        """Return what every rank of the first replica group holds at the peak of one phase of a step."""
        held = [
            replace(
                self.held_layers(graph, stage, phase.num_in_flight[stage.id]),
                is_computed=stage.id in phase.computed,
                has_gradients=stage.id not in phase.without_gradients,
            )
            for stage in graph.stages
        ]
        held_by_rank: dict[int, list[int]] = {}  # positions in `held`
        for position, stage in enumerate(graph.stages):
            replicas_per_group = graph.mesh(stage.id.unit).num_replicas // graph.num_groups
            for rank in chain.from_iterable(stage.tp_groups[:replicas_per_group]):
                held_by_rank.setdefault(rank, []).append(position)
        ranks_of: dict[tuple[int, ...], list[int]] = {}  # by what they hold: many ranks hold the same stages
        for rank, positions in held_by_rank.items():
            ranks_of.setdefault(tuple(positions), []).append(rank)
        memory: dict[int, RankMemory] = {}
        for positions_held, ranks in ranks_of.items():
            most_bytes = max(communicator_bytes.get(rank, 0.0) for rank in ranks)
            of_ranks = rank_memory(
                [held[position] for position in positions_held],
                self.costs,
                self.precision,
                self.state_bytes,
                graph.tied_embeddings,
                most_bytes,
            )
            memory |= dict.fromkeys(ranks, of_ranks)
        return memory

    def activation_limit(
        self,
        graph: StageGraph,
        memory: Mapping[int, RankMemory],
        memory_bytes: Mapping[int, float],
        host_memory_bytes: float,
    ) -> MemoryLimit:
        """Return what activations may take on each rank of `memory`: `memory_bytes` without state, buffers, margin.

        memory_bytes: that each rank may hold, as counted.

        Those in host memory may take what copies of state leave of `host_memory_bytes`.

        Where a step has several phases, gradients and buffers are those of the phase that has least: activations of all
        phases are compared with one limit.
        """
        nbytes, host_nbytes = {}, {}
        for stage in graph.stages:
            held = self.held_layers(graph, stage, num_in_flight=1)
            nbytes[stage.id] = microbatch_activation_bytes(held, self.costs, self.precision)
            host_nbytes[stage.id] = microbatch_host_bytes(held, self.costs, self.precision)

        def bytes_of(stage: StageId, mb: Microbatch) -> int:
            return nbytes[stage]

        phases = memory_phases(graph, dict.fromkeys(nbytes, 1))
        of_phases = [memory] if len(phases) == 1 else [self.in_phase(graph, phase, {}) for phase in phases]
        limit_bytes = {}
        for rank, of_rank in memory.items():
            fixed = of_rank.parameters + of_rank.optimizer
            fixed += min(of_phase[rank].gradients + of_phase[rank].buffers for of_phase in of_phases)
            unmanaged_bytes = of_rank.communicators + of_rank.inputs + of_rank.copies
            managed_bytes = (memory_bytes[rank] - unmanaged_bytes) / (1 + MEMORY_MARGIN)
            limit_bytes[rank] = math.floor(managed_bytes - fixed + ROUNDING_BYTES)
        if not any(host_nbytes.values()):
            return MemoryLimit(bytes_of, limit_bytes)
        host_limit_bytes = {
            rank: math.floor(host_memory_bytes - of_rank.host_copies) for rank, of_rank in memory.items()
        }
        on_host = MemoryLimit(lambda stage, mb: host_nbytes[stage], host_limit_bytes, "in host memory", HOST_REMEDY)
        return MemoryLimit(bytes_of, limit_bytes, host=on_host)


def memory_phases(graph: StageGraph, num_in_flight: Mapping[StageId, int]) -> list[MemoryPhase]:
    """Return the phases of a step whose peaks differ.

    Where encoders run first, each computes by itself before the LLM and behind it, and activations of one whose
    backward begins with another forward live only there. The LLM, and a generator, compute and hold activations in
    between, when encoders that are sharded have no gradients yet: each step makes them anew. Elsewhere a step has one
    phase.
    """
    stage_ids = [stage.id for stage in graph.stages]
    if not graph.encoder_first:
        return [MemoryPhase(num_in_flight, frozenset(stage_ids))]
    of_encoders = [stage_id for stage_id in stage_ids if stage_id.unit in graph.encoders]
    of_llm = frozenset(stage_ids).difference(of_encoders)
    rerun = [stage_id for stage_id in of_encoders if graph.reruns_forward(stage_id)]
    kept = {**num_in_flight, **dict.fromkeys(rerun, 0)}
    kept_by_encoders = {**kept, **dict.fromkeys(of_llm, 0)}
    sharded = [stage_id for stage_id in of_encoders if graph.mesh(stage_id.unit).shard is not None]
    phases = [MemoryPhase(kept, of_llm, without_gradients=sharded)]
    for stage_id in of_encoders:
        in_flight = {**kept_by_encoders, stage_id: num_in_flight[stage_id]}
        phases.append(MemoryPhase(in_flight, frozenset([stage_id])))
    return phases


def _num_peers(graph: StageGraph, edge: Edge, stage: StageId, other: StageId) -> int:
    """Return with how many other ranks a rank of `stage` exchanges messages along an edge; none where all is local."""
    of_stage, of_other = graph.stage(stage).tp_groups, graph.stage(other).tp_groups
    if of_stage == of_other or graph.dispatches(edge):
        return 0
    return len(of_other) // graph.num_groups if edge.crosses_units else 1


def _total_bytes(memory: RankMemory) -> float:
    return memory.total


def schedule_in_flight(graph: StageGraph, schedule: SchedulePlan) -> dict[StageId, int]:
    """Return the microbatches of each stage between forward and backward, at most, under a schedule."""
    if schedule.kind == "1f1b":
        return in_flight_microbatches(graph)
    return peak_in_flight(build_compute(graph, schedule.kind, schedule.order))


def peak_in_flight(program: Program) -> dict[StageId, int]:
    """Count from a program the microbatches of each stage between forward and backward, at most."""
    peak: dict[StageId, int] = {}
    for actions in program.actions.values():
        for stage, count in peak_in_flight_by_stage(program.graph, actions).items():
            peak[stage] = max(peak.get(stage, 0), count)
    return peak


def communicator_bytes(graph: StageGraph, machine: Hardware) -> Mapping[int, float]:
    """Return the bytes of communicators by rank of the first replica group; all groups hold the same."""
    if not machine.channel_bytes and not machine.communicator_bytes:
        return {}
    num_channels, num_collectives = count_communicators(graph)
    ranks = set(num_channels) | set(num_collectives)
    return {
        rank: num_channels[rank] * machine.channel_bytes + num_collectives[rank] * machine.communicator_bytes
        for rank in ranks
    }


def count_communicators(graph: StageGraph) -> tuple[Counter[int], Counter[int]]:
    """Count the communicators of each rank of the first replica group: of two ranks for messages, and of collectives.

    Collectives have one of all ranks, and one of each unit's TP group, of its replicas and of those that share
    sequences or hold experts together, unless these are alone. Embeddings that two stages hold have one more, and so
    have replicas with the same experts. Where weights are sharded, ranks that hold one copy together have one, and
    ranks with equal shards another; units on the same ranks share both. Experts that ranks hold apart have their own.
    Groups of pipeline ranks only generate text, and connect when they do.
    """
    num_channels, num_collectives = Counter[int](), Counter[int]()
    for _, _, sender, receiver in graph_channels(graph, graph.num_groups):
        num_channels.update((sender, receiver))
    tied = shared_embedding_stages(graph)
    first_stages = {mesh.unit: [s for s in graph.stages if s.id.unit == mesh.unit][: mesh.pp] for mesh in graph.meshes}
    for mesh in graph.meshes:
        per_group = mesh.num_replicas // graph.num_groups
        for stage in first_stages[mesh.unit]:  # those of later model chunks lie on the same ranks
            for tp_group in stage.tp_groups[:per_group]:
                num_collectives.update(dict.fromkeys(tp_group, _num_groups_of_axes(mesh)))
        for stage_id in tied if mesh.unit in {stage_id.unit for stage_id in tied} else ():
            for tp_group in graph.stage(stage_id).tp_groups[:per_group]:
                num_collectives.update(tp_group)
    first_group = set(num_collectives)
    sharded = {
        (mesh.ranks, mesh.tp * ep, expert_shard(mesh.shard, ep), ep)
        for mesh in graph.meshes
        for ep in (1, mesh.ep)
        if mesh.shard is not None
    }
    for ranks, stride, shard, _ in sharded:
        num_of_rank = (shard > 1) + (shard < len(ranks) // stride)
        num_collectives.update(dict.fromkeys(first_group.intersection(ranks), num_of_rank))
    if graph.world_size > 1:
        num_collectives.update(first_group)
    return num_channels, num_collectives


def _num_groups_of_axes(mesh: UnitMesh) -> int:
    """Return how many groups with other ranks a rank has along the axes of a unit's mesh."""
    has_same_experts = mesh.shard is None and 1 < mesh.ep < mesh.num_replicas
    return (mesh.tp > 1) + (mesh.num_replicas > 1) + (mesh.cp > 1) + (mesh.ep > 1) + has_same_experts
