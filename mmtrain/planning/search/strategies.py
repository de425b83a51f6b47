"""How each placement is searched. A new placement is a folder with a `PlacementStrategy`, and one entry here."""

from collections.abc import Mapping
from typing import Protocol

from mmtrain.planning.artifact.plan import Placement
from mmtrain.planning.colocated.colocated_search import ColocatedStrategy
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.search.pipelined import PipelinedStrategy
from mmtrain.planning.search.replicated import ReplicatedStrategy
from mmtrain.planning.space.budget import SearchBudget
from mmtrain.planning.space.candidate import Candidate, SearchResults
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.planning.space.search_reports import Progress, progress_of_part


class PlacementStrategy(Protocol):
    """Finds the fastest candidates of one or several placements."""

    def num_searches(self, problem: PlanningProblem) -> int:
        """Return how many searches `search` runs, each of which reports its own progress."""

    def search(
        self,
        problem: PlanningProblem,
        evaluator: Evaluator,
        budget: SearchBudget,
        incumbent: Candidate | None,
        progress: Progress | None = None,
    ) -> SearchResults:
        """Return simulated candidates, and why others lost.

        incumbent: the fastest candidate of the strategies before. A placement is ranked by its best plan even where
            that is slower.
        progress: called with the number of candidates that are decided, and the number of all.
        """


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
        of_strategy = strategy.search(problem, evaluator, evaluator.budget, results.best, progress)
        results = results.merged(of_strategy)
    report_end = progress_of_part(problem.request.progress, 0, sum(num_searches), sum(num_searches))
    if report_end is not None:
        report_end(1, 1)
    return results
