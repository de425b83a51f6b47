"""What a run prepares for the loss of ranks, and how it decides that ranks are lost."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from mmtrain.errors import RankDied, RunError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_change import describe_plan_change
from mmtrain.runtime.training.hooks.elastic import STEPS_BEFORE_STANDBY_PLANNING, ResumeTime, StandbyPlanning
from mmtrain.runtime.training.local_restarts import LossMonitor, find_usable_devices
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.standby_plans import (
    load_standby_plan,
    rank_counts_ahead,
    save_standby_plan,
    standby_plan_path,
)
from mmtrain.runtime.training.step_hook import StepContext
from tests.planning.factory import lengths, recipe
from tests.plans import plan_recipe
from tests.report.conftest import metrics
from tests.runtime.background_planners import give, refuse
from tests.waiting import poll

SHA = "f" * 64


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "may_grow", "expected"),
    [
        (3, 1, False, [2, 1]),
        (3, 1, True, [2, 4, 1]),
        (16, 8, True, [8, 24]),
        (8, 8, False, []),
        (64, 8, True, [56, 72, 48, 40, 32]),
    ],
)
def test_plans_are_made_for_the_likeliest_numbers_of_ranks(
    num_ranks: int, ranks_per_node: int, may_grow: bool, expected: list[int]
) -> None:
    assert rank_counts_ahead(num_ranks, ranks_per_node, may_grow) == expected


@pytest.fixture(scope="module")
def plans() -> dict[int, Plan]:
    """Plans for one rank, which take no time to make, that say they are for more."""
    plan = plan_recipe(recipe(), lengths(), world_size=1, hardware="cpu-core", recipe_sha256=SHA)
    return {num_ranks: plan.model_copy(update={"world_size": num_ranks}) for num_ranks in (2, 3)}


def test_a_plan_of_another_recipe_or_hardware_is_not_used(tmp_path: Path, plans: dict[int, Plan]) -> None:
    save_standby_plan(tmp_path, plans[2])
    assert load_standby_plan(tmp_path, SHA, 2, "cpu-core") == plans[2]
    assert load_standby_plan(tmp_path, SHA, 3, "cpu-core") is None
    assert load_standby_plan(tmp_path, "e" * 64, 2, "cpu-core") is None
    assert load_standby_plan(tmp_path, SHA, 2, "h100") is None


def test_a_damaged_plan_is_set_aside(tmp_path: Path, plans: dict[int, Plan]) -> None:
    save_standby_plan(tmp_path, plans[2])
    standby_plan_path(tmp_path, 2).write_text("{")
    said: list[str] = []
    assert load_standby_plan(tmp_path, SHA, 2, "cpu-core", said.append) is None
    assert "ranks-00002.json.damaged-1" in said[0]


def test_a_change_names_ranks_placement_meshes_and_step_time(plans: dict[int, Plan]) -> None:
    before, now = plans[3], plans[2].model_copy(update={"placement": "disaggregated"})
    lines = describe_plan_change(before.model_copy(update={"placement": "unified"}), now)
    assert lines[:2] == ["ranks: 3 -> 2", "placement: unified -> disaggregated"]
    assert [line.split(":")[0] for line in lines[2:]] == [*now.units, "predicted step time"]
    assert "as before" in describe_plan_change(before, before)[1]


class _Notes:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def test_plans_are_made_one_after_another_and_refusals_are_told(tmp_path: Path, plans: dict[int, Plan]) -> None:
    notes = _Notes()

    def planner_for(num_ranks: int) -> Callable[[], Plan]:
        return partial(give, plans[2]) if num_ranks == 2 else partial(refuse, "nothing fits 1 rank")

    steps = (StepContext(step, 1 << 40) for step in range(1 << 40))
    records = RunRecords(tmp_path, cast(Any, notes), is_first=True)
    with contextlib.closing(StandbyPlanning([2, 1], planner_for, records)) as hook:
        for _ in range(STEPS_BEFORE_STANDBY_PLANNING - 1):
            hook.after_step(next(steps))
        assert hook._planning is None

        def is_done() -> bool:
            hook.after_step(next(steps))
            return len(notes.texts) == 2

        poll(is_done)
    assert notes.texts[0].startswith("a plan for 2 ranks is ready (predicted ")
    assert notes.texts[1] == "this run could not go on with 1 rank: nothing fits 1 rank"
    assert load_standby_plan(tmp_path, SHA, 2, "cpu-core") == plans[2]
    assert not standby_plan_path(tmp_path, 1).exists()


def test_the_first_step_after_a_restart_says_how_long_it_took(tmp_path: Path) -> None:
    notes = _Notes()
    hook = ResumeTime(100.0, RunRecords(tmp_path, cast(Any, notes), is_first=True), time_of_day_s=lambda: 107.5)
    seconds = []
    for step in (4, 5):
        ctx = StepContext(step, 10)
        ctx.metrics = metrics(step + 1)
        hook.after_step(ctx)
        seconds.append(ctx.metrics.resume_s)
    assert seconds == [7.5, None]
    assert notes.texts == ["step 5 ended 7.5 s after the last step before the restart"]


def test_a_rank_that_dies_twice_in_one_place_is_gone() -> None:
    losses = LossMonitor(3, ())
    assert losses.count_usable(3, RankDied("rank 1 was killed", 1), 10) == 3
    assert losses.count_usable(3, RankDied("rank 1 was killed", 1), 10) == 2
    assert losses.reason.startswith("rank 1 died again")
    assert losses.count_usable(2, RankDied("rank 1 was killed", 1), 10) == 2, "that is another rank 1"
    assert losses.count_usable(2, RankDied("rank 1 was killed", 1), 10) == 1


@pytest.mark.parametrize(
    "second",
    [
        (RankDied("rank 2 was killed", 2), 10),
        (RankDied("rank 1 was killed", 1), 20),
        (RunError("rank 1 failed: ValueError"), 10),
    ],
)
def test_other_failures_are_no_loss(second: tuple[RunError, int]) -> None:
    losses = LossMonitor(3, ())
    losses.count_usable(3, RankDied("rank 1 was killed", 1), 10)
    assert losses.count_usable(3, *second) == 3


def test_devices_that_fail_their_test_are_left_out() -> None:
    check = "import os, sys; sys.exit(os.environ['CUDA_VISIBLE_DEVICES'] == '1')"
    assert find_usable_devices(["0", "1", "GPU-ab"], check) == ("0", "GPU-ab")


@pytest.mark.slow  # imports torch in a process of its own
@pytest.mark.parametrize("level", ["0", "1", "2"])
def test_a_broken_device_is_found_at_any_level_of_optimization(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", level)
    assert find_usable_devices(["GPU-that-fell-off-the-bus"]) == ()
