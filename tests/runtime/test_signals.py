import os
import signal
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
