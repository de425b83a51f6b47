"""A function in a process of its own: its result, its errors, its output, and what ends it."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mmtrain.api.own_process import run_in_own_process
from mmtrain.errors import RankDied, RunError, StoppedAndSaved, UserError
from tests.waiting import poll

ROOT = Path(__file__).parents[2]


def answer(number: int) -> tuple[int, int]:
    print(f"asked for {number}")
    return os.getpid(), 2 * number


def fail(kind: str) -> None:
    if kind == "user":
        raise UserError("wrong input")
    if kind == "rank":
        raise RankDied("rank 3 was killed", 3)
    if kind == "file":
        Path("/nowhere/at/all").read_bytes()
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("a bug")


def wait_for_signal() -> None:
    print(f"waiting {os.getpid()}", flush=True)
    while True:
        signal.pause()


def wait_and_save(path: Path) -> None:
    """Listen as a run does: at the first signal, say so in a file and end as a run that saved."""

    def save(number: int, _: object) -> None:
        path.write_text(signal.Signals(number).name)
        raise StoppedAndSaved(f"saved after {signal.Signals(number).name}")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, save)
    wait_for_signal()


def caller(function: str, *arguments: object) -> "subprocess.Popen[str]":
    """Start Python that calls `run_in_own_process` in its main thread, in a process group of its own."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom mmtrain.api.own_process import run_in_own_process\n"
        f"from tests.api.test_own_process import {function}\n"
        f"run_in_own_process({function}, *{arguments!r}, saves_on_stop={function == 'wait_and_save'})\n"
    ).replace("PosixPath", "Path")
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        process_group=0,
    )  # fmt: skip


def read_pid(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    word, number = process.stdout.readline().split()
    assert word == "waiting"
    return int(number)


def test_the_result_and_the_output_come_back() -> None:
    output = io.StringIO()
    pid, result = run_in_own_process(answer, 21, output=output)
    assert result == 42
    assert pid != os.getpid()
    assert output.getvalue() == "asked for 21\n"
    assert not psutil.pid_exists(pid)


def test_errors_keep_their_type_and_attributes() -> None:
    with pytest.raises(UserError, match=r"^wrong input$"):
        run_in_own_process(fail, "user")
    with pytest.raises(RankDied, match=r"^rank 3 was killed$") as caught:
        run_in_own_process(fail, "rank")
    assert caught.value.rank == 3
    with pytest.raises(UserError, match="/nowhere/at/all"):
        run_in_own_process(fail, "file")


def test_a_bug_is_named_and_its_traceback_shown() -> None:
    output = io.StringIO()
    with pytest.raises(RunError, match="ValueError: a bug; its traceback is above"):
        run_in_own_process(fail, "bug", output=output)
    assert 'raise ValueError("a bug")' in output.getvalue()


def test_a_killed_process_is_named() -> None:
    with pytest.raises(RunError, match="was killed by SIGKILL"):
        run_in_own_process(fail, "killed")


def test_an_interrupt_of_the_whole_group_ends_what_saves_nothing() -> None:
    process = caller("wait_for_signal")
    pid = read_pid(process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert not psutil.pid_exists(pid)


def test_an_interrupt_of_the_whole_group_reaches_a_run_once(tmp_path: Path) -> None:
    """As a notebook's stop button sends it: a second interrupt would end the run without saving."""
    process = caller("wait_and_save", tmp_path / "saved")
    pid = read_pid(process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert "StoppedAndSaved: saved after SIGINT" in errors
    assert (tmp_path / "saved").read_text() == "SIGINT"
    assert not psutil.pid_exists(pid)


def test_a_run_whose_caller_is_killed_saves(tmp_path: Path) -> None:
    process = caller("wait_and_save", tmp_path / "saved")
    pid = read_pid(process)
    own_process = psutil.Process(pid)
    process.kill()
    process.communicate()
    with contextlib.suppress(psutil.NoSuchProcess):
        poll(lambda: not own_process.is_running() or own_process.status() == psutil.STATUS_ZOMBIE)
    assert (tmp_path / "saved").read_text() == "SIGTERM"
