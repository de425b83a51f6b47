"""Files that survive a kill, a power cut and a full disk: written whole by rename, or appended to and cut later."""

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from mmtrain.errors import RunError
from mmtrain.system_calls import lock_open_file
from mmtrain.system_errors import describe_os_error

# What file systems answer that cannot do what was asked (FUSE, SMB, some of containers), as git and databases read it.
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the system names no file with these


def write_whole(path: Path, content: str) -> None:
    """Replace a file in one step: a reader, and a run after a power cut, finds the old content or the new one.

    Raises OSError that names the file, as the operating system's own does not when the disk is full.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")  # several ranks may write at the same moment
    with file_named(path):
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                sync_file(file.fileno())
            draft.replace(path)
            sync_folder(path.parent)
        except OSError:
            draft.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def file_named(path: Path) -> Iterator[None]:
    """Let an OSError name this file, as the operating system's own does not that comes from an open file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def append_line(path: Path, line: str) -> None:
    """Append a line to a log; a kill may leave its beginning, which `cut_log` removes."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


@dataclass(frozen=True)
class LogEntries:
    """What a file of one JSON object per line holds, and how many lines are none."""

    entries: list[dict[str, Any]]
    num_damaged: int  # without a last line that has no end, which is what a kill leaves
    is_torn: bool = False  # there is such a line, and it is no entry


def read_log(path: Path, is_valid: Callable[[dict[str, Any]], bool] = lambda _: True) -> LogEntries:
    """Read a file of one JSON object per line, whatever its lines are; empty if there is none, or a pipe or device."""
    if not path.is_file():
        return LogEntries([], 0)
    lines = path.read_bytes().split(b"\n")
    entries = []
    num_damaged = 0
    is_torn = False
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict) and is_valid(entry):
            entries.append(entry)
        elif number < len(lines):  # the last one has no end, or is the nothing after the last end
            num_damaged += 1
        else:
            is_torn = bool(line)
    return LogEntries(entries, num_damaged, is_torn)


def cut_log(
    path: Path,
    keep: Callable[[dict[str, Any]], bool],
    notify: Callable[[str], None],
    is_valid: Callable[[dict[str, Any]], bool] = lambda _: True,
) -> None:
    """Keep only some entries of a log, in one step; set the file aside first if it holds lines that are no entries.

    `notify` hears of that, and of a last line without an end.
    """
    log = read_log(path, is_valid)
    if log.is_torn:
        notify(f"{path}: its last line has no end, as a kill or a full disk leaves one, and is dropped")
    if log.num_damaged:
        notify(set_aside(path, f"{log.num_damaged} of its lines cannot be read; the others are kept"))
    elif not path.is_file():
        return
    write_whole(path, "".join(json.dumps(entry) + "\n" for entry in log.entries if keep(entry)))


def set_aside(path: Path, reason: str) -> str:
    """Rename a damaged file, so that it can be looked at and is in nobody's way; return a sentence for the user."""
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    return f"{path} is damaged and set aside as {aside.name}: {reason}"


@contextlib.contextmanager
def disk_errors_named(folder: Path) -> Iterator[None]:
    """Turn what a disk did to a file of `folder` into a RunError that names the file; other errors pass."""
    try:
        yield
    except OSError as error:
        path = error.filename and Path(os.fsdecode(error.filename))
        if not (path and path.is_relative_to(folder)) and error.errno not in _DISK_FULL:
            raise
        raise RunError(describe_os_error(error, path or folder)) from error


def sync_file(file: int) -> None:
    """Make the content of an open file survive a power cut, where its file system can promise that.

    One that cannot says so at every call; its files are as safe as it makes them. Raises OSError for a disk that fails.
    """
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def sync_folder(folder: Path) -> None:
    """Make renames and new files in a folder survive a power cut, where its file system can promise that.

    Raises OSError for a disk that fails.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder may be written to by those who may not list it
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (*_UNSUPPORTED, errno.EBADF, errno.EACCES):  # SMB: open for reading is not enough
            raise
    finally:
        os.close(handle)


def take_lock(file: int, *, wait: bool, shared: bool = False) -> bool | None:
    """Lock an open file against other processes until it is closed, also by the end of the process.

    Return whether that worked: always, with `wait`; None where there are no locks. Several processes may share a lock.

    flock, not fcntl's record locks: those are lost when any part of the process closes the file. File systems without
    locks answer in many ways (ENOLCK, ENOSYS, EOPNOTSUPP, EBADF, EPERM, EREMOTEIO, ...). Raises OSError for a disk that
    fails (EIO).
    """
    try:
        is_locked = lock_open_file(file, wait=wait, shared=shared)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.EIO:
            raise
        return None
    return True if is_locked else None
