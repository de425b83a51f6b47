"""The placements `unified` and `disaggregated`, searched together: their candidates compete in one queue."""

import math

from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.search.allocation import allocate_ranks
from mmtrain.planning.search.best_first_search import best_first_search
from mmtrain.planning.space.budget import SearchBudget
from mmtrain.planning.space.candidate import Candidate, SearchResults
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.planning.space.search_reports import Progress


class PipelinedStrategy:
    """One pipeline of all units, or a pipeline for each unit on ranks of its own."""

    def num_searches(self, problem: PlanningProblem) -> int:
        """Return 1: all numbers of ranks are searched together."""
        return 1

    def search(
        self,
        problem: PlanningProblem,
        evaluator: Evaluator,
        budget: SearchBudget,
        incumbent: Candidate | None,
        progress: Progress | None = None,
    ) -> SearchResults:
        """Allocate ranks to units in every way, and search the layer partitions of these, best first.

        Where no layout of `disaggregated` fits, ranks are allocated again, to meshes that should leave more room. Not
        so where the request limits the step time, which may be why none was found.
        """
        request = problem.request
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
