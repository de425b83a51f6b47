"""Two runs in one folder: one of them trains. Runs without a launcher save and stop."""

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mmtrain.checkpoint import find, verify
from mmtrain.errors import UserError
from mmtrain.program import Action
from mmtrain.report import read_metrics
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.resilience.failures import FAILURES_FOLDER
from mmtrain.runtime.resilience.folder_lock import FolderLock, may_be_owned
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, read_run_state
from mmtrain.runtime.run_owner import LOCK_FILE, read_owner
from mmtrain.runtime.training import local_restarts
from mmtrain.runtime.training.train_request import TrainRequest
from tests.distributed import RanksFailed, fork_ranks
from tests.faults import FailAt
from tests.flow.runs import NUM_STEPS, assert_same_end, launch, launch_here, request_for, run_all
from tests.waiting import poll


def test_a_run_in_a_folder_in_use_is_refused_and_changes_nothing(data: Path, tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        lock.claim()
        (tmp_path / "recipe.yaml").write_text("the owner's")
        code, message = launch(request_for(data, tmp_path, resume=True, max_restarts=1))
        assert code == 2
        assert f"is in use by process {os.getpid()} on" in message
        assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", LOCK_FILE]
        assert (tmp_path / "recipe.yaml").read_text() == "the owner's"


def test_a_folder_can_be_taken_by_force(data: Path, tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        claim = lock.claim()
        assert launch(request_for(data, tmp_path, "train.steps=2", force_unlock=True)) == (0, "")
        assert not claim.is_held()
    owner = read_owner(tmp_path)
    assert owner is not None
    assert owner.released


def _launch_and_try_to_take(_rank: int, _size: int, scratch: Path, request: TrainRequest) -> list[str]:
    """Launch a run whose rank is killed; return what another run hears that tries to take the folder meanwhile."""
    heard = []

    def launch_ranks(*arguments: Any, **options: Any) -> None:
        if (scratch / "killed").exists():
            try:
                with FolderLock(request.run_dir) as other:
                    other.claim()
                heard.append("taken")
            except UserError as error:
                heard.append(str(error))
        launch_local(*arguments, **options)

    local_restarts.launch_local = launch_ranks  # type: ignore[attr-defined]
    assert launch_here(replace(request, faults=FailAt(0, 1, "kill", once=scratch / "killed"))) == (0, "")
    return heard


def test_the_folder_stays_taken_while_ranks_are_started_again(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, "train.steps=3", max_restarts=1)
    [[refusal]] = fork_ranks(1, _launch_and_try_to_take, request)
    assert refusal.startswith(f"{tmp_path} is in use by process ")
    with FolderLock(tmp_path) as later:
        later.claim()


@dataclass
class _TakeFolder(FaultPoints):
    """Another run takes the folder by force in a step (from 0)."""

    run_dir: Path
    step: int

    def start(self, rank: int) -> None:
        """See `FaultPoints`."""
        self._is_due = rank == 0

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        if self._is_due and step == self.step:
            self._is_due = False
            self._other = FolderLock(self.run_dir)
            self._other.claim(force=True)


@pytest.mark.parametrize(
    ("step", "saved"), [pytest.param(2, [2], marks=pytest.mark.slow), (NUM_STEPS - 1, [4, 2])], ids=["middle", "last"]
)
def test_a_run_that_lost_its_folder_saves_nothing_there(
    data: Path, tmp_path: Path, step: int, saved: list[int]
) -> None:
    request = request_for(data, tmp_path, "train.checkpoint.async_save=false")
    for message in run_all(request, request, faults=_TakeFolder(tmp_path, step)):
        assert f"{tmp_path} was taken over by process" in message
    assert [folder.name for folder in find(tmp_path / CHECKPOINTS_FOLDER)] == [f"step-{n:08d}" for n in saved]
    assert not list((tmp_path / CHECKPOINTS_FOLDER).glob("draft-*"))
    assert read_run_state(tmp_path)["status"] == "running", "nothing is said about the run that took the folder"
    assert not (tmp_path / FAILURES_FOLDER).exists()


def test_ranks_of_a_killed_launcher_save_and_stop(data: Path, unbroken: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, "train.checkpoint.every=0")
    with pytest.raises(RanksFailed):
        launch(request, FailAt(1, 2, "signal launcher", number=signal.SIGKILL))
    poll(lambda: not may_be_owned(tmp_path))
    state = read_run_state(tmp_path)
    assert state["status"] == "stopped"
    assert state["step"] == 3
    [saved] = find(tmp_path / CHECKPOINTS_FOLDER)
    assert verify(saved) == []
    assert len(read_metrics(tmp_path)) == state["step"]
    assert launch(replace(request, resume=True)) == (0, "")
    assert_same_end(tmp_path, unbroken)
