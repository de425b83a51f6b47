"""Kill a process that stays stopped (SIGSTOP): run as a program of its own, beside each rank of an elastic run.

A stopped process hears no SIGTERM, so torchrun's agent waits 30 seconds before it kills one and lets the run go on
without it. Nothing but the standard library is imported here, as the program starts with every rank.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_S = 1.0
_STOPPED = "T"  # by a signal; `t` is a process that a debugger has stopped


@contextlib.contextmanager
def killed_if_stopped(limit_s: float) -> Iterator[None]:
    """Let another process kill this one if it stays stopped for `limit_s` within the body; only Linux says so."""
    if not Path("/proc/self/stat").exists():
        yield
        return
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(limit_s)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE)  # the pipe's end says that this process has ended
    assert watcher.stdin is not None
    try:
        yield
    finally:
        watcher.stdin.close()
        watcher.wait()


def watch(
    pid: int,
    limit_s: float,
    has_ended: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return when the process has ended; kill it if it is found stopped, each time, for `limit_s`.

    has_ended: waits a moment before it answers.
    """
    stopped_since_s: float | None = None
    while not has_ended():
        if state_of(pid) != _STOPPED:
            stopped_since_s = None
        elif stopped_since_s is None:
            stopped_since_s = clock()
        elif clock() - stopped_since_s >= limit_s:
            os.kill(pid, signal.SIGKILL)
            return


def state_of(pid: int) -> str:
    """Return the letter of a process's state; empty if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]  # the name in front may hold anything


def main() -> None:
    """Watch the process that has started this one."""
    pid, limit_s = int(sys.argv[1]), float(sys.argv[2])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # they are for the rank, which takes its time
        signal.signal(number, signal.SIG_IGN)

    def has_ended() -> bool:
        is_closed = bool(select.select([sys.stdin], [], [], POLL_S)[0])
        return is_closed or os.getppid() != pid

    watch(pid, limit_s, has_ended)


if __name__ == "__main__":
    main()
