"""Stages are trained one after another, and a run that is killed in one of them ends as if unbroken."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from mmtrain.api.stage_runs import stage_runs
from mmtrain.planning.whatif import plan_again
from mmtrain.recipe import read_recipe
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.training import train
from mmtrain.runtime.training.train_request import TrainRequest
from tests.distributed import RanksFailed, fork_ranks
from tests.faults import FailAt
from tests.flow.launchers import torchrun_command
from tests.flow.runs import RECIPE, SMALL, assert_same_end, launch
from tests.forked_command import run_forked
from tests.plans import plan_recipe as planner

STAGES = """
extends: {base}
stages:
  - name: align
    train: {{lora: {{rank: 2, also_train: [vision.projector.*]}}, steps: 2}}
  - name: sft
    parallel: {{placement: unified}}
    train: {{steps: 4, checkpoint: {{every: 2}}}}
"""


@pytest.fixture(scope="module")
def settings(data: Path) -> list[str]:
    paths = [f"data.sources.0.path={data}/train.json", f"data.validation.0.path={data}/heldout.json"]
    not_in_stages = [change for change in SMALL if not change.startswith(("train.steps", "train.checkpoint"))]
    return [*paths, f"data.tokenizer={data}/tokenizer.json", "cluster.ranks=2", *not_in_stages]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("staged") / "recipe.yaml"
    path.write_text(STAGES.format(base=RECIPE), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def arguments(recipe: Path, settings: list[str]) -> tuple[str, ...]:
    return ("train", str(recipe), *(part for setting in settings for part in ("--set", setting)))


@pytest.fixture(scope="module")
def unbroken(arguments: tuple[str, ...], recipe: Path) -> Path:
    """Train both stages without a fault."""
    done = run_forked(recipe.parent, *arguments, "--run-dir", "unbroken")
    assert done.returncode == 0, done.stderr
    assert "adapters merged into their weights" in done.stdout
    return recipe.parent / "unbroken"


def _assert_same_stages(run: Path, unbroken: Path) -> None:
    for stage, num_steps in (("1-align", 2), ("2-sft", 4)):
        assert_same_end(run / stage, unbroken / stage, num_steps)


@pytest.mark.slow
def test_a_run_that_is_killed_in_its_second_stage_goes_on_there(
    recipe: Path, settings: list[str], arguments: tuple[str, ...], unbroken: Path, tmp_path: Path
) -> None:
    killed = run_forked(tmp_path, *arguments, "--run-dir", "killed", "--set", "stage=align")
    assert killed.returncode == 0, killed.stderr
    sft = stage_runs(read_recipe(recipe, settings), tmp_path / "killed")[1]
    request = TrainRequest(sft.loaded, planner, plan_again, "cpu-core", 2, sft.folder)
    assert launch(request, FailAt(1, 3, "kill"))[0] != 0

    resumed = run_forked(tmp_path, *arguments, "--run-dir", "killed", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "stage 1 of 2, align: done" in resumed.stdout
    assert "resuming after step 2" in resumed.stdout
    _assert_same_stages(tmp_path / "killed", unbroken)

    again = run_forked(tmp_path, *arguments, "--run-dir", "killed")
    assert "holds a run already: continue it with --resume" in again.stderr


def _train_here(folder: Path, arguments: tuple[str, ...], fault: FailAt | None) -> int:
    """Run `mmtrain` in this process, with a fault in the second stage; return the exit code."""
    from mmtrain.cli import main

    train_without_fault = train.start_training

    def start_training(request: TrainRequest) -> None:
        if fault is not None and request.run_dir.name == "2-sft":
            request = replace(request, faults=fault)
        train_without_fault(request)

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    os.chdir(folder)
    sys.argv = ["mmtrain", *arguments]
    with patch.object(train, "start_training", start_training):
        try:
            main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
    return 0


@pytest.mark.slow
def test_torchrun_trains_all_stages_and_starts_again_in_the_second_one(
    arguments: tuple[str, ...], unbroken: Path, tmp_path: Path
) -> None:
    fault = FailAt(1, 3, "kill", once=tmp_path / "was-killed")
    command = partial(_train_here, tmp_path, (*arguments, "--run-dir", "run"), fault)
    assert torchrun_command(command, max_restarts=1) == [0]
    assert (tmp_path / "was-killed").exists()
    _assert_same_stages(tmp_path / "run", unbroken)


def _slurm_task(rank: int, size: int, _: Path, port: int, command: Callable[[], int]) -> int:
    os.environ |= {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_LOCALID": "0"}
    os.environ |= {"SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(port)}
    return command()


@pytest.mark.slow
def test_slurm_tasks_train_all_stages_and_go_on_in_the_second_one(
    arguments: tuple[str, ...], unbroken: Path, tmp_path: Path
) -> None:
    """The tasks meet in a store of their own, at a port that stays the same."""
    killed = partial(_train_here, tmp_path, (*arguments, "--run-dir", "run"), FailAt(1, 3, "kill"))
    with pytest.raises(RanksFailed):
        fork_ranks(2, _slurm_task, free_port(), killed)
    resumed = partial(_train_here, tmp_path, (*arguments, "--run-dir", "run", "--resume"), None)
    assert fork_ranks(2, _slurm_task, free_port(), resumed) == [0, 0]
    _assert_same_stages(tmp_path / "run", unbroken)
