"""Own the folder of a run: two runs in one folder would mix their metrics and delete each other's checkpoints.

Three things say whether the owner named in `run.lock` is alive. A lock of the operating system, where the file system
has one, is exact and ends with the process, however that ends. On the same machine the pid and the start time of the
process are as exact. On another machine nothing but the lease is left: the owner touches the file every few seconds.
"""

import contextlib
import errno
import fcntl
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from mmtrain.durable_files import disk_errors_named
from mmtrain.errors import UserError
from mmtrain.runtime.run_owner import LOCK_FILE, FolderClaim, FolderOwner, read_owner

# Clocks of two nodes of a cluster never differ by this much; a file that was touched longer ago needs no watching.
MAX_CLOCK_DIFFERENCE_S = 600.0
LEASE_POLL_S = 0.5
# A file system without locks answers with one of these.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@dataclass(frozen=True)
class Lease:
    """How often an owner shows that it is alive, and after how long without a sign it counts as dead, in seconds.

    The duration is longer than a stalled file server or a step that holds Python's interpreter lock.
    """

    renewal_s: float = 10.0
    duration_s: float = 60.0


class FolderLock:
    """Rank 0's ownership of a run's folder, renewed by a thread until it is closed.

    The main thread may hang: the folder is still owned until the process is gone, since what hangs may go on later.
    """

    def __init__(self, run_dir: Path, notify: Callable[[str], None] = print, lease: Lease | None = None) -> None:
        self._run_dir, self._path = run_dir, run_dir / LOCK_FILE
        self._notify, self._lease = notify, lease or Lease()
        self._file: int | None = None
        self._owner: FolderOwner | None = None  # this process, once it owns the folder
        self._has_os_lock = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="mmtrain-lease", daemon=True)
        self.is_lost = False  # another run has taken the folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def claim(self, force: bool = False) -> FolderClaim:
        """Take the folder, which must exist; with `force`, also from an owner that is alive.

        Raises UserError that names an owner that is alive, and RunError when the lock file cannot be written.
        """
        with disk_errors_named(self._run_dir):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            is_free = self._take_os_lock()
            before = read_owner(self._run_dir)
            if not force and (not is_free or self._is_alive(before)):
                raise UserError(_in_use(self._run_dir, before))
            # The run that force takes the folder from may be alive, so that its drafts are not ours.
            run_id = before.run_id if before is not None and not force else uuid.uuid4().hex[:8]
            owner = _this_process(run_id)
            self._write(owner)
        self._owner = owner
        self._thread.start()
        return FolderClaim(self._run_dir, owner.run_id, owner.claim_id)

    def close(self) -> None:
        """Give the folder back, if this process owns it."""
        if self._owner is not None:
            self._closed.set()
            self._thread.join()
            # On a disk that fails now, the next run sees that this process is gone.
            with contextlib.suppress(OSError):
                if FolderClaim(self._run_dir, self._owner.run_id, self._owner.claim_id).is_held():
                    self._write(replace(self._owner, released=True))
            self._owner = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _take_os_lock(self) -> bool:
        """Try to take the lock of the operating system; return False if another process holds it.

        flock, not fcntl's record locks: those are lost when any part of the process closes the file.
        """
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return True
        self._has_os_lock = True
        return True

    def _is_alive(self, owner: FolderOwner | None) -> bool:
        """Return whether the owner named in the lock file, on which no other process here holds a lock, is alive."""
        if owner is None:
            # Nobody was here before, or the name is damaged. An owner that is alive holds the lock, if there are locks.
            return not self._has_os_lock and self._path.stat().st_size > 0 and self._is_renewed()
        if owner.released:
            return False
        machine = _machine()
        if machine is not None and owner.machine == machine:
            return _process_start(owner.pid) == owner.process_start
        self._notify(
            f"mmtrain: {self._run_dir} belongs to {owner.to_text()}; waiting up to {self._lease.duration_s:.0f} s for "
            "a sign of life from there"
        )
        return self._is_renewed()

    def _is_renewed(self) -> bool:
        """Watch the lock file for the length of a lease; return whether its owner touched it and still owns the folder.

        Only a change counts, by the clock of this machine: the clocks of two nodes may differ.
        """
        before = self._path.stat().st_mtime_ns
        if time.time() - before / 1e9 > self._lease.duration_s + MAX_CLOCK_DIFFERENCE_S:
            return False
        deadline_s = time.monotonic() + self._lease.duration_s
        while time.monotonic() < deadline_s:
            self._closed.wait(min(LEASE_POLL_S, self._lease.renewal_s / 2))
            # Opening a file makes a network file system ask its server for the file's times.
            with self._path.open("rb") as file:
                touched = os.fstat(file.fileno()).st_mtime_ns
            if touched != before:
                owner = read_owner(self._run_dir)
                return owner is None or not owner.released
        return False

    def _renew(self) -> None:
        """Touch the lock file until it is closed, or until it names another owner.

        The content stays: a late renewal must not overwrite the name of a run that has taken the folder meanwhile.
        """
        assert self._owner is not None
        claim = FolderClaim(self._run_dir, self._owner.run_id, self._owner.claim_id)
        while not self._closed.wait(self._lease.renewal_s):
            if not claim.is_held():
                self.is_lost = True
                return
            with contextlib.suppress(OSError):  # a file server that is away may come back before the lease ends
                os.utime(self._path)
                if not self._has_os_lock:  # its holder, from whom we were told to take the folder, may have ended
                    self._take_os_lock()

    def _write(self, owner: FolderOwner) -> None:
        """Write the owner into the file, never a new file in its place: the lock is on this one."""
        assert self._file is not None
        content = owner.to_bytes()
        try:
            os.pwrite(self._file, content, 0)
            os.ftruncate(self._file, len(content))
            os.fsync(self._file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def may_be_owned(run_dir: Path) -> bool:
    """Return whether a run may be alive in this folder: one of this machine is, or one of another machine was."""
    owner = read_owner(run_dir)
    if owner is None or owner.released:
        return False
    return owner.machine != _machine() or _process_start(owner.pid) == owner.process_start


def _in_use(run_dir: Path, owner: FolderOwner | None) -> str:
    name = "another process" if owner is None or owner.released else owner.to_text()
    stop = "stop it" if owner is None else f"stop it (`kill {owner.pid}` on {owner.host} makes it save first)"
    return (
        f"{run_dir} is in use by {name}, and two runs in one folder would overwrite each other. Wait until it has "
        f"ended, {stop}, or choose another --run-dir. If it is certain that it is gone, add --force-unlock"
    )


def _this_process(run_id: str) -> FolderOwner:
    return FolderOwner(
        run_id=run_id,
        claim_id=uuid.uuid4().hex[:12],
        host=socket.gethostname(),
        machine=_machine() or "",
        pid=os.getpid(),
        process_start=_process_start(os.getpid()) or "",
        since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    )


def _machine() -> str | None:
    """Return a name for this boot of this machine and its table of processes; None where the system does not say.

    Containers of one machine have tables of their own; so the host's name would not do.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return None


def _process_start(pid: int) -> str | None:
    """Return when a process of this machine started, in ticks since boot; None if it is gone or has ended.

    Unlike the time of day that libraries compute from it, this number does not move when the clock is set.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name of the program, in parentheses, may contain anything
    return None if state in "ZX" else rest[18]
