"""A plan remembers what its data looked like, and says what has changed."""

from dataclasses import replace

import pytest

from mmtrain.balance import ItemLengths, SampleLengths
from mmtrain.plan import Plan
from mmtrain.plan.artifact.data_drift import describe_data_drift
from mmtrain.plan.planner import plan
from tests.plan.factory import lengths, recipe


@pytest.fixture(scope="module")
def chosen() -> Plan:
    return plan(recipe(), lengths(), world_size=1, hardware="cpu-core", recipe_sha256="a" * 64)


def test_a_plan_fits_its_own_data_and_more_of_it(chosen: Plan) -> None:
    assert chosen.data is not None
    assert chosen.data.samples == 300
    assert chosen.data.tokens["llm"] == pytest.approx(lengths().tokens.mean(), abs=0.01)
    assert describe_data_drift(chosen, lengths()) == ""
    assert describe_data_drift(chosen, lengths(2000, seed=1)) == "", "as many samples again, of the same kind"


def test_larger_images_and_longer_texts_are_told_apart(chosen: Plan) -> None:
    seen = lengths()
    vision = seen.items["vision"]
    larger = replace(seen, items={"vision": replace(vision, tokens=2 * vision.tokens)})
    longer = replace(seen, tokens=seen.tokens + 100)
    assert chosen.data is not None
    doubled = f"{2 * chosen.data.tokens['vision']:,.0f} tokens of a sample in vision, "
    assert describe_data_drift(chosen, larger).startswith(doubled)
    assert "llm" not in describe_data_drift(chosen, larger)
    assert "in llm" in describe_data_drift(chosen, longer)
    assert "vision" not in describe_data_drift(chosen, longer)


def test_a_modality_that_is_gone_and_plans_that_remember_nothing(chosen: Plan) -> None:
    seen = lengths()
    items = seen.items["vision"]
    nothing = items.tokens[:0]
    none = ItemLengths(0 * items.first, nothing, nothing, nothing, nothing)
    without = SampleLengths(seen.tokens, seen.targets, {"vision": none})
    assert describe_data_drift(chosen, without).startswith("0 tokens of a sample in vision")
    assert describe_data_drift(chosen.model_copy(update={"data": None}), without) == ""
