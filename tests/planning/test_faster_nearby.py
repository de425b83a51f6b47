"""A hint names another batch or fewer ranks where they are over 10% faster, and tries few."""

import math
from dataclasses import replace

import pytest

from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.search.strategies import StrategySearches
from mmtrain.planning.space.budget import QUICK_BUDGET
from mmtrain.planning.space.candidate import SearchResults
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.planning.whatif import describe_faster_nearby
from tests.planning.factory import lengths, problem_for, recipe
from tests.plans import plan_recipe


@pytest.mark.parametrize(
    ("global_batch", "world_size", "expected"),
    [
        pytest.param(17, 4, "train.global_batch 16 instead of 17: at least ", marks=pytest.mark.slow),
        (16, 2, ""),
    ],
)
def test_a_batch_that_divides_better_is_named(global_batch: int, world_size: int, expected: str) -> None:
    wide = recipe(llm={"layers": 1}, global_batch=global_batch, parallel={"placement": "unified"})
    plan = plan_recipe(wide, lengths(), world_size=world_size, hardware="cpu-core", recipe_sha256="a" * 64)
    hints = describe_faster_nearby(wide, lengths(), plan)
    assert len(hints) == bool(expected)
    assert all(hint.startswith(expected) for hint in hints)


@pytest.mark.parametrize("placement", ["unified", "disaggregated", "colocated", "replicated"])
def test_a_search_for_fast_plans_finds_what_a_whole_search_finds_or_nothing(placement: str) -> None:
    problem = problem_for(recipe(global_batch=8, parallel={"placement": placement}), world_size=2)

    def search(max_step_s: float) -> SearchResults:
        request = PlanRequest(num_alternatives=0, max_step_s=max_step_s)
        return StrategySearches(Evaluator(replace(problem, request=request), QUICK_BUDGET)).search()

    fastest_s = min(candidate.step_time_s for candidate in search(math.inf).candidates)
    limited = search(fastest_s * 1.001)
    assert min(candidate.step_time_s for candidate in limited.candidates) == pytest.approx(fastest_s, rel=1e-3)
    searches = StrategySearches(Evaluator(problem, QUICK_BUDGET))
    assert searches.find_faster_than(fastest_s * 1.001)
    assert not searches.find_faster_than(fastest_s * 0.999)
    too_fast = search(fastest_s * 0.5)
    assert all(candidate.step_time_s > fastest_s * 0.5 for candidate in too_fast.candidates)
