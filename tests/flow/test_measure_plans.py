"""Plans are run for a few steps and timed, each in processes of its own."""

from pathlib import Path

import pytest

from mmtrain.data import build_index
from mmtrain.errors import UserError
from mmtrain.recipe import Recipe
from mmtrain.runtime.profiling.measure_plans import measure_step, measure_step_times
from tests.distributed import fork_ranks
from tests.flow.runs import request_for
from tests.plans import plan_recipe


def _recipe(data: Path, placement: str) -> Recipe:
    return request_for(data, data, f"parallel.placement={placement}").loaded.recipe


def _measure(_rank: int, _size: int, _folder: Path, data: Path) -> list[float]:
    plans = []
    for placement in ("unified", "disaggregated"):
        recipe = _recipe(data, placement)
        chosen = plan_recipe(recipe, build_index(recipe).lengths, world_size=2, hardware="cpu-core", recipe_sha256="x")
        assert chosen.placement == placement
        plans.append(chosen)
    measured = measure_step(recipe, chosen)
    assert measured.memory_ratio is not None
    assert 0.3 < measured.memory_ratio < 30  # a tiny model: buffers of the libraries weigh more than its tensors
    seconds = [measured.seconds]
    for found in measure_step_times(recipe, plans, num_steps=2):
        assert len(found) == 2
        seconds += found
    elsewhere = chosen.model_copy(update={"hardware": "h100-80g"})
    with pytest.raises(UserError, match="the plan is for h100-80g and this machine is cpu-core"):
        measure_step(recipe, elsewhere)
    return seconds


def test_every_plan_is_timed_on_the_ranks_of_this_machine(data: Path) -> None:
    [seconds] = fork_ranks(1, _measure, data)
    assert len(seconds) == 1 + 2 * 2  # one plan by itself, then two that take turns
    assert all(0 < s < 60 for s in seconds)
