"""A comparison of numbers of GPUs: efficiencies computed by hand, and the sentence on the largest worthwhile number."""

from functools import cache

import pytest

from mmtrain.planning import Plan
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.report.scaling import ScalingPoint, scaling_json, scaling_rows, scaling_table, scaling_verdict
from tests.planning.factory import lengths, recipe
from tests.plans import plan_recipe


@cache
def small_plan() -> Plan:
    return plan_recipe(
        recipe(),
        lengths(),
        world_size=2,
        hardware="cpu-core",
        recipe_sha256="f" * 64,
        request=PlanRequest(num_alternatives=1),
    )


def scaled(gpus: int, tokens_per_s: float) -> ScalingPoint:
    """Make a plan for this many GPUs with this throughput."""
    base = small_plan()
    predicted = base.predicted.model_copy(update={"tokens_per_s_per_gpu": tokens_per_s / gpus})
    return ScalingPoint(gpus, base.model_copy(update={"world_size": gpus, "predicted": predicted}), "")


def test_efficiency_and_added_throughput() -> None:
    points = [
        scaled(16, 150.0),
        scaled(8, 80.0),
        ScalingPoint(12, None, "no plan fits 12 ranks. The closest:\nx"),
        scaled(32, 214.0),
    ]
    rows = scaling_rows(points)
    assert [row.gpus for row in rows] == [8, 16, 32]
    assert [row.efficiency for row in rows] == pytest.approx([1.0, 150 / 160, 214 / 320])
    assert rows[0].added is None
    assert [row.added for row in rows[1:]] == pytest.approx([70 / 80, 64 / 160])
    assert scaling_verdict(rows) == (
        "More than 16 GPUs are not worthwhile: each of the next 16 adds 40% of the throughput of one of the first 8."
    )
    assert scaling_verdict(rows[:2]) == (
        "All of these sizes are worthwhile: each added GPU brings at least 50% of the throughput of one of the first 8."
    )
    table = scaling_table(points)
    assert "none: no plan fits 12 ranks " in table
    assert "The closest" not in table
    assert "`--set cluster.ranks=12` without --gpus explains what does not fit." in table
    assert "unified: vision tp1 pp" in table
    assert [entry["gpus"] for entry in scaling_json(points)] == [16, 8, 12, 32]


def test_a_number_that_adds_little_is_passed_over_if_a_larger_one_is_worthwhile() -> None:
    """Let each GPU add 10% of a first one from 8 to 12, 60% from 8 to 16, 40% from 16 to 32."""
    rows = scaling_rows([scaled(8, 80.0), scaled(12, 84.0), scaled(16, 128.0), scaled(32, 192.0)])
    assert scaling_verdict(rows[:3]) == "16 GPUs are worthwhile, 12 are not."
    assert scaling_verdict(rows).startswith(
        "16 GPUs are worthwhile, 12 are not. More than 16 GPUs are not worthwhile: each of the next 16 "
    )
    assert scaling_verdict(rows[:1]) == "A single number of GPUs shows no scaling."


def test_gpus_that_a_plan_does_not_use_count() -> None:
    """Count them, because with parallel.max_gpus a plan may use fewer GPUs than the cluster has."""
    all_used = scaled(8, 80.0)
    rows = scaling_rows([all_used, ScalingPoint(16, all_used.plan, "")])
    assert rows[1].efficiency == pytest.approx(0.5)
    assert rows[1].added == pytest.approx(0.0)
