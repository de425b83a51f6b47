"""Stages are trained one after another, and a run that is killed in one of them ends as if unbroken."""

from pathlib import Path

import pytest

from mmtrain.cli.stage_runs import stage_runs
from mmtrain.plan.plan_again import plan_again
from mmtrain.plan.planner import plan_recipe as planner
from mmtrain.recipe import read_recipe
from mmtrain.runtime.training.train_request import TrainRequest
from tests.faults import FailAt
from tests.flow.runs import RECIPE, SMALL, assert_same_end, launch
from tests.forked_command import run_forked

STAGES = """
extends: {base}
stages:
  - name: align
    train: {{lora: {{rank: 2, also_train: [vision.projector.*]}}, steps: 2}}
  - name: sft
    parallel: {{placement: unified}}
    train: {{steps: 4, checkpoint: {{every: 2}}}}
"""


@pytest.mark.slow
def test_a_run_that_is_killed_in_its_second_stage_goes_on_there(data: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(STAGES.format(base=RECIPE), encoding="utf-8")
    paths = [f"data.sources.0.path={data}/train.json", f"data.validation.0.path={data}/heldout.json"]
    not_in_stages = [change for change in SMALL if not change.startswith(("train.steps", "train.checkpoint"))]
    settings = [*paths, f"data.tokenizer={data}/tokenizer.json", "cluster.ranks=2", *not_in_stages]
    arguments = ["train", str(recipe), *(part for setting in settings for part in ("--set", setting))]

    unbroken = run_forked(tmp_path, *arguments, "--run-dir", "unbroken")
    assert unbroken.returncode == 0, unbroken.stderr
    assert "adapters merged into their weights" in unbroken.stdout

    killed = run_forked(tmp_path, *arguments, "--run-dir", "killed", "--set", "stage=align")
    assert killed.returncode == 0, killed.stderr
    sft = stage_runs(read_recipe(recipe, settings), tmp_path / "killed")[1]
    request = TrainRequest(sft.loaded, planner, plan_again, "cpu-core", 2, sft.folder)
    assert launch(request, FailAt(1, 3, "kill"))[0] != 0

    resumed = run_forked(tmp_path, *arguments, "--run-dir", "killed", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "stage 1 of 2, align: done" in resumed.stdout
    assert "resuming after step 2" in resumed.stdout
    for stage, num_steps in (("1-align", 2), ("2-sft", 4)):
        assert_same_end(tmp_path / "killed" / stage, tmp_path / "unbroken" / stage, num_steps)

    again = run_forked(tmp_path, *arguments, "--run-dir", "killed")
    assert "holds a run already: continue it with --resume" in again.stderr
