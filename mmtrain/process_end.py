"""End the process where a library that does not answer any more would keep it from ending."""

import os
import sys
import threading

_may_hang = threading.Event()


def expect_hang() -> None:
    """Note that something was left behind which may hang at the end of the process, such as a tracker's own hooks."""
    _may_hang.set()


def end_now_if_expected(code: object) -> None:
    """End the process with the exit code of a `SystemExit`, past all hooks, if something was left behind that hangs."""
    if not _may_hang.is_set():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if code is None:
        os._exit(0)
    os._exit(code if isinstance(code, int) else 1)
