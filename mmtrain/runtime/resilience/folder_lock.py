"""Own the folder of a run: two runs in one folder would mix their metrics and delete each other's checkpoints.

Three things say whether the owner named in `run.lock` is alive. A lock of the operating system, where the file system
has one, is exact and ends with the process, however that ends. On the same machine the pid and the start time of the
process are as exact. On another machine nothing but the lease is left: the owner touches the file every few seconds.

A launcher that starts its ranks again after a failure keeps the folder between two starts, when no rank does: the owner
names it, and counts as alive while it is.
"""

import contextlib
import errno
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

from mmtrain.durable_files import disk_errors_named, file_named, sync_file, take_lock
from mmtrain.errors import UserError
from mmtrain.runtime.run_owner import LOCK_FILE, FolderClaim, FolderOwner, ProcessIdentity, read_owner
from mmtrain.system_calls import process_fields

# Clocks of two nodes of a cluster never differ by this much; a file that was touched longer ago needs no watching.
MAX_CLOCK_DIFFERENCE_S = 600.0
LEASE_POLL_S = 0.5


@dataclass(frozen=True)
class Lease:
    """How often an owner shows that it is alive, and after how long without a sign it counts as dead, in seconds.

    The duration is longer than a stalled file server or a step that holds Python's interpreter lock.
    """

    renewal_s: float = 10.0
    duration_s: float = 60.0


# Of an elastic run, which is to go on within a minute when the node of rank 0 is gone. Its ranks end by themselves when
# they have not heard of each other for as long. Two renewals of a run that is not elastic fit into the duration.
ELASTIC_LEASE = Lease(renewal_s=4.0, duration_s=25.0)


class FolderLock:
    """Rank 0's ownership of a run's folder, renewed by a thread until it is closed.

    The main thread may hang: the folder is still owned until the process is gone, since what hangs may go on later.
    """

    def __init__(
        self,
        run_dir: Path,
        notify: Callable[[str], None] = print,
        lease: Lease | None = None,
        launcher: ProcessIdentity | None = None,
    ) -> None:
        """Prepare to own `run_dir`; `launcher` is the process that keeps the folder after a failure of this one."""
        self._run_dir, self._path = run_dir, run_dir / LOCK_FILE
        self._launcher = launcher
        self._notify, self._lease = notify, lease or Lease()
        self._file: int | None = None
        self._owner: FolderOwner | None = None  # this process, once it owns the folder
        self._has_os_lock = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="mmtrain-lease", daemon=True)
        self.is_lost = False  # another run has taken the folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        self.close(has_failed=error_type is not None)

    def claim(self, force: bool = False) -> FolderClaim:
        """Take the folder, which must exist; with `force`, also from an owner that is alive.

        Raises UserError that names an owner that is alive, and RunError when the lock file cannot be written.
        """
        with disk_errors_named(self._run_dir):
            before = read_owner(self._run_dir)
            # Before taking the lock, which the launcher's next rank 0 must find free.
            if not force and self._is_kept(before):
                raise UserError(_in_use(self._run_dir, before))
            self._file = _open_lock(self._path, os.O_CREAT)
            is_free = self._take_os_lock()
            before = read_owner(self._run_dir)
            if not force and (not is_free or self._is_kept(before) or self._is_alive(before)):
                raise UserError(_in_use(self._run_dir, before))
            # The run that force takes the folder from may be alive, so that its drafts are not ours.
            run_id = before.run_id if before is not None and not force else uuid.uuid4().hex[:8]
            owner = _new_owner(run_id, self._launcher)
            _write_owner(self._file, self._path, owner)
        self._owner = owner
        self._thread.start()
        return FolderClaim(self._run_dir, owner.run_id, owner.claim_id)

    def close(self, has_failed: bool = False) -> None:
        """Give the folder back, if this process owns it; after a failure to the launcher, if that keeps it."""
        if self._owner is not None:
            self._closed.set()
            self._thread.join()
            is_kept = has_failed and self._launcher is not None
            # On a disk that fails now, the next run sees that this process is gone.
            with contextlib.suppress(OSError):
                if FolderClaim(self._run_dir, self._owner.run_id, self._owner.claim_id).is_held() and not is_kept:
                    assert self._file is not None
                    _write_owner(self._file, self._path, replace(self._owner, released=True))
            self._owner = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _take_os_lock(self) -> bool:
        """Try to take the lock of the operating system; return False if another process holds it."""
        assert self._file is not None
        with file_named(self._path):
            is_locked = take_lock(self._file, wait=False)
        self._has_os_lock = bool(is_locked)
        return is_locked is not False

    def _is_kept(self, owner: FolderOwner | None) -> bool:
        """Return whether a launcher on this machine, other than ours, keeps the folder for its ranks."""
        if owner is None or owner.released or owner.launcher is None or owner.launcher == self._launcher:
            return False
        return owner.machine == _machine() and _is_running(owner.launcher)

    def _is_alive(self, owner: FolderOwner | None) -> bool:
        """Return whether the owner named in the lock file, on which no other process here holds a lock, is alive."""
        if owner is None:
            # Nobody was here before, or the name is damaged. An owner that is alive holds the lock, if there are locks.
            return not self._has_os_lock and self._path.stat().st_size > 0 and self._is_renewed()
        if owner.released:
            return False
        machine = _machine()
        if machine is not None and owner.machine == machine:
            return _is_running(owner.process)
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
                os.utime(self._path, follow_symlinks=False)
                if not self._has_os_lock:  # its holder, from whom we were told to take the folder, may have ended
                    self._take_os_lock()


