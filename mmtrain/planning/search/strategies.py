"""How each placement is searched. A new placement is a folder with a `PlacementStrategy`, and one entry here.

For `unified` and `disaggregated` the first step is the allocation of ranks to units. MMScale (arXiv 2408.04275)
allocates GPUs to encoder, LLM and generator before anything else. Here the mesh assignments are listed with the lower
bounds of their steps, which order the search. On large clusters only those are listed that seem fastest with the
recomputation that their memory needs.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from mmtrain.planning.artifact.plan import Placement
from mmtrain.planning.colocated.colocated_search import ColocatedStrategy
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.search.best_first_search import best_first_search
from mmtrain.planning.search.mesh_enumeration import Choices, bounded_mesh_assignments, unit_mesh_sizes
from mmtrain.planning.search.replicated import ReplicatedStrategy
from mmtrain.planning.space.budget import SearchBudget
from mmtrain.planning.space.candidate import Candidate, SearchResults, UnitTimeBound
from mmtrain.planning.space.problem import Allocation, AllocationWatch, PlanningProblem, Progress, progress_of_part


class PlacementStrategy(Protocol):
    """Finds the fastest candidates of one or several placements."""

    def num_searches(self, problem: PlanningProblem) -> int:
        """Return how many searches `search` runs, each of which reports its own progress."""

    def search(
        self, evaluator: Evaluator, incumbent: Candidate | None, progress: Progress | None = None
    ) -> SearchResults:
        """Return simulated candidates, and why others lost.

        incumbent: the fastest candidate of the strategies before. A placement is ranked by its best plan even where
            that is slower.
        progress: called with the number of candidates that are decided, and the number of all.
        """


class PipelinedStrategy:
    """One pipeline of all units, or a pipeline for each unit on ranks of its own."""

    def num_searches(self, problem: PlanningProblem) -> int:
        """Return 1: all numbers of ranks are searched together."""
        return 1

    def search(
        self, evaluator: Evaluator, incumbent: Candidate | None, progress: Progress | None = None
    ) -> SearchResults:
        """Allocate ranks to units in every way, and search the layer partitions of these, best first.

        Where no layout of `disaggregated` fits, ranks are allocated again, to meshes that should leave more room. Not
        so where the request limits the step time, which may be why none was found.
        """
        request, budget = evaluator.problem.request, evaluator.budget
        num_wanted = request.num_alternatives + 1
        if request.measure is not None:  # where the best sizes have few layer partitions, as many sizes are run
            num_wanted = max(num_wanted, request.num_measured)
        num_simulated = max(budget.partitions.min_simulated, num_wanted)
        candidates = allocate_ranks(evaluator, budget, request.allocation_watch)
        results = best_first_search(candidates, evaluator, num_simulated, progress)
        for share in budget.meshes.roomier_shares if math.isinf(request.max_step_s) else ():
            of_placement = [c for c in results.enumerated if c.placement == "disaggregated"]
            if not any(math.isfinite(c.time_lower_bound_s) for c in of_placement):
                break  # excluded by the recipe, or by what ranks hold at least
            if any(c.placement == "disaggregated" for c in results.candidates):
                break
            roomier = allocate_ranks(evaluator, budget, memory_share=share)
            roomier = [c for c in roomier if c.placement == "disaggregated" and math.isfinite(c.time_lower_bound_s)]
            results = results.merged(best_first_search(roomier, evaluator, num_simulated, progress))
        return results


PIPELINED = PipelinedStrategy()
STRATEGIES: Mapping[Placement, PlacementStrategy] = {
    "unified": PIPELINED,
    "disaggregated": PIPELINED,
    "colocated": ColocatedStrategy(),
    "replicated": ReplicatedStrategy(),
}


def run_strategies(evaluator: Evaluator) -> SearchResults:
    """Search every placement of the problem; each strategy knows the best candidate of those before."""
    problem = evaluator.problem
    strategies = list(dict.fromkeys(STRATEGIES[placement] for placement in problem.constraints.placements))
    num_searches = [strategy.num_searches(problem) for strategy in strategies]
    results = SearchResults()
    for i, strategy in enumerate(strategies):
        progress = progress_of_part(problem.request.progress, sum(num_searches[:i]), num_searches[i], sum(num_searches))
        of_strategy = strategy.search(evaluator, results.best, progress)
        results = results.merged(of_strategy)
    report_end = progress_of_part(problem.request.progress, 0, sum(num_searches), sum(num_searches))
    if report_end is not None:
        report_end(1, 1)
    return results


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
