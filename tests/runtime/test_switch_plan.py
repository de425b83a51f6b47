"""What a run's folder says of its plans and recorded costs, also when the disk is full or files are damaged."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mmtrain.costs.recorded_costs import RECORDED_COSTS_FILE
from mmtrain.planning import Plan, load_plan
from mmtrain.runtime.run_folder import PLAN_FILE, REPLANNED_FOLDER
from mmtrain.runtime.training import switch_plan
from mmtrain.runtime.training.hooks.replanning import share_recorded_costs
from mmtrain.runtime.training.switch_plan import keep_switch
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
    return before, plan


def test_a_switch_keeps_the_plan_before(tmp_path: Path, plans: tuple[Plan, Plan]) -> None:
    before, plan = plans
    keep_switch(tmp_path, before, plan, 40)
    assert load_plan(tmp_path / PLAN_FILE) == plan
    assert load_plan(tmp_path / REPLANNED_FOLDER / "plan-until-step-00000040.json") == before


@pytest.mark.parametrize("num_written", [0, 1])
def test_a_switch_that_the_disk_ends_leaves_the_plan_as_it_was(
    tmp_path: Path, plans: tuple[Plan, Plan], num_written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, plan = plans
    write_whole, written = switch_plan.write_whole, []

    def write_until_full(path: Path, content: str) -> None:
        if len(written) == num_written:
            raise OSError(28, "No space left on device")
        written.append(path)
        write_whole(path, content)

    monkeypatch.setattr(switch_plan, "write_whole", write_until_full)
    with pytest.raises(OSError, match="No space"):
        keep_switch(tmp_path, before, plan, 40)
    assert load_plan(tmp_path / PLAN_FILE) == before


def test_a_damaged_table_of_recorded_costs_is_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / RECORDED_COSTS_FILE).write_text("recorded")
    request = cast(Any, SimpleNamespace(run_dir=tmp_path, resume=True))
    assert share_recorded_costs(World(0, 1, torch.device("cpu")), request) is None
    assert "recorded_costs.json" in capsys.readouterr().err
    assert not (tmp_path / RECORDED_COSTS_FILE).exists()
