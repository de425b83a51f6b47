"""Listen to signals that ask a run to stop; all ranks act on them together, between two steps."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
STOP_LISTENER_THREAD = "mmtrain-signals"
_WAKE = b"\0"


class SignalPipe:
    """Turns stop signals into bytes of a pipe, which a thread can read while the main thread is inside a library.

    Python runs its own handlers only when the main thread returns to bytecode, which a rank that waits for a peer in
    C++ may never do; the interpreter writes to the pipe at once. A signal that our parent ignores stays ignored.
    """

    def __enter__(self) -> Self:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._old_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._old_handlers = {number: signal.signal(number, _ignore_in_python) for number in handled}
        # The launcher blocks signals in a rank until it listens.
        self._old_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def __exit__(self, *error: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_writer)
        os.close(self._writer)
        os.close(self.reader)

    def read(self) -> list[signal.Signals]:
        """Wait for stop signals and return them; return none after `wake`."""
        while True:
            numbers = os.read(self.reader, 64)
            received = [signal.Signals(number) for number in numbers if number in STOP_SIGNALS]
            if received or _WAKE in numbers:
                return received

    def wake(self) -> None:
        """Make a thread in `read` return."""
        os.write(self._writer, _WAKE)


class StopSignalListener:
    """Knows whether a signal has asked this rank to stop; a second Ctrl-C ends the process at once."""

    def __init__(self, end: Callable[[], None] | None = None) -> None:
        self.stop_requested = False
        self._end = end or _end_process_unsaved
        self._pipe = SignalPipe()

    def __enter__(self) -> Self:
        self._pipe.__enter__()
        self._thread = threading.Thread(target=self._listen, name=STOP_LISTENER_THREAD, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.wake()
        self._thread.join()
        self._pipe.__exit__(*error)

    def _listen(self) -> None:
        num_interrupts = 0
        while signals := self._pipe.read():
            self.stop_requested = True
            num_interrupts += signals.count(signal.SIGINT)
            if num_interrupts > 1:
                self._end()


def _ignore_in_python(number: int, frame: FrameType | None) -> None:
    """Do nothing. The interpreter writes only signals with a handler to the pipe."""


def _end_process_unsaved() -> None:
    print("mmtrain: interrupted twice, ending without saving", file=sys.stderr, flush=True)
    os._exit(1)