class FolderKeeper:
    """The launcher's part in owning a folder: between two starts of its ranks nobody else takes it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self.identity = run_dir, this_process()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Give the folder back, which no rank uses any more."""
        owner = read_owner(self._run_dir)
        if owner is None or owner.released or owner.launcher != self.identity:
            return
        path = self._run_dir / LOCK_FILE
        # On a disk that fails now, the next run sees that this process is gone.
        with contextlib.suppress(OSError):
            file = _open_lock(path)
            try:
                _write_owner(file, path, replace(owner, released=True))
            finally:
                os.close(file)


def _open_lock(path: Path, flags: int = 0) -> int:
    """Open a lock file for writing. Raises UserError for a link, by which the folder's giver would choose the file."""
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path}: is a symbolic link, which is not followed; remove it") from None
        raise


def _write_owner(file: int, path: Path, owner: FolderOwner) -> None:
    """Write the owner into the open file, never a new file in its place: the lock is on this one."""
    content = owner.to_bytes()
    with file_named(path):
        os.pwrite(file, content, 0)
        os.ftruncate(file, len(content))
        sync_file(file)


def may_be_owned(run_dir: Path) -> bool:
    """Return whether a run may be alive in this folder: one of this machine is, or one of another machine was.

    A launcher that calls this does not count itself.
    """
    owner = read_owner(run_dir)
    if owner is None or owner.released:
        return False
    if owner.machine != _machine() or _is_running(owner.process):
        return True
    return owner.launcher is not None and owner.launcher != this_process() and _is_running(owner.launcher)


def _in_use(run_dir: Path, owner: FolderOwner | None) -> str:
    if owner is not None and owner.launcher is not None and owner.machine == _machine():
        # It stops the ranks too, and there are none between two of their starts.
        owner = replace(owner, pid=owner.launcher.pid)
    name = "another process" if owner is None or owner.released else owner.to_text()
    stop = "stop it" if owner is None else f"stop it (`kill {owner.pid}` on {owner.host} makes it save first)"
    return (
        f"{run_dir} is in use by {name}, and two runs in one folder would overwrite each other. Wait until it has "
        f"ended, {stop}, or choose another --run-dir. If it is certain that it is gone, add --force-unlock"
    )


def this_process() -> ProcessIdentity:
    """Return what this process is known by on this machine."""
    return ProcessIdentity(os.getpid(), _process_start(os.getpid()) or "")


def _is_running(process: ProcessIdentity) -> bool:
    return _process_start(process.pid) == process.start


def _new_owner(run_id: str, launcher: ProcessIdentity | None) -> FolderOwner:
    """Return a claim of this process."""
    process = this_process()
    return FolderOwner(
        run_id=run_id,
        claim_id=uuid.uuid4().hex[:12],
        host=socket.gethostname(),
        machine=_machine() or "",
        pid=process.pid,
        process_start=process.start,
        since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        launcher_pid=None if launcher is None else launcher.pid,
        launcher_start="" if launcher is None else launcher.start,
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
    fields = process_fields(pid)
    return None if fields is None or fields[0] in "ZX" else fields[19]
