"""The table of what differs between two plans, and the sentences below it."""

from mmtrain.planning import Plan
from mmtrain.report.plan_difference_table import difference_json, difference_table
from tests.report.test_scaling import small_plan

NAMES = ("old.json", "new.json")


def with_prediction(**changes: object) -> Plan:
    plan = small_plan()
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update=changes)})


def test_equal_plans_say_so() -> None:
    assert difference_table(small_plan(), small_plan(), NAMES).startswith("Both plans are the same")
    assert difference_json(small_plan(), small_plan(), NAMES)["differences"] == []


def test_a_row_shows_both_values_and_their_ratio() -> None:
    plan = with_prediction(step_time_s=2.0, tokens_per_s_per_gpu=100.0, mfu=0.4)
    faster = with_prediction(step_time_s=1.0, tokens_per_s_per_gpu=200.0, mfu=0.5, cost_source="measured")
    text = " ".join(difference_table(plan, faster, NAMES).split())
    assert "│ predicted │ step │ 2 s │ 1 s (0.50x) │" in text
    assert "│ MFU │ 40.0% │ 50.0% (1.25x) │" in text
    assert "Layers, ranks and schedule are the same in both plans." in text
    assert "A step of new.json is predicted to take 0.50x the time, and to train 2.00x the LLM tokens/s." in text
    assert "predicted with different costs" in text
    entries = difference_json(plan, faster, NAMES)["differences"]
    assert {"part": "predicted", "what": "step", "first": 2.0, "second": 1.0, "measure": "s"} in entries


def test_values_of_settings_are_written_as_they_are() -> None:
    plan = small_plan()
    settings = {**plan.settings, "model.llm.freeze": True, "model.llm.rope_base": 5e5, "data.isf.rounds": None}
    text = " ".join(difference_table(plan, plan.model_copy(update={"settings": settings}), NAMES).split())
    assert "│ model.llm.freeze │ no │ yes │" in text
    assert "│ model.llm.rope_base │ 10,000 │ 500,000 │" in text
    assert "│ data.isf.rounds │ 10 │ - │" in text
    assert "The predictions are the same." in text
    unrecorded = plan.model_copy(update={"settings": {}, "recipe_sha256": "a" * 64})
    assert "does not record the settings of its recipe" in difference_table(unrecorded, plan, NAMES)
