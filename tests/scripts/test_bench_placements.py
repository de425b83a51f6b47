"""The table of placements names the chosen plan, and the best of every other placement beside it."""

from dataclasses import replace

import pytest

from mmtrain.planning.planner import plan
from mmtrain.planning.space.problem import PlanRequest
from scripts.bench_placements import best_of_other_placements, summary
from tests.planning.factory import problem_for, recipe


@pytest.mark.slow
def test_a_row_names_every_placement_once() -> None:
    problem = replace(problem_for(recipe(), "cpu-core", 4), request=PlanRequest(num_alternatives=20))
    chosen = plan(problem)
    others = list(best_of_other_placements(chosen))
    assert {chosen.placement, *(other.placement for other, _ in others)} == set(problem.constraints.placements)
    assert len(others) == len(problem.constraints.placements) - 1
    seconds = [step_s for _, step_s in others]
    assert seconds == sorted(seconds)
    for other, step_s in others:
        of_placement = [loser.step_time_s for loser in chosen.alternatives if loser.placement == other.placement]
        assert step_s == min(found_s for found_s in of_placement if found_s is not None)
    assert summary(chosen).startswith(chosen.placement)
