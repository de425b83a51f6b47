"""Signals that ask a run to stop: they are noted at once, and acted on between two steps, by all ranks at the same."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_WAKE = b"\0"


class SignalPipe:
    """Turns stop signals into bytes that can be waited for, even while the main thread sits in a library's wait.

    Python runs its own handlers only when the main thread comes back to bytecode; a rank that waits for a peer in C++
    might never. The interpreter writes to a pipe at once. A signal that the parent ignores for us stays ignored.
    """

    def __enter__(self) -> Self:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._old_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        kept = [s for s in STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
        self._old = {s: signal.signal(s, _note) for s in kept}
        # The launcher holds signals back from a rank until somebody listens.
        self._old_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def __exit__(self, *error: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_writer)
        os.close(self._writer)
        os.close(self.reader)

    def read(self) -> list[signal.Signals]:
        """Wait for stop signals and return them; none after `wake`."""
        while True:
            numbers = os.read(self.reader, 64)
            found = [signal.Signals(n) for n in numbers if n in STOP_SIGNALS]
            if found or _WAKE in numbers:
                return found

    def wake(self) -> None:
        """Let a thread in `read` come back."""
        os.write(self._writer, _WAKE)


class StopSignalListener:
    """Whether a signal has asked this rank to stop; a second Ctrl-C ends the process there and then."""

    def __init__(self, end: Callable[[], None] | None = None) -> None:
        self.stop_requested = False
        self._end = end or _end_now
        self._pipe = SignalPipe()

    def __enter__(self) -> Self:
        self._pipe.__enter__()
        self._thread = threading.Thread(target=self._listen, name="mmtrain-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.wake()
        self._thread.join()
        self._pipe.__exit__(*error)

    def _listen(self) -> None:
        interrupts = 0
        while signals := self._pipe.read():
            self.stop_requested = True
            interrupts += signals.count(signal.SIGINT)
            if interrupts > 1:
                self._end()


def _note(number: int, frame: FrameType | None) -> None:
    """Let the interpreter write to the pipe, which it only does for signals that have a handler."""


def _end_now() -> None:
    print("mmtrain: interrupted twice, ending without saving", file=sys.stderr, flush=True)
    os._exit(1)
