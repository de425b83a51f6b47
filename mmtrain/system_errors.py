"""What the system answers: turn an error of a path or a limit into a message that says what to do."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmtrain.errors import UserError
from mmtrain.machine_limits import machine_limits, max_processes

# What to do about an error of the file system.
_REMEDIES = {
    errno.ENOSPC: "free space there, or choose another folder",
    errno.EDQUOT: "free space there, or choose another folder",
    errno.EFBIG: "raise the limit of a file's size (`ulimit -f`), or choose another folder",
    errno.EACCES: "give yourself access, or choose another path",
    errno.EPERM: "give yourself access, or choose another path",
    errno.EROFS: "choose a folder that is not mounted read-only",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of this path is a file; check the path",
    errno.EISDIR: "name a file, not a folder",
    errno.EEXIST: "choose another path",
    errno.ENAMETOOLONG: "choose shorter names",
    errno.ELOOP: "a link on this path leads back to itself; check the path",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.EIO: "the disk or its server fails; look at the system's log (`dmesg`)",
    errno.ESTALE: "the file server has lost it; mount the folder again",
    errno.ENOTCONN: "the file server is away; mount the folder again",
    errno.ETIMEDOUT: "the file server does not answer",
}


def describe_os_error(error: OSError, path: Path | str | None = None) -> str:
    """Describe what a file system answered: the path (by default the error's own), the reason and what to do."""
    where = path if path is not None else os.fsdecode(error.filename)
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{where}: {error.strerror or error}" + (f"; {remedy}" if remedy else "")


@contextmanager
def system_errors_named() -> Iterator[None]:
    """Turn an OSError that names a path, and a lack of processes, into a UserError; others pass as bugs of ours."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and not isinstance(error.filename, int):
            raise UserError(describe_os_error(error)) from error
        if error.errno != errno.EAGAIN:  # of a fork
            raise
        raise UserError(_describe_process_limit()) from error
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        raise UserError(_describe_process_limit()) from error


def _describe_process_limit() -> str:
    limit = max_processes(machine_limits())
    return (
        "the system starts no more threads or processes for this user: "
        f"{'no limit is known' if limit is None else f'{limit} are allowed'}. Raise the limit (`ulimit -u`; in a "
        "container --pids-limit), or start fewer ranks and data.workers"
    )
