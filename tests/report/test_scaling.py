"""A comparison of numbers of GPUs: efficiencies computed by hand, and the sentence on the largest worthwhile number."""

import json
from functools import cache

import pytest

from mmtrain.errors import PlanError
from mmtrain.planning import Plan
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.recipe.settings.parallel_settings import ClusterSettings
from mmtrain.report.scaling import (
    LimitedRun,
    ScalingPoint,
    choice_text,
    choose_size,
    scaling_json,
    scaling_rows,
    scaling_table,
    scaling_verdict,
)
from tests.planning.factory import lengths, recipe
from tests.plans import plan_recipe


@cache
def small_plan() -> Plan:
    return plan_recipe(
        recipe(parallel={"placement": "unified"}),
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


DAY_S = 24 * 3600


def in_days(gpus: int, days: float) -> ScalingPoint:
    """Make a plan for this many GPUs that takes this long for 10 steps."""
    point = scaled(gpus, 80.0 / days)
    assert point.plan is not None
    predicted = point.plan.predicted.model_copy(update={"step_time_s": days * DAY_S / 10})
    return ScalingPoint(gpus, point.plan.model_copy(update={"predicted": predicted}), "")


# 1,920, 1,920, 2,304 and 3,840 GPU-hours, at 2 an hour.
SIZES = [in_days(8, 10.0), in_days(16, 5.0), in_days(32, 3.0), in_days(64, 2.5)]


def limited(days: float | None = None, money: float | None = None) -> LimitedRun:
    return LimitedRun(10, ClusterSettings(price_per_gpu_hour=2.0), days, money)


@pytest.mark.parametrize(
    ("days", "money", "gpus"),
    [
        (12.0, None, 8),  # as cheap as 16 GPUs, and fewer
        (5.0, None, 16),
        (4.0, None, 32),
        (2.5, None, 64),
        (None, 1e4, 64),
        (None, 4608.0, 32),
        (None, 4000.0, 16),
        (4.0, 5000.0, 32),
        (2.0, None, None),
        (None, 3000.0, None),
        (2.5, 5000.0, None),
        (None, None, None),
    ],
)
def test_a_size_is_chosen_within_limits(days: float | None, money: float | None, gpus: int | None) -> None:
    rows, run = scaling_rows(SIZES), limited(days, money)
    chosen = choose_size(rows, run)
    assert (None if chosen is None else chosen.gpus) == gpus
    meets_limits = [row for row in rows if run.meets_days(row) and run.meets_money(row)]
    if chosen is not None:  # by hand: nothing within the limits is better
        costs = [(run.cost(row).gpu_hours, run.cost(row).hours) for row in meets_limits]
        best = min(costs) if days is not None else min(costs, key=lambda cost: cost[1])
        assert (run.cost(chosen).gpu_hours, run.cost(chosen).hours)[days is None] == best[days is None]


def test_the_choice_is_explained_beside_its_neighbors() -> None:
    rows = scaling_rows(SIZES)
    assert choice_text(rows, limited(days=4.0)) == (
        "Chosen: 32 GPUs take 3 days (2,304 GPU-hours, 4,608 in money), the cheapest of these numbers that runs "
        "10 steps within 4 days. Its neighbors: 16 GPUs take 5 days (1,920 GPU-hours, 3,840 in money); 64 GPUs take "
        "2.5 days (3,840 GPU-hours, 7,680 in money)."
    )
    unpriced = LimitedRun(10, ClusterSettings(), max_days=20.0)
    assert choice_text(rows[:1], unpriced) == (
        "Chosen: 8 GPUs take 10 days (1,920 GPU-hours), the cheapest of these numbers that runs 10 steps within "
        "20 days."
    )


@pytest.mark.parametrize(
    ("days", "money", "message"),
    [
        (2.0, None, "within 2 days: nearest: 64 GPUs take 2.5 days (3,840 GPU-hours, 7,680 in money), the fastest. "),
        (
            None,
            3000.0,
            "for at most 3,000: nearest: 8 GPUs take 10 days (1,920 GPU-hours, 3,840 in money), the cheapest. ",
        ),
        (
            2.5,
            5000.0,
            "within 2.5 days and for at most 5,000: nearest: 64 GPUs take 2.5 days (3,840 GPU-hours, 7,680 in money), "
            "the cheapest in time; 32 GPUs take 3 days (2,304 GPU-hours, 4,608 in money), the fastest for the money. ",
        ),
        (
            2.0,
            3000.0,
            "nearest: 64 GPUs take 2.5 days (3,840 GPU-hours, 7,680 in money), the fastest; 8 GPUs take 10 days",
        ),
    ],
)
def test_the_nearest_size_is_named_if_none_meets_the_limits(
    days: float | None, money: float | None, message: str
) -> None:
    with pytest.raises(PlanError, match="none of 8, 16, 32, 64 GPUs runs 10 steps ") as error:
        choice_text(scaling_rows(SIZES), limited(days, money))
    assert message in str(error.value)


def test_time_and_costs_stand_in_the_table_and_in_json() -> None:
    missing = ScalingPoint(128, None, "no plan fits")
    text = " ".join(scaling_table([*SIZES, missing], 160, limited(days=4.0)).split())
    assert "│ 3 days │ 2,304 │ 4,608 │" in text
    assert "run: 10 steps, without starts, checkpoints and validation." in text
    assert "money" not in scaling_table(SIZES, 160, LimitedRun(10, ClusterSettings()))
    entries = json.loads(json.dumps(list(scaling_json([*SIZES, missing], limited(days=4.0)))))
    assert [entry.get("chosen") for entry in entries] == [False, False, True, False, None]
    assert entries[2]["cost"]["money"] == pytest.approx(4608)
    assert "cost" not in next(scaling_json(SIZES))
