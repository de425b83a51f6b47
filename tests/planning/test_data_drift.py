"""A plan records a summary of its data and describes how later data differs."""

from dataclasses import replace

import pytest

from mmtrain.balance import ItemLengths, SampleLengths
from mmtrain.planning import Plan
from mmtrain.planning.artifact.plan_change import describe_data_drift
from tests.planning.factory import lengths, recipe
from tests.plans import plan_recipe


@pytest.fixture(scope="module")
def chosen() -> Plan:
    return plan_recipe(recipe(), lengths(), world_size=1, hardware="cpu-core", recipe_sha256="a" * 64)


def test_the_same_data_and_more_of_it_are_no_drift(chosen: Plan) -> None:
    assert chosen.data.samples == 300
    assert chosen.data.tokens["llm"] == pytest.approx(lengths().tokens.mean(), abs=0.01)
    assert describe_data_drift(chosen, lengths()) == ""
    assert describe_data_drift(chosen, lengths(2000, seed=1)) == "", "more samples of the same distribution"


def test_the_drifting_unit_is_named(chosen: Plan) -> None:
    original = lengths()
    vision = original.items["vision"]
    larger = replace(original, items={"vision": replace(vision, tokens=2 * vision.tokens)})
    longer = replace(original, tokens=original.tokens + 100)
    doubled = f"vision: {2 * chosen.data.tokens['vision']:,.0f} tokens per sample instead of "
    assert describe_data_drift(chosen, larger).startswith(doubled)
    assert "llm" not in describe_data_drift(chosen, larger)
    assert "llm: " in describe_data_drift(chosen, longer)
    assert "vision" not in describe_data_drift(chosen, longer)


def test_a_missing_modality_drifts_and_a_plan_without_summary_does_not(chosen: Plan) -> None:
    original = lengths()
    items = original.items["vision"]
    empty = items.tokens[:0]
    no_items = ItemLengths(0 * items.first, empty, empty, empty, empty)
    without = SampleLengths(original.tokens, original.targets, {"vision": no_items})
    assert describe_data_drift(chosen, without).startswith("vision: 0 tokens per sample")
