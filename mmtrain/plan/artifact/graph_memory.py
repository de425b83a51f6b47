"""What the ranks of a stage graph hold at their peak: the search counts it to choose, and a run to start."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from mmtrain.costs import CostModel, HeldLayers, Precision, RankMemory, StateBytes, TokenLoad, input_grad_needed
from mmtrain.costs.rank_memory import MEMORY_MARGIN, microbatch_activation_bytes, rank_memory
from mmtrain.models.model_shape import ModelShape
from mmtrain.plan.artifact.plan import SchedulePlan
from mmtrain.program.ir.graph import LLM, Microbatch, Stage, StageGraph, StageId
from mmtrain.program.ir.program import Program
from mmtrain.program.schedules.builder import build_compute, in_flight_microbatches
from mmtrain.program.verify.check import MemoryLimit
from mmtrain.program.verify.live_activations import peak_in_flight_by_stage

ROUNDING_BYTES = 1.0  # bytes are counted in floats where state is sharded


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
            held_features=self._held_features(graph, stage),
            gathered_elements=self._gathered_elements(graph, stage),
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

    def by_rank(
        self, graph: StageGraph, num_in_flight: Mapping[StageId, int], communicator_bytes: Mapping[int, float]
    ) -> dict[int, RankMemory]:
        """Return what every rank of the first replica group holds at its peak; all groups hold the same.

        Args:
            graph: the stages.
            num_in_flight: microbatches of each stage between forward and backward, at most.
            communicator_bytes: by rank of the first replica group.
        """
        of_phases = [
            [self.held_layers(graph, stage, in_flight[stage.id]) for stage in graph.stages]
            for in_flight in memory_phases(graph, num_in_flight)
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
            candidates = [
                rank_memory(
                    [held[position] for position in positions_held],
                    self.costs,
                    self.precision,
                    self.state_bytes,
                    graph.tied_embeddings,
                    most_bytes,
                )
                for held in of_phases
            ]
            fullest = max(candidates, key=lambda of_phase: of_phase.total)
            memory |= dict.fromkeys(ranks, fullest)
        return memory

    def activation_limit(self, graph: StageGraph, memory: Mapping[int, RankMemory], memory_bytes: float) -> MemoryLimit:
        """Return what activations may take on each rank of `memory`: `memory_bytes` without state, buffers, margin."""
        nbytes = {}
        for stage in graph.stages:
            held = self.held_layers(graph, stage, num_in_flight=1)
            nbytes[stage.id] = microbatch_activation_bytes(held, self.costs, self.precision)

        def bytes_of(stage: StageId, mb: Microbatch) -> int:
            return nbytes[stage]

        limit_bytes = {}
        for rank, of_rank in memory.items():
            fixed = of_rank.parameters + of_rank.gradients + of_rank.optimizer + of_rank.buffers
            managed_bytes = (memory_bytes - of_rank.communicators - of_rank.inputs) / (1 + MEMORY_MARGIN)
            limit_bytes[rank] = math.floor(managed_bytes - fixed + ROUNDING_BYTES)
        return MemoryLimit(bytes_of, limit_bytes)


def memory_phases(graph: StageGraph, num_in_flight: Mapping[StageId, int]) -> list[Mapping[StageId, int]]:
    """Return the microbatches between forward and backward of each stage, in every phase of a step.

    Where encoders run first and their backwards begin with another forward, activations of such an encoder live while
    it runs backward, when there are none of the LLM or of another such encoder. Elsewhere a step has one phase.
    """
    rerun = [stage.id for stage in graph.stages if graph.reruns_forward(stage.id)]
    if not rerun:
        return [num_in_flight]
    of_llm = {**num_in_flight, **dict.fromkeys(rerun, 0)}
    idle = {stage_id: 0 if stage_id.unit == LLM else count for stage_id, count in of_llm.items()}
    return [of_llm, *({**idle, stage_id: num_in_flight[stage_id]} for stage_id in rerun)]


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
