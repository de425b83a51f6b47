"""What two plans differ in: nothing, the settings they were made with, where layers run, or what is predicted."""

from functools import cache
from typing import Any

import pytest

from mmtrain.planning import Plan
from mmtrain.planning.artifact.plan_difference import plan_differences
from tests.planning.factory import lengths, recipe
from tests.plans import plan_recipe


@cache
def plan(world_size: int = 2, global_batch: int = 8) -> Plan:
    settings = recipe(global_batch=global_batch, parallel={"placement": "unified"})
    return plan_recipe(settings, lengths(), world_size=world_size, hardware="cpu-core", recipe_sha256="f" * 64)


def changed(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with other predictions."""
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update=changes)})


def test_a_plan_does_not_differ_from_itself() -> None:
    saved = Plan.model_validate_json(plan().model_dump_json())
    assert plan_differences(plan(), saved) == []
    assert plan_differences(plan(), plan().model_copy(update={"alternatives": ()})) == []


def test_settings_are_named_by_their_paths() -> None:
    found = {(entry.part, entry.what): entry for entry in plan_differences(plan(), plan(global_batch=16))}
    batch = found["setting", "train.global_batch"]
    assert (batch.first, batch.second, batch.ratio) == (8, 16, None)
    assert [key for key in found if key[0] in ("setting", "made for")] == [("setting", "train.global_batch")]
    step = found["predicted", "step"]
    assert step.ratio == pytest.approx(plan(global_batch=16).predicted.step_time_s / plan().predicted.step_time_s)


def test_a_plan_without_settings_is_compared_by_its_fingerprint() -> None:
    older = plan().model_copy(update={"settings": {}, "recipe_sha256": "a" * 64})
    [difference] = plan_differences(older, plan())
    assert (difference.part, difference.what) == ("made for", "fingerprint of the recipe")
    assert (difference.first, difference.second) == ("a" * 12, "f" * 12)


def test_the_layout_is_compared_by_unit() -> None:
    llm = plan().units["llm"]
    [stage, *others] = llm.stages
    recomputed = stage.model_copy(update={"recompute": (0, 1)})
    other = llm.model_copy(update={"sp": True, "stages": (recomputed, *others)})
    differences = plan_differences(plan(), plan().model_copy(update={"units": {**plan().units, "llm": other}}))
    assert [(entry.what, entry.first, entry.second) for entry in differences] == [
        ("llm recomputed layers", "none", "0-1"),
        ("llm sp", False, True),
    ]
    alone = plan().model_copy(update={"units": {"llm": llm}})
    of_vision = {entry.what: entry for entry in plan_differences(plan(), alone)}
    assert of_vision["vision mesh"].second is None


def test_costs_and_what_was_measured_are_compared() -> None:
    [costs, step] = plan_differences(plan(), changed(plan(), cost_source="measured", step_time_s=9.0))
    assert (costs.part, costs.what, costs.second) == ("made for", "costs", "measured")
    assert (step.part, step.what, step.measure) == ("predicted", "step", "s")
