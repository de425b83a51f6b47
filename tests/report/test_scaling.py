"""A sweep over numbers of GPUs: efficiencies by hand, and the sentence that says where it stops paying."""

import pytest

from mmtrain.plan import Plan
from mmtrain.plan.planner import plan
from mmtrain.report.scaling import ScalingPoint, scaling_json, scaling_rows, scaling_table, scaling_verdict
from tests.plan.factory import lengths, recipe


def made() -> Plan:
    return plan(recipe(), lengths(), world_size=2, hardware="cpu-core", recipe_sha256="f" * 64, top=1)


def scaled(gpus: int, tokens_per_s: float) -> ScalingPoint:
    """A plan for so many GPUs that does so much."""
    some = made()
    predicted = some.predicted.model_copy(update={"tokens_per_s_per_gpu": tokens_per_s / gpus})
    return ScalingPoint(gpus, some.model_copy(update={"world_size": gpus, "predicted": predicted}), "")


def test_efficiency_and_what_each_gpu_adds() -> None:
    found = [
        scaled(16, 150.0),
        scaled(8, 80.0),
        ScalingPoint(12, None, "no plan fits 12 ranks. The closest:\nx"),
        scaled(32, 214.0),
    ]
    rows = scaling_rows(found)
    assert [row.gpus for row in rows] == [8, 16, 32]
    assert [row.efficiency for row in rows] == pytest.approx([1.0, 150 / 160, 214 / 320])
    assert rows[0].added is None
    assert [row.added for row in rows[1:]] == pytest.approx([70 / 80, 64 / 160])
    assert scaling_verdict(rows) == (
        "More than 16 GPUs do not pay: each of the next 16 adds 40% of what one of the first 8 does."
    )
    assert scaling_verdict(rows[:2]) == "Every step of this sweep pays."
    table = scaling_table(found)
    assert "none: no plan fits 12 ranks " in table
    assert "The closest" not in table
    assert "`--set cluster.ranks=12` tells more." in table
    assert "unified: vision tp1 pp" in table
    assert [entry["gpus"] for entry in scaling_json(found)] == [16, 8, 12, 32]


def test_a_number_that_adds_little_is_passed_over_where_a_larger_one_pays() -> None:
    """From 8 to 12 each adds 10 percent of a first one, from 8 to 16 60, from 16 to 32 40."""
    rows = scaling_rows([scaled(8, 80.0), scaled(12, 84.0), scaled(16, 128.0), scaled(32, 192.0)])
    assert scaling_verdict(rows[:3]) == "16 GPUs pay, 12 do not."
    assert scaling_verdict(rows).startswith(
        "16 GPUs pay, 12 do not. More than 16 GPUs do not pay: each of the next 16 "
    )
    assert scaling_verdict(rows[:1]) == "One number of GPUs shows no scaling."


def test_ranks_that_a_plan_leaves_idle_count() -> None:
    """With max_gpus the plan may use fewer: they are paid for all the same."""
    whole, part = scaled(8, 80.0), scaled(16, 80.0)
    assert part.plan is not None
    idle = part.plan.model_copy(update={"world_size": 8, "predicted": whole.plan.predicted}) if whole.plan else None
    rows = scaling_rows([whole, ScalingPoint(16, idle, "")])
    assert rows[1].efficiency == pytest.approx(0.5)
    assert rows[1].added == pytest.approx(0.0)
