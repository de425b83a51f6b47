"""The same fault in every phase of a run, under every launcher: each run ends as if unbroken.

A test starts one run again and again, as a user or a launcher would; each start meets the fault in the next phase.
"""

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.checkpoint import find, verify
from mmtrain.report import read_metrics
from mmtrain.runtime.resilience.folder_lock import may_be_owned
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, read_run_state
from mmtrain.runtime.training.train_request import TrainRequest
from tests.distributed import RanksFailed
from tests.faults import PHASES, WATCHDOG_S, FailAt, FailInEachPhase, Kind, Phase
from tests.flow.launchers import Launcher, alone, in_terminal, slurm, torchrun
from tests.flow.runs import assert_same_end, launch, request_for, run_all
from tests.waiting import poll

pytestmark = pytest.mark.slow
MAX_STEPS_TO_STOP = 3  # while a rank saves in the background, the others train on
NUM_STEPS = 14
EVERY_STEP = (f"train.steps={NUM_STEPS}", "train.checkpoint.every=1", "train.validate_every=1")


@pytest.fixture(scope="module")
def unbroken_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without failures."""
    run_dir = tmp_path_factory.mktemp("runs") / "unbroken"
    request = request_for(data, run_dir, f"train.steps={NUM_STEPS}")
    assert run_all(request, request) == ["", ""]
    return run_dir


def _request(data: Path, tmp_path: Path, kind: Kind, *changes: str, **options: object) -> TrainRequest:
    """Return a request for a run that saves and validates after every step, with this fault in each phase."""
    settings = (*EVERY_STEP, *changes)
    faults = FailInEachPhase(tmp_path, kind, NUM_STEPS)
    return replace(request_for(data, tmp_path / "run", *settings), faults=replace(faults, **options))  # type: ignore[arg-type]


def _faults(request: TrainRequest) -> FailInEachPhase:
    assert isinstance(request.faults, FailInEachPhase)
    return request.faults


def _assert_ended_as(request: TrainRequest, unbroken_run: Path) -> None:
    assert _faults(request).next_phase is None, "each phase had its fault"
    assert read_run_state(request.run_dir) == {"status": "done", "step": NUM_STEPS, "error": None}
    assert not list((request.run_dir / CHECKPOINTS_FOLDER).glob("draft-*"))
    assert_same_end(request.run_dir, unbroken_run, NUM_STEPS)


@pytest.mark.parametrize(("rank", "kind"), [(0, "kill"), (1, "kill"), (1, "exception")])
def test_ranks_that_fail_in_each_phase_are_started_again(
    data: Path, unbroken_run: Path, tmp_path: Path, rank: int, kind: Kind
) -> None:
    request = replace(_request(data, tmp_path, kind, rank=rank), max_restarts=len(PHASES))
    assert alone(request) == [0]
    _assert_ended_as(request, unbroken_run)


def test_torchrun_starts_ranks_that_are_killed_in_each_phase_again(
    data: Path, unbroken_run: Path, tmp_path: Path
) -> None:
    request = _request(data, tmp_path, "kill")
    assert torchrun(request, max_restarts=len(PHASES)) == [0]
    _assert_ended_as(request, unbroken_run)


def test_slurm_tasks_that_are_killed_in_each_phase_are_resumed(data: Path, unbroken_run: Path, tmp_path: Path) -> None:
    request = _request(data, tmp_path, "kill")
    for _ in PHASES:
        assert slurm(request) == [1, -signal.SIGKILL], "the task that lost its peer ends by itself"
        assert read_run_state(request.run_dir)["status"] == "failed"
        request = replace(request, resume=True)
    assert slurm(request) == [0, 0]
    _assert_ended_as(request, unbroken_run)


# Before the first step a rank that hangs cannot be told from one that indexes or plans for long.
AFTER_START = PHASES[1:]
WATCHED = f"train.watchdog_s={WATCHDOG_S}"


@pytest.mark.parametrize(("kind", "phases"), [("hang", AFTER_START), ("stop", PHASES)])
def test_ranks_that_hang_in_each_phase_are_started_again(
    data: Path, unbroken_run: Path, tmp_path: Path, kind: Kind, phases: tuple[Phase, ...]
) -> None:
    request = replace(_request(data, tmp_path, kind, WATCHED, phases=phases), max_restarts=len(phases))
    assert alone(request) == [0]
    _assert_ended_as(request, unbroken_run)


@pytest.mark.long
def test_torchrun_starts_ranks_that_hang_in_each_phase_again(data: Path, unbroken_run: Path, tmp_path: Path) -> None:
    request = _request(data, tmp_path, "hang", WATCHED, phases=AFTER_START)
    assert torchrun(request, max_restarts=len(AFTER_START)) == [0]
    _assert_ended_as(request, unbroken_run)


@pytest.mark.long
def test_slurm_tasks_that_hang_in_each_phase_end_and_are_resumed(
    data: Path, unbroken_run: Path, tmp_path: Path
) -> None:
    request = _request(data, tmp_path, "hang", WATCHED, phases=AFTER_START)
    for _ in AFTER_START:
        assert slurm(request) == [1, 1]
        state = read_run_state(request.run_dir)
        assert state["status"] == "failed"
        assert "rank 1" in str(state["error"]).splitlines()[0], "the rank that hangs is named first"
        request = replace(request, resume=True)
    assert slurm(request) == [0, 0]
    _assert_ended_as(request, unbroken_run)


def test_a_rank_that_is_slow_in_each_phase_does_not_hang(data: Path, unbroken_run: Path, tmp_path: Path) -> None:
    request = _request(data, tmp_path, "slow", WATCHED)
    assert alone(request) == [0]
    _assert_ended_as(request, unbroken_run)


def test_a_disk_that_is_full_at_the_last_save_loses_no_checkpoint(
    data: Path, unbroken_run: Path, tmp_path: Path
) -> None:
    request = request_for(data, tmp_path, *EVERY_STEP)
    code, message = launch(request, FailAt(0, NUM_STEPS, "disk full"))
    assert code == 1
    assert "No space left on device" in message
    assert read_run_state(request.run_dir)["status"] == "failed"
    checkpoints = request.run_dir / CHECKPOINTS_FOLDER
    newest = find(checkpoints)[0]
    assert (newest.name, verify(newest)) == (f"step-{NUM_STEPS - 1:08d}", [])
    assert not list(checkpoints.glob("draft-*"))
    assert launch(replace(request, resume=True)) == (0, "")
    assert_same_end(request.run_dir, unbroken_run, NUM_STEPS)


@pytest.mark.parametrize(
    ("launcher", "kind", "stopped"),
    [
        (alone, "signal", [75]),
        (torchrun, "signal", [1]),
        (slurm, "signal", [75, 75]),
        (alone, "signal launcher", [75]),
        (torchrun, "signal launcher", [1]),
    ],
)
def test_a_signal_in_any_phase_saves(
    data: Path, unbroken_run: Path, tmp_path: Path, launcher: Launcher, kind: Kind, stopped: list[int]
) -> None:
    def start(request: TrainRequest) -> None:
        is_last = _faults(request).next_phase == "shutdown"
        # torchrun's agent reports a signal of its own as a failure, also where all ranks have succeeded.
        is_done = is_last and (launcher, kind) != (torchrun, "signal launcher")
        assert launcher(request) == ([0] * len(stopped) if is_done else stopped)

    _stop_in_each_phase(_request(data, tmp_path, kind), start)
    _assert_ended_as(_request(data, tmp_path, kind), unbroken_run)


@pytest.mark.parametrize("launcher", [alone, torchrun, slurm])
def test_a_launcher_that_is_killed_in_any_phase_leaves_ranks_that_save(
    data: Path, unbroken_run: Path, tmp_path: Path, launcher: Launcher
) -> None:
    def start(request: TrainRequest) -> None:
        with pytest.raises(RanksFailed, match="died without a word"):
            launcher(request)
        poll(lambda: not may_be_owned(request.run_dir))

    request = _request(data, tmp_path, "signal launcher", number=signal.SIGKILL)
    # torchrun's agent holds the store, without which ranks cannot connect: before the first step they end instead.
    _stop_in_each_phase(request, start, ends_at_start=launcher is torchrun)
    _assert_ended_as(request, unbroken_run)


def test_a_terminal_that_is_closed_in_any_phase_saves(data: Path, unbroken_run: Path, tmp_path: Path) -> None:
    def start(request: TrainRequest) -> None:
        phase = _faults(request).next_phase
        assert phase is not None
        assert in_terminal(request, (tmp_path / phase).exists) == [0 if phase == "shutdown" else 75]

    request = _request(data, tmp_path, "close terminal")
    _stop_in_each_phase(request, start)
    _assert_ended_as(request, unbroken_run)


def _stop_in_each_phase(
    request: TrainRequest, start: Callable[[TrainRequest], None], ends_at_start: bool = False
) -> None:
    """Start the run until it has been stopped in each phase, and assert what each stop left."""
    last_step = 0
    for phase in PHASES:
        assert _faults(request).next_phase == phase
        start(request)
        if phase == "start" and ends_at_start:
            assert (read_run_state(request.run_dir)["status"], find(request.run_dir / CHECKPOINTS_FOLDER)) == (
                "failed",
                [],
            )
        elif phase != "shutdown":
            last_step = _assert_stopped(request.run_dir, phase, last_step)
        request = replace(request, resume=True)


def _assert_stopped(run_dir: Path, phase: Phase, last_step: int) -> int:
    """Assert that a run that continued after `last_step` was stopped in `phase` and saved; return its step."""
    state = read_run_state(run_dir)
    assert (state["status"], state["error"]) == ("stopped", None), phase
    if phase == "start" and state["step"] == 0:  # the signal came before the first step: there was nothing to save
        assert not find(run_dir / CHECKPOINTS_FOLDER)
        return 0
    assert last_step < state["step"] <= last_step + MAX_STEPS_TO_STOP, phase
    newest = find(run_dir / CHECKPOINTS_FOLDER)[0]
    assert newest.name == f"step-{state['step']:08d}", phase
    assert verify(newest) == [], phase
    assert len(read_metrics(run_dir)) == state["step"], phase
    return int(state["step"])
