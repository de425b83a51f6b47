"""A candidate advances stage by stage, and the proof of its program covers memory."""

from typing import Any

import pytest

from mmtrain.costs.rank_memory import MEMORY_MARGIN
from mmtrain.errors import ProgramError
from mmtrain.planning.colocated.colocated_search import search_colocated
from mmtrain.planning.evaluate.evaluator import Evaluator, verify_program
from mmtrain.planning.search.best_first_search import AllocatedCandidates
from mmtrain.planning.space.candidate import Candidate, CandidateStage
from tests.planning.exhaustive import Instance, all_candidates, by_placement
from tests.planning.factory import evaluator_for, recipe, with_memory
from tests.plans import best_first_search

RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"parallel": {"llm": {"recompute": "all"}}},
    "merged": {"parallel": {"vision": {"num_microbatches": 2}}},
}


def simulated_candidates(evaluator: Evaluator) -> tuple[Candidate, ...]:
    """Return the fastest partition of several meshes of every placement that can be run."""
    instances = by_placement(Instance(evaluator, all_candidates(evaluator, 4)))
    results = [
        best_first_search(AllocatedCandidates(instance.candidates), evaluator, num_simulated=4)
        for instance in instances
    ]
    return search_colocated(evaluator, 4).merged(*results).candidates


@pytest.mark.parametrize("case", RECIPES)
def test_what_the_planner_says_fits_is_proven_to_fit(case: str) -> None:
    """Compare the checker, which adds up the activations of every action, with the planner's formula."""
    evaluator = evaluator_for(recipe(**RECIPES[case]))
    candidates = simulated_candidates(evaluator)
    assert {candidate.placement for candidate in candidates} == {"unified", "disaggregated", "colocated"}
    for candidate in candidates:
        verify_program(candidate, with_memory(evaluator, candidate.peak_bytes))
        fixed = (rank.total - rank.activations * (1 + MEMORY_MARGIN) for rank in candidate.memory.values())
        with pytest.raises(ProgramError, match="activations"):
            verify_program(candidate, with_memory(evaluator, max(fixed)))


def test_a_candidate_advances_in_the_order_of_its_stages() -> None:
    evaluator = evaluator_for(recipe())
    candidate = all_candidates(evaluator, 2)[0]
    assert candidate.stage == CandidateStage.BOUNDED
    assert candidate.bounded(2.0).bounded(1.0).time_lower_bound_s == 2.0, "a bound only grows tighter"
    with pytest.raises(AssertionError, match="not yet PARTITIONED"):
        candidate.estimated(1.0)
    with pytest.raises(AssertionError, match="not FITTED"):
        _ = candidate.layout
    with pytest.raises(AssertionError, match="not SIMULATED"):
        _ = candidate.step_time_s
    best = best_first_search(AllocatedCandidates([candidate]), evaluator, num_simulated=1).best
    assert best is not None
    assert (best.id, best.stage) == (candidate.id, CandidateStage.SIMULATED)
    with pytest.raises(AssertionError, match="already past BOUNDED"):
        best.bounded(1.0)
