"""The allocation of ranks to units: the first step of the search, and how far it is from a continuous one.

MMScale (arXiv 2408.04275) allocates GPUs to encoder, LLM and generator before anything else. Here that is to list the
mesh assignments with the lower bounds of their steps, which orders the search. On large clusters only those are listed
that seem fastest with the recomputation that their memory needs.
"""

from collections.abc import Sequence

from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.search.mesh_enumeration import Choices, bounded_mesh_assignments, unit_mesh_sizes
from mmtrain.planning.space.budget import SearchBudget
from mmtrain.planning.space.candidate import Candidate, UnitTimeBound
from mmtrain.planning.space.search_reports import Allocation, AllocationWatch


def allocate_ranks(
    evaluator: Evaluator,
    budget: SearchBudget,
    watch: AllocationWatch | None = None,
    memory_share: float = 1.0,
) -> list[Candidate]:
    """List the mesh assignments of all placements that are searched, on every number of ranks, with their bounds.

    watch: learns the best allocation of the largest number of ranks, where units may have ranks of their own.
    memory_share: of the ranks' memory, which their meshes are chosen to fit into.
    """
    bound = evaluator.time_lower_bound_within(memory_share)
    estimate = evaluator.mesh_time_estimate_within(memory_share)
    problem = evaluator.problem
    start_s = 0.0 if watch is None else watch.clock()
    candidates = []
    ranks_per_node = problem.hardware.ranks_per_node
    for num_ranks in problem.cluster.rank_counts:
        bounded = bounded_mesh_assignments(problem.choices, num_ranks, bound, budget.meshes, ranks_per_node, estimate)
        for bound_s, assignment in bounded:
            if assignment.placement in problem.constraints.placements:
                candidates.append(evaluator.enumerated(assignment).bounded(bound_s))
    if watch is not None:
        seconds = watch.clock() - start_s
        best = _best_allocated(candidates)
        if best is not None:
            ranks = {unit: mesh.ranks for unit, mesh in best.assignment.meshes.items()}
            relaxed_s = relaxed_step_s(problem.choices, sum(ranks.values()), bound)
            watch.report(Allocation(ranks, best.time_lower_bound_s, relaxed_s, len(candidates), seconds))
    return candidates


def relaxed_step_s(choices: Choices, num_ranks: int, bound: UnitTimeBound) -> float:
    """Return the least seconds of a step in which units share `num_ranks` as if these were divisible.

    A unit then needs the rank-seconds of its most efficient mesh, whatever its share. Shares in proportion to these are
    optimal: all units take equally long, the sum of their rank-seconds by `num_ranks`. Pipelines fill at no cost.
    """
    rank_seconds = (
        min(bound(unit, mesh, None) * mesh.ranks for mesh in unit_mesh_sizes(choices, unit, num_ranks))
        for unit in choices
    )
    return sum(rank_seconds) / num_ranks


def _best_allocated(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the `disaggregated` candidate with the lowest bound, of those on most ranks."""
    allocated = [candidate for candidate in candidates if candidate.placement == "disaggregated"]
    return min(allocated, key=lambda c: (-c.assignment.ranks, c.time_lower_bound_s), default=None)
