"""The proof that a chosen candidate runs: its whole program is built and checked, memory included."""

import math

from mmtrain.costs.rank_memory import MEMORY_MARGIN, microbatch_activation_bytes
from mmtrain.plan.candidate import Candidate
from mmtrain.plan.estimate.evaluator import Evaluator
from mmtrain.plan.estimate.layer_costs import LayerCosts
from mmtrain.program import MemoryLimit, build_program
from mmtrain.program.ir.graph import Microbatch, StageId

ROUNDING_BYTES = 1.0  # bytes are counted in floats where state is sharded


def verify_program(candidate: Candidate, evaluator: Evaluator) -> None:
    """Build the program of a simulated candidate and prove that it is complete, free of deadlock, and fits into memory.

    The simulator follows a few ranks and the memory rule counts microbatches by a formula; this looks at every action
    of every rank.

    Raises:
        ProgramError: names what is wrong. The search is at fault, not the recipe.
    """
    limit = activation_limit(candidate, evaluator.layer_costs, evaluator.memory_bytes)
    build_program(candidate.graph, limit, candidate.schedule.kind, candidate.schedule.order)


def activation_limit(candidate: Candidate, layer_costs: LayerCosts, memory_bytes: float) -> MemoryLimit:
    """Return what activations may take on each rank: its memory without state, working memory and margin."""
    graph = candidate.graph
    nbytes = {}
    for stage in graph.stages:
        held = layer_costs.held_layers(graph, stage, num_in_flight=1)
        nbytes[stage.id] = microbatch_activation_bytes(held, layer_costs.costs, layer_costs.precision)

    def bytes_of(stage: StageId, mb: Microbatch) -> int:
        return nbytes[stage]

    limit_bytes = {}
    for rank, memory in candidate.memory.items():
        fixed = memory.parameters + memory.gradients + memory.optimizer + memory.buffers
        limit_bytes[rank] = math.floor(memory_bytes / (1 + MEMORY_MARGIN) - fixed + ROUNDING_BYTES)
    return MemoryLimit(bytes_of, limit_bytes)
