"""Runs that lose ranks for good and go on with those that are left, and grow again."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmtrain.checkpoint import open_newest_good
from mmtrain.plan.artifact.plan_files import load_plan
from mmtrain.program import Action
from mmtrain.report import read_metrics
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, PLAN_FILE
from mmtrain.runtime.run_state import read_run_state
from mmtrain.runtime.training.standby_plans import standby_plan_path
from mmtrain.runtime.training.train_request import TrainRequest
from tests.distributed import fork_ranks
from tests.flow.runs import launch, launch_here, refuse, request_for, tensors

NUM_STEPS = 30
SETTINGS = (f"train.steps={NUM_STEPS}", "train.checkpoint.every=5")
WAIT_S = 0.2  # of each step while there is no plan for fewer ranks yet


class RankIsGone(FaultPoints):
    """Kills one rank in every start with `num_ranks` ranks, as soon as there is a plan for one rank fewer."""

    def __init__(self, rank: int, num_ranks: int, run_dir: Path) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.plan = standby_plan_path(run_dir, num_ranks - 1)

    def start(self, rank: int) -> None:
        """See `FaultPoints`."""
        self.is_here = rank == self.rank
        self.last_step: int | None = None

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        if not self.is_here or dist.get_world_size() != self.num_ranks or step == self.last_step:
            return
        self.last_step = step
        if self.plan.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(WAIT_S)


def _launch_printing(rank: int, size: int, folder: Path, request: TrainRequest, output: Path) -> tuple[int, str]:
    """Launch with the output of all processes in a file."""
    number = os.open(output, os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(number, stream)
    return launch_here(request)


@pytest.fixture(scope="module")
def unbroken_three(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "three"
    assert launch(request_for(data, run_dir, *SETTINGS, ranks=3)) == (0, "")
    return run_dir


def assert_same_course(run_dir: Path, reference: Path) -> None:
    """Assert that two runs trained the same, whatever their plans were: to the rounding of fp32."""
    losses, expected = ([step["loss"] for step in read_metrics(run)] for run in (run_dir, reference))
    assert losses == pytest.approx(expected, rel=1e-5)
    checkpoint, end = (open_newest_good(run / CHECKPOINTS_FOLDER, refuse) for run in (run_dir, reference))
    weights, expected_weights = (_flat(tensors(opened)) for opened in (checkpoint, end))
    difference = torch.linalg.vector_norm(weights - expected_weights) / torch.linalg.vector_norm(expected_weights)
    # AdamW divides gradients that are nothing but rounding (as those of the keys' biases) by their own size.
    assert float(difference) < 1e-4


def _flat(named: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([named[name].flatten().double() for name in sorted(named) if "#" not in name])


def ranks_of_steps(run_dir: Path) -> list[int]:
    steps: list[dict[str, Any]] = read_metrics(run_dir)
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    return [step["ranks"] for step in steps]


@pytest.mark.slow
def test_a_run_goes_on_without_a_rank_that_is_gone_for_good(data: Path, unbroken_three: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, *SETTINGS, ranks=3, max_restarts=2, elastic=True)
    [outcome] = fork_ranks(1, _launch_printing, replace(request, faults=RankIsGone(1, 3, tmp_path)), tmp_path / "text")
    assert outcome == (0, "")
    ranks = ranks_of_steps(tmp_path)
    assert ranks == sorted(ranks, reverse=True)
    assert set(ranks) == {3, 2}
    assert load_plan(tmp_path / PLAN_FILE) == load_plan(standby_plan_path(tmp_path, 2))
    assert_same_course(tmp_path, unbroken_three)
    assert read_run_state(tmp_path) == {"status": "done", "step": NUM_STEPS, "error": None}
    printed = (tmp_path / "text").read_text(encoding="utf-8")
    assert "a plan for 2 ranks is ready" in printed
    assert "rank 1 died again before the next checkpoint and counts as gone for good: starting 2 ranks" in printed
    assert "ranks: 3 -> 2" in printed
    [resumed] = [step for step in read_metrics(tmp_path) if "resume_s" in step]
    assert resumed["ranks"] == 2
