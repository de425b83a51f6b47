"""A hint names another batch or fewer ranks where they are over 10% faster, and tries few."""

import pytest

from mmtrain.plan.explain.faster_nearby import describe_faster_nearby
from mmtrain.plan.planner import plan_recipe
from tests.plan.factory import lengths, recipe


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
