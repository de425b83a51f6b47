"""What the ranks of a stage graph hold at their peak: the search counts it to choose, and a run to start."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from mmtrain.costs import CostModel, HeldLayers, Precision, RankMemory, StateBytes, TokenLoad, input_grad_needed
from mmtrain.costs.rank_memory import MEMORY_MARGIN, microbatch_activation_bytes, rank_memory
from mmtrain.models.model_shape import ModelShape
from mmtrain.program.ir.graph import Microbatch, Stage, StageGraph, StageId
from mmtrain.program.ir.program import Program
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
            dp=mesh.dp,
            in_flight=num_in_flight,
            load=self.largest_load[unit],
            sp=unit in self.sequence_parallel,
            num_microbatches=mesh.num_microbatches,
            shard=mesh.shard,
        )

    def by_rank(
        self, graph: StageGraph, num_in_flight: Mapping[StageId, int], communicator_bytes: Mapping[int, float]
    ) -> dict[int, RankMemory]:
        """Return what every rank of the first replica group holds at its peak; all groups hold the same.

        Args:
            graph: the stages.
            num_in_flight: microbatches of each stage between forward and backward, at most.
            communicator_bytes: by rank of the first replica group.
        """
        held = [self.held_layers(graph, stage, num_in_flight[stage.id]) for stage in graph.stages]
        held_by_rank: dict[int, list[int]] = {}  # positions in `held`
        for position, stage in enumerate(graph.stages):
            replicas_per_group = graph.mesh(stage.id.unit).dp // graph.num_groups
            for rank in chain.from_iterable(stage.tp_groups[:replicas_per_group]):
                held_by_rank.setdefault(rank, []).append(position)
        ranks_of: dict[tuple[int, ...], list[int]] = {}  # by what they hold: many ranks hold the same stages
        for rank, positions in held_by_rank.items():
            ranks_of.setdefault(tuple(positions), []).append(rank)
        memory: dict[int, RankMemory] = {}
        for positions_held, ranks in ranks_of.items():
            layers = [held[position] for position in positions_held]
            most_bytes = max(communicator_bytes.get(rank, 0.0) for rank in ranks)
            of_ranks = rank_memory(
                layers, self.costs, self.precision, self.state_bytes, graph.tied_embeddings, most_bytes
            )
            memory |= dict.fromkeys(ranks, of_ranks)
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


def peak_in_flight(program: Program) -> dict[StageId, int]:
    """Count from a program the microbatches of each stage between forward and backward, at most."""
    peak: dict[StageId, int] = {}
    for actions in program.actions.values():
        for stage, count in peak_in_flight_by_stage(program.graph, actions).items():
            peak[stage] = max(peak.get(stage, 0), count)
    return peak
