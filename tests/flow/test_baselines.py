"""Plans by rules of thumb, saved and read back, train as one process does."""

from pathlib import Path

import pytest

from mmtrain.planning import load_plan
from mmtrain.planning.space.problem import PlanRequest
from tests.flow.cases import NUM_PLANNED, lengths, recipe
from tests.flow.equality import assert_equals_one_process
from tests.plans import plan_recipe


@pytest.mark.parametrize(("rule", "placement"), [("megatron", "unified"), ("flops", "disaggregated")])
def test_a_baseline_that_was_saved_trains_as_one_process_does(rule: str, placement: str, tmp_path: Path) -> None:
    settings = recipe(model__llm__layers=4)
    chosen = plan_recipe(
        settings,
        lengths(num_samples=NUM_PLANNED),
        world_size=2,
        hardware="cpu-core",
        recipe_sha256="",
        request=PlanRequest(baseline=rule),
    )
    chosen.save(tmp_path / "plan.json")
    found = load_plan(tmp_path / "plan.json")
    assert found == chosen
    assert found.placement == placement
    assert_equals_one_process(settings, found)
