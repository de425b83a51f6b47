import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from mmtrain.runtime.resilience.signals import STOP_SIGNALS, StopSignalListener
from tests.waiting import MAX_WAIT_S


def _until_asked(stop: StopSignalListener) -> bool:
    deadline = time.monotonic() + MAX_WAIT_S
    while not stop.stop_requested and time.monotonic() < deadline:
        time.sleep(0.001)
    return stop.stop_requested


@pytest.fixture(autouse=True)
def nothing_ignored() -> Iterator[None]:
    """Let every signal arrive, also where the tests were started by `nohup`, which ignores some."""
    ignored = [number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_and_interrupts_nothing(number: signal.Signals) -> None:
    before = [signal.getsignal(s) for s in STOP_SIGNALS]
    with StopSignalListener() as stop:
        assert not stop.stop_requested
        os.kill(os.getpid(), number)
        assert _until_asked(stop)
    assert [signal.getsignal(s) for s in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_second_interrupt_ends_at_once_but_other_signals_may_repeat() -> None:
    ended = threading.Event()
    with StopSignalListener(end=ended.set) as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert _until_asked(stop)
            stop.stop_requested = False
        assert not ended.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert ended.wait(MAX_WAIT_S)


def test_what_the_parent_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignalListener() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            assert _until_asked(stop)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_before_there_is_something_to_save_a_signal_ends_the_process_at_once() -> None:
    ended: list[str] = []
    done = threading.Event()

    def end(number: signal.Signals) -> None:
        ended.append(number.name)
        done.set()

    with StopSignalListener(has_nothing_to_save=True, end_early=end) as stop:
        stop.last_act = lambda: ended.append("last act")
        os.kill(os.getpid(), signal.SIGUSR1)
        assert done.wait(MAX_WAIT_S)
        stop.save_from_now_on()
        stop.stop_requested = False
        os.kill(os.getpid(), signal.SIGUSR1)
        assert _until_asked(stop)
    assert ended == ["last act", "SIGUSR1"]


def test_a_signal_that_comes_while_a_command_is_imported_ends_it_with_the_code_of_a_run_that_can_go_on() -> None:
    # `sys.meta_path` sees the imports that follow: the first of a heavy module gets the signal.
    program = """
import os, signal, sys
class OnImport:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGUSR1)
sys.meta_path.insert(0, OnImport())
sys.argv = ["mmtrain", "train", "recipe.yaml"]
import mmtrain.cli
assert "typer" not in sys.modules and "torch" not in sys.modules
mmtrain.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr.startswith("mmtrain: stopped by SIGUSR1 before the first step")


def test_a_thread_of_another_program_leaves_its_signals_alone() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    outcome: list[bool] = []

    def listen() -> None:
        with StopSignalListener() as stop:
            outcome.append(stop.stop_requested)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join(MAX_WAIT_S)
    assert outcome == [False]
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
