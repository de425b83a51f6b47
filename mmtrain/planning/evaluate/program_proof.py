"""The proof that a chosen candidate runs: its whole program is built and checked, memory included."""

from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.space.candidate import Candidate
from mmtrain.program import build_program


def verify_program(candidate: Candidate, evaluator: Evaluator) -> None:
    """Build the program of a simulated candidate and prove that it is complete, free of deadlock, and fits into memory.

    The simulator follows a few ranks and the memory rule counts microbatches by a formula; this looks at every action
    of every rank. A candidate that fits only as run may hold so much more, as counted.

    Raises:
        ProgramError: names what is wrong. The search is at fault, not the recipe.
    """
    graph = candidate.graph
    counted = evaluator.layer_costs.graph_memory(graph)
    limit_bytes = evaluator.memory_bytes
    if candidate.peak_bytes > limit_bytes and candidate.memory_ratio is not None:
        limit_bytes /= candidate.memory_ratio
    limit = counted.activation_limit(graph, candidate.memory, limit_bytes, evaluator.problem.hardware.host_memory_bytes)
    build_program(graph, limit, candidate.schedule.kind, candidate.schedule.order)
