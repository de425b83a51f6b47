"""Listen to signals that ask a run to stop; all ranks act on them together, between two steps."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, Self

from mmtrain.errors import StoppedAndSaved
from mmtrain.system_calls import named_signals

STOP_SIGNALS = named_signals(("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"))
STOP_LISTENER_THREAD = "mmtrain-signals"
_WAKE = b"\0"
MAX_LAST_ACT_S = 2.0  # in which a process that ends at once may leave word of it: a file server may hang


def end_on_stop_signals() -> None:
    """Let stop signals end this process at once, with the exit code of a run that can go on, until a run listens.

    To be called first thing: imports take seconds, in which a signal's default action would end the process with an
    exit code of its own. A signal that our parent ignores stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # the host program decides
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_in_python)


def _end_in_python(number: int, frame: FrameType | None) -> NoReturn:
    _end_before_first_step(signal.Signals(number))


def _end_before_first_step(number: signal.Signals) -> NoReturn:
    print(f"mmtrain: {stopped_early_text(number.name)}", file=sys.stderr, flush=True)
    os._exit(StoppedAndSaved.exit_code)


def stopped_early_text(cause: str) -> str:
    """Say that a run was stopped when there was nothing to save."""
    return f"stopped by {cause} before the first step, with nothing to save; start it again as it was started"


class SignalPipe:
    """Turns stop signals into bytes of a pipe, which a thread can read while the main thread is inside a library.

    Python runs its own handlers only when the main thread returns to bytecode, which a rank that waits for a peer in
    C++ may never do; the interpreter writes to the pipe at once. A signal that our parent ignores stays ignored.
    """

    def __enter__(self) -> Self:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._may_handle = threading.current_thread() is threading.main_thread()
        if not self._may_handle:  # the program that runs us in a thread has handlers of its own
            return self
        self._old_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._old_handlers = {number: signal.signal(number, _ignore_in_python) for number in handled}
        # The launcher blocks signals in a rank until it listens.
        self._old_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def __exit__(self, *error: object) -> None:
        if self._may_handle:
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
    """Knows whether a signal has asked this rank to stop; a second Ctrl-C ends the process at once.

    With `has_nothing_to_save` a signal ends the process at once until `save_from_now_on`; `last_act` is called before.
    """

    def __init__(
        self,
        end: Callable[[], None] | None = None,
        has_nothing_to_save: bool = False,
        end_early: Callable[[signal.Signals], None] = _end_before_first_step,
    ) -> None:
        self.stop_requested = False
        self.last_act: Callable[[], None] | None = None
        self._end, self._end_early = end or _end_process_unsaved, end_early
        self._has_nothing_to_save = has_nothing_to_save
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

    def save_from_now_on(self) -> None:
        """Let a stop signal end the step in progress, and the run save."""
        self._has_nothing_to_save = False

    def _stop_early(self, number: signal.Signals) -> None:
        if self.last_act is not None:
            act = threading.Thread(target=self.last_act, name="mmtrain-last-act", daemon=True)
            act.start()
            act.join(MAX_LAST_ACT_S)
        self._end_early(number)

    def _listen(self) -> None:
        num_interrupts = 0
        while signals := self._pipe.read():
            if self._has_nothing_to_save:
                self._stop_early(signals[0])
            self.stop_requested = True
            num_interrupts += signals.count(signal.SIGINT)
            if num_interrupts > 1:
                self._end()


def _ignore_in_python(number: int, frame: FrameType | None) -> None:
    """Do nothing. The interpreter writes only signals with a handler to the pipe."""


def _end_process_unsaved() -> None:
    print("mmtrain: interrupted twice, ending without saving", file=sys.stderr, flush=True)
    os._exit(1)
