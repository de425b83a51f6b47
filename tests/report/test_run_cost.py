"""The cost of a run in GPU-hours, energy and money."""

import pytest

from mmtrain.planning import Plan
from mmtrain.planning.whatif import with_text_only
from mmtrain.recipe.settings.parallel_settings import ClusterSettings
from mmtrain.report.html import html_page
from mmtrain.report.report_contents import ReportContents, report_json
from mmtrain.report.run_cost import RunCost
from mmtrain.report.runlog import run_summary
from mmtrain.report.terminal import report_text
from tests.planning.factory import lengths, recipe
from tests.plans import plan_recipe


@pytest.fixture(scope="module")
def tiny_plan() -> Plan:
    return plan_recipe(recipe(), lengths(), world_size=2, hardware="cpu-core", recipe_sha256="a" * 64)


def test_gpu_hours_are_always_said_and_energy_and_money_where_they_are_stated() -> None:
    assert RunCost.of_seconds(ClusterSettings(), 1, 36.0, 2).to_text() == "1 step: 0.01 h on 2 ranks, 0.02 GPU-hours"
    priced = ClusterSettings.model_validate({"watts_per_gpu": 700, "price_per_gpu_hour": 2.5})
    text = RunCost.of_seconds(priced, 1000, 9000.0, 64).to_text()
    assert text == "1,000 steps: 2.5 h on 64 ranks, 160 GPU-hours, 112 kWh, 400 at 2.5 a GPU-hour"


def test_a_run_ends_with_its_step_beside_the_planned_one_and_its_cost(tiny_plan: Plan) -> None:
    predicted = tiny_plan.predicted.model_copy(update={"step_time_s": 40.0})
    plan = tiny_plan.model_copy(update={"predicted": predicted})
    steps = [{"step_time_s": seconds, "tokens_per_s": 900.0, "mfu": 0.1} for seconds in (90.0, 45.0, 45.0)]
    assert run_summary(plan, ClusterSettings(), steps) == (
        "median step 45 s (planned 40 s), 900 LLM tokens/s; 3 steps: 0.05 h on 2 ranks, 0.1 GPU-hours"
    )
    assert run_summary(plan, ClusterSettings(), []) == ""


def test_steps_of_an_elastic_run_cost_what_their_own_ranks_cost() -> None:
    steps = [{"step_time_s": 1800.0, "ranks": 4}, {"step_time_s": 3600.0, "ranks": 2}, {"step_time_s": 3600.0}]
    cost = RunCost.of_logged(ClusterSettings.model_validate({"price_per_gpu_hour": 3}), steps, 2)
    assert (cost.hours, cost.gpu_hours, cost.money, cost.num_ranks) == (2.5, 6.0, 18.0, 4)


def test_reports_state_the_cost_that_is_predicted_and_that_of_the_logged_steps(tiny_plan: Plan) -> None:
    settings = recipe(cluster={"price_per_gpu_hour": 2.0, "watts_per_gpu": 500})
    step = {"step_time_s": 1800.0, "tokens_per_s": 900.0, "mfu": 0.1, "peak_memory_bytes": 2**30}
    steps = [{"step": n, **step} for n in (1, 2)]
    predicted = RunCost.of_seconds(settings.cluster, 1, tiny_plan.predicted.step_time_s, 2).to_text()
    logged = "2 steps: 1 h on 2 ranks, 2 GPU-hours, 1 kWh, 4 at 2 a GPU-hour"
    contents = ReportContents("try", tiny_plan, 4.0, metrics=steps, recipe=settings)
    for text in (report_text(contents, 200), html_page(contents)):
        assert f"Cost, predicted: {predicted}" in text
        assert f"Cost, logged: {logged}" in text
    assert report_json(contents)["cost"]["logged"]["money"] == 4.0
    unpriced = ReportContents("try", tiny_plan, 4.0, recipe=recipe())
    assert "Cost, " not in report_text(unpriced)
    assert report_json(unpriced)["cost"] == {}


def test_the_planner_states_what_the_llm_alone_would_reach(tiny_plan: Plan) -> None:
    alone = with_text_only(tiny_plan, recipe(), lengths()).predicted
    assert alone.text_only_share is not None
    assert 0.1 < alone.text_only_share < 1
    frozen = recipe(llm={"freeze": True})
    assert with_text_only(tiny_plan, frozen, lengths()).predicted.text_only_share is None
