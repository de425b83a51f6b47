"""Plans for tests that need one, and not the command line."""

from collections.abc import Iterator
from typing import Any

from mmtrain.balance import SampleLengths
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.planner import plan
from mmtrain.planning.search.best_first_search import AllocatedCandidates, BestFirstSearch
from mmtrain.planning.search.mesh_enumeration import Choices, all_disaggregated, unified_assignments
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.candidate import MeshAssignment, SearchResults
from mmtrain.recipe import Recipe


def plan_recipe(recipe: Recipe, lengths: SampleLengths, **arguments: Any) -> Plan:
    """Search for the fastest plan of a recipe, as `mmtrain plan` does; `arguments` are those of `formulate_problem`."""
    return plan(formulate_problem(recipe, lengths, **arguments))


def mesh_assignments(choices: Choices, num_ranks: int) -> Iterator[MeshAssignment]:
    """List every mesh assignment that uses exactly `num_ranks` ranks."""
    yield from unified_assignments(choices, num_ranks)
    yield from all_disaggregated(choices, num_ranks, DEFAULT_BUDGET.meshes)


def best_first_search(allocated: AllocatedCandidates, evaluator: Evaluator, num_simulated: int) -> SearchResults:
    """Search to the end, as the planner does, with the placements that lost if the evaluator's request names these."""
    search = BestFirstSearch(allocated, evaluator, num_simulated)
    search.find_fastest()
    if evaluator.problem.request.names_losers:
        search.search_losing_placements()
    return search.results()
