"""The placements `unified` and `disaggregated`, searched together: their candidates compete in one queue."""

from dataclasses import replace

from mmtrain.plan.budget import SearchBudget
from mmtrain.plan.candidate import Candidate, SearchResults
from mmtrain.plan.estimate.evaluator import Evaluator
from mmtrain.plan.problem import PlanningProblem
from mmtrain.plan.search.allocation import allocate_ranks
from mmtrain.plan.search.best_first_search import best_first_search
from mmtrain.plan.search_progress import Progress


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
        """Allocate ranks to units in every way, and search the layer partitions of these, best first."""
        request = problem.request
        candidates = allocate_ranks(evaluator, budget, request.allocation_watch)
        num_wanted = request.num_alternatives + 1
        if request.measure is not None:  # where the best sizes have few layer partitions, as many sizes are run
            num_wanted = max(num_wanted, request.num_measured)
        num_simulated = max(budget.partitions.min_simulated, num_wanted)
        results = best_first_search(candidates, evaluator, num_simulated, progress)
        return replace(results, enumerated=tuple(candidates))
