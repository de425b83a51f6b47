"""How each placement is searched. A new placement is a folder with a `PlacementStrategy`, and one entry here."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from mmtrain.planning.artifact.plan import Placement
from mmtrain.planning.colocated.colocated_search import ColocatedStrategy
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.search.pipelined import PipelinedStrategy
from mmtrain.planning.search.replicated import ReplicatedStrategy
from mmtrain.planning.space.budget import SearchBudget
from mmtrain.planning.space.candidate import Candidate, SearchResults
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.planning.space.search_progress import Progress


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
        progress: called with the number of candidates that are settled, of how many.
        """


PIPELINED = PipelinedStrategy()
STRATEGIES: Mapping[Placement, PlacementStrategy] = {
    "unified": PIPELINED,
    "disaggregated": PIPELINED,
    "colocated": ColocatedStrategy(),
    "replicated": ReplicatedStrategy(),
}


def strategies_of(placements: Sequence[Placement]) -> list[PlacementStrategy]:
    """Return the strategies of some placements, each once."""
    return list(dict.fromkeys(STRATEGIES[placement] for placement in placements))
