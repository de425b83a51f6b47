"""A run goes on from its checkpoint alone, whatever happened to the other files in its folder."""

import resource
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mmtrain.durable_files import read_log
from mmtrain.errors import RunError
from mmtrain.report import read_metrics
from mmtrain.runtime.resilience.failures import FAILURES_FOLDER
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.resilience.lost_output import ignore_lost_output
from mmtrain.runtime.run_folder import (
    CHECKPOINTS_FOLDER,
    PLAN_FILE,
    QUARANTINE_FILE,
    RECIPE_FILE,
    RUN_STATE_FILE,
    SKIPPED_STEPS_FILE,
    read_run_state,
)
from mmtrain.runtime.run_owner import LOCK_FILE
from mmtrain.runtime.training import local_restarts
from mmtrain.runtime.training.train_request import TrainRequest
from tests.distributed import fork_ranks
from tests.faults import FailAt
from tests.flow.runs import NUM_STEPS, assert_same_weights, launch, launch_here, request_for
from tests.full_disk import full_disk

FILES = (
    RECIPE_FILE,
    PLAN_FILE,
    RUN_STATE_FILE,
    LOCK_FILE,
    QUARANTINE_FILE,
    SKIPPED_STEPS_FILE,
    "metrics.jsonl",
    f"{FAILURES_FOLDER}/rank-0.json",
)


@pytest.fixture
def at_step_4(unbroken: Path, tmp_path: Path) -> Path:
    """The folder of a run that was killed after step 4 of 6."""
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken, run_dir)
    shutil.rmtree(run_dir / CHECKPOINTS_FOLDER / "step-00000006")
    return run_dir


TORN = [pytest.param(content, marks=pytest.mark.slow) for content in (b"", b'{"status": "run')]


@pytest.mark.parametrize("content", [None, b"\xff\0\n[]\n7\n", *TORN])
def test_nothing_but_the_checkpoint_is_needed(
    data: Path, unbroken: Path, at_step_4: Path, content: bytes | None
) -> None:
    for name in FILES:
        (at_step_4 / name).unlink(missing_ok=True)
        if content is not None:
            (at_step_4 / name).parent.mkdir(exist_ok=True)
            (at_step_4 / name).write_bytes(content)
    if content is None:  # what it says of steps that are repeated is dropped
        (at_step_4 / SKIPPED_STEPS_FILE).write_text('{"step": 3}\n{"step": 5}\n{"st')
    fault = FailAt(1, 4, "kill", once=at_step_4.parent / "killed")
    assert launch(request_for(data, at_step_4, resume=True, max_restarts=1), fault) == (0, "")
    assert_same_weights(at_step_4, unbroken)
    assert [step["step"] for step in read_metrics(at_step_4)] == [5, 6]
    assert read_run_state(at_step_4) == {"status": "done", "step": NUM_STEPS, "error": None}
    aside = sorted(path.name for path in at_step_4.glob("*.damaged-1"))
    if content is None:
        assert aside == []
        assert [entry["step"] for entry in read_log(at_step_4 / SKIPPED_STEPS_FILE).entries] == [3]
    else:
        assert {"plan.json.damaged-1", "state.json.damaged-1"} <= set(aside)
    if content and b"\n" in content:
        assert {"metrics.jsonl.damaged-1", "quarantine.jsonl.damaged-1", "skipped.jsonl.damaged-1"} <= set(aside)


def _launch_while_the_disk_is_full(_rank: int, _size: int, scratch: Path, request: TrainRequest) -> list[str]:
    """Launch a run whose rank is killed while the disk is full; return what the launcher says until there is room."""
    told: list[str] = []

    def launch_ranks(*arguments: Any, **options: Any) -> None:
        try:
            launch_local(*arguments, **options)
        except RunError:
            _limit_file_size(0)
            raise

    def wait_for_room(seconds: float) -> None:
        told.append(f"waits {seconds:g} s")
        if len(told) == 2:
            _limit_file_size(resource.RLIM_INFINITY)

    ignore_lost_output()  # as the command does: its output may go to the same disk
    local_restarts.launch_local = launch_ranks  # type: ignore[attr-defined]
    local_restarts.await_room = partial(local_restarts.await_room, sleep=wait_for_room)  # type: ignore[assignment]
    faults = FailAt(0, 3, "kill", once=scratch / "killed")
    assert launch_here(replace(request, faults=faults)) == (0, "")
    return told


def _limit_file_size(max_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, resource.RLIM_INFINITY))


def test_a_full_disk_costs_no_restart_and_the_run_goes_on_when_there_is_room(
    data: Path, unbroken: Path, tmp_path: Path
) -> None:
    request = request_for(data, tmp_path / "run", max_restarts=1)
    [told] = fork_ranks(1, _launch_while_the_disk_is_full, request)
    assert told == ["waits 5 s"] * 2
    assert_same_weights(tmp_path / "run", unbroken)
    assert read_run_state(tmp_path / "run") == {"status": "done", "step": NUM_STEPS, "error": None}


def test_a_disk_that_stays_full_is_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    with full_disk(0):
        can_be_written = local_restarts.await_room(tmp_path, "rank 1 was killed", sleep, lambda: now_s[0])
    assert not can_be_written
    assert now_s[0] == local_restarts.ROOM_PATIENCE_S
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "mmtrain: rank 1 was killed"
    assert said[1].startswith(f"mmtrain: {tmp_path / 'state.json'}: File too large")
    assert said[1].endswith("The ranks are started again once that works, if it does within 3600 s")
    assert len(said) == 2


def _launch_on_a_full_disk(rank: int, size: int, _: Path, data: Path, run_dir: Path, max_bytes: int) -> tuple[int, str]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))  # of a file: stands for a full disk
    return launch_here(request_for(data, run_dir, "train.steps=8", f"name={'x' * 60_000}", resume=True))


# The limit holds for the memory in which the data is indexed, too, so the recipe is a long one.
@pytest.mark.parametrize(("file", "max_bytes"), [(LOCK_FILE, 0), (RECIPE_FILE, 40_000), ("metrics.jsonl", 80_000)])
def test_a_full_disk_at_resume_names_the_file(data: Path, at_step_4: Path, file: str, max_bytes: int) -> None:
    log = at_step_4 / "metrics.jsonl"
    log.write_text(log.read_text() * 80)
    [(code, message)] = fork_ranks(1, _launch_on_a_full_disk, data, at_step_4, max_bytes)
    assert code == 1
    assert message.startswith(f"{at_step_4 / file}: File too large; raise the limit of a file's size")
