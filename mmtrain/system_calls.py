"""Calls that Linux has and macOS or Windows lack, each with what takes its place there.

Planning runs on all three. Training runs on Linux, so what only training calls is not here.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import Literal

try:
    import fcntl
    import resource
except ModuleNotFoundError:  # Windows
    _HAS_UNIX_MODULES = False
else:
    _HAS_UNIX_MODULES = True

Limit = Literal["processes", "open files"]
_ZEROS = bytes(1 << 20)


def can_fork() -> bool:
    """Return whether processes start others as copies of themselves here, which training does."""
    return hasattr(os, "fork")


def num_scheduled_cores() -> int:
    """Return how many cores the system runs this process on, whatever share of their time it gets."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def named_signals(names: Sequence[str]) -> tuple[signal.Signals, ...]:
    """Return those of the signals that this system has: SIGUSR1 and SIGHUP are not on Windows."""
    return tuple(signal.Signals[name] for name in names if name in signal.Signals.__members__)


def user_limit(what: Limit) -> int | None:
    """Return how many the system lets this user or process have (`ulimit -u`, `ulimit -n`); None for any number."""
    if not _HAS_UNIX_MODULES:
        return None
    number = resource.getrlimit(resource.RLIMIT_NPROC if what == "processes" else resource.RLIMIT_NOFILE)[0]
    return None if number == resource.RLIM_INFINITY else number


def open_memory_file() -> int:
    """Return the descriptor of a file without a name, in memory where the system can: it ends with its users."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mmtrain")
    with tempfile.TemporaryFile() as unnamed:
        return os.dup(unnamed.fileno())


def num_data_bytes() -> int | None:
    """Return the private memory of this process that it may write, used or not; None where the system limits none."""
    if not _HAS_UNIX_MODULES or not sys.platform.startswith("linux"):
        return None
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def limit_data_bytes(num_bytes: int) -> None:
    """Let this process have so much of what `num_data_bytes` counts; beyond that the system gives it no memory."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def num_processor_ticks(pid: int) -> int | None:
    """Return for how many clock ticks processors have worked for a process and its threads; None if unknown."""
    fields = process_fields(pid)
    return None if fields is None else int(fields[11]) + int(fields[12])


def process_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third one, the state, on; None if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the name of the program, in parentheses, may contain anything


def leave_no_core_file() -> None:
    """Let the system write no file with the memory of this process where it crashes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def lock_open_file(file: int, *, wait: bool, shared: bool = False) -> bool:
    """Lock an open file against other processes, as long as it is open; return whether it is locked.

    Others may have it too if it is `shared` by all of them. Raises BlockingIOError if another process holds it and this
    one must not wait, and OSError for a file system without locks.
    """
    if not _HAS_UNIX_MODULES:  # what needs one writer works without: a second process does the same work again
        return False
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
    return True


def open_to_read(path: str) -> int:
    """Open a file for reading, and return its descriptor. Opening a pipe does not block. Raises OSError."""
    # Windows has no O_NONBLOCK, and would translate line ends without O_BINARY, which only Windows has.
    return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))


def read_bytes_at(file: int, count: int, offset: int) -> bytes:
    """Read up to `count` bytes from byte `offset` of an open file, of which only one thread reads. Raises OSError."""
    if hasattr(os, "pread"):
        return os.pread(file, count, offset)
    os.lseek(file, offset, os.SEEK_SET)
    return os.read(file, count)


def reserve_bytes(file: int, num_bytes: int) -> None:
    """Give an open file at least this size, with its space on the disk. Raises OSError for a full disk.

    In a mapping of a file without its space, a full disk is a signal that ends the process.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
        return
    position = os.lseek(file, 0, os.SEEK_END)
    while position < num_bytes:
        position += os.write(file, _ZEROS[: num_bytes - position])
