"""What a run's folder says of the plans that the run had, also when the disk is full or files are damaged."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mmtrain.planning import Plan, load_plan
from mmtrain.runtime.run_folder import PLAN_FILE, RECORDED_COSTS_FILE, REPLANNED_FOLDER
from mmtrain.runtime.training import replanned_run
from mmtrain.runtime.training.cost_drift import RecordedCosts
from mmtrain.runtime.training.replanned_run import keep_switch, share_recorded_costs, was_replaced, with_costs_of_plan
from mmtrain.runtime.world import World
from tests.flow import cases
from tests.flow.cases import Mesh

SETTINGS = cases.recipe()


@pytest.fixture
def plans(tmp_path: Path) -> tuple[Plan, Plan]:
    """Return the plan of a run in `tmp_path`, and another one."""
    before = cases.plan(SETTINGS, vision=Mesh((), (0,)), llm=Mesh((), (1,)))
    plan = cases.plan(SETTINGS, vision=Mesh((), (0,)), llm=Mesh((2,), (0, 1)))
    (tmp_path / PLAN_FILE).write_text(before.file_text())
    (tmp_path / RECORDED_COSTS_FILE).write_text("recorded")
    return before, plan


def test_a_switch_keeps_the_plan_before_and_the_costs_of_the_new_one(tmp_path: Path, plans: tuple[Plan, Plan]) -> None:
    before, plan = plans
    assert with_costs_of_plan(SETTINGS, tmp_path, plan) == SETTINGS
    keep_switch(tmp_path, before, plan, 40)
    assert load_plan(tmp_path / PLAN_FILE) == plan
    assert load_plan(tmp_path / REPLANNED_FOLDER / "plan-until-step-00000040.json") == before
    (tmp_path / RECORDED_COSTS_FILE).write_text("recorded later")
    costs = with_costs_of_plan(SETTINGS, tmp_path, plan).cluster.costs
    assert costs is not None
    assert costs.read_text() == "recorded"
    assert with_costs_of_plan(SETTINGS, tmp_path, before) == SETTINGS


def test_a_damaged_table_is_set_aside_and_switches_are_counted(
    tmp_path: Path, plans: tuple[Plan, Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    keep_switch(tmp_path, *plans, 40)
    request = cast(Any, SimpleNamespace(run_dir=tmp_path, resume=True))
    alone = World(0, 1, torch.device("cpu"))
    assert share_recorded_costs(alone, request) == RecordedCosts(None, num_switches=1)
    assert "recorded_costs.json" in capsys.readouterr().err
    assert not (tmp_path / RECORDED_COSTS_FILE).exists()


def test_a_plan_that_was_replaced_is_known_beside_a_damaged_one(tmp_path: Path, plans: tuple[Plan, Plan]) -> None:
    before, plan = plans
    assert not was_replaced(tmp_path, before)
    keep_switch(tmp_path, before, plan, 40)
    (tmp_path / REPLANNED_FOLDER / "plan-until-step-00000020.json").write_text("{")
    assert was_replaced(tmp_path, before)
    assert not was_replaced(tmp_path, plan)


@pytest.mark.parametrize("num_written", [0, 1, 2])
def test_a_switch_that_the_disk_ends_leaves_the_plan_as_it_was(
    tmp_path: Path, plans: tuple[Plan, Plan], num_written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, plan = plans
    write_whole, written = replanned_run.write_whole, []

    def write_until_full(path: Path, content: str) -> None:
        if len(written) == num_written:
            raise OSError(28, "No space left on device")
        written.append(path)
        write_whole(path, content)

    monkeypatch.setattr(replanned_run, "write_whole", write_until_full)
    with pytest.raises(OSError, match="No space"):
        keep_switch(tmp_path, before, plan, 40)
    assert load_plan(tmp_path / PLAN_FILE) == before
