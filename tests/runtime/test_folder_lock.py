"""One run owns a folder: who owns it, how others know that it is alive, and how it changes hands."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mmtrain.errors import FolderTaken, RunError, UserError
from mmtrain.runtime.resilience import folder_lock
from mmtrain.runtime.resilience.folder_lock import FolderKeeper, FolderLock, Lease, may_be_owned
from mmtrain.runtime.run_owner import LOCK_FILE, FolderOwner, read_owner
from tests.full_disk import full_disk
from tests.waiting import MAX_WAIT_S

QUICK = Lease(renewal_s=0.02, duration_s=0.3)
PATIENT = replace(QUICK, duration_s=MAX_WAIT_S)  # of who waits for a sign of life that is sure to come
OWN = "from pathlib import Path; from mmtrain.runtime.resilience.folder_lock import FolderLock\n"
OWN += "import sys; FolderLock(Path(sys.argv[1])).claim(); print('owned', flush=True); sys.stdin.read()"


def _owner(run_dir: Path) -> FolderOwner:
    owner = read_owner(run_dir)
    assert owner is not None
    return owner


def _write(run_dir: Path, owner: FolderOwner) -> None:
    (run_dir / LOCK_FILE).write_text(json.dumps(asdict(owner)))


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, such as Lustre mounted with noflock."""

    def fail(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", fail)


def _owned_before(run_dir: Path) -> FolderOwner:
    """Own the folder and give it back; return what the lock file would say of an owner that was killed."""
    with FolderLock(run_dir) as lock:
        lock.claim()
        return _owner(run_dir)


def test_the_second_run_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as first, FolderLock(tmp_path) as second:
        first.claim()
        with pytest.raises(UserError) as refused:
            second.claim()
        message = str(refused.value)
        assert message.startswith(f"{tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}, since 20")
        assert f"`kill {os.getpid()}` on {socket.gethostname()}" in message
        assert "--force-unlock" in message
        assert may_be_owned(tmp_path)
    assert not may_be_owned(tmp_path)


def test_a_folder_given_back_keeps_the_id_of_its_run(tmp_path: Path) -> None:
    claims = []
    for _ in range(2):
        with FolderLock(tmp_path) as lock:
            claims.append(lock.claim())
    assert claims[0].run_id == claims[1].run_id
    assert claims[0].claim_id != claims[1].claim_id


def test_a_launcher_keeps_the_folder_after_a_rank_has_failed(tmp_path: Path) -> None:
    with FolderKeeper(tmp_path) as keeper:
        for _ in range(2):
            with FolderLock(tmp_path, launcher=keeper.identity) as rank:
                rank.claim()
                rank.close(has_failed=True)
            _write(tmp_path, replace(_owner(tmp_path), process_start="1"))  # the rank is gone
            with FolderLock(tmp_path) as other, pytest.raises(UserError, match=f"in use by process {os.getpid()} on"):
                other.claim()
        assert not may_be_owned(tmp_path), "the launcher does not count itself"
    with FolderLock(tmp_path) as other:
        other.claim()


@pytest.mark.parametrize("locks", [True, False])
def test_the_folder_of_a_killed_owner_is_free(tmp_path: Path, locks: bool, request: pytest.FixtureRequest) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWN, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        if not locks:
            request.getfixturevalue("no_locks")
        with FolderLock(tmp_path) as lock, pytest.raises(UserError, match=f"process {process.pid} on"):
            lock.claim()
        process.kill()
    killed = _owner(tmp_path)
    assert not killed.released
    with FolderLock(tmp_path) as lock:
        assert lock.claim().run_id == killed.run_id


def test_a_process_with_the_pid_of_the_owner_is_not_the_owner(tmp_path: Path, no_locks: None) -> None:
    before = _owned_before(tmp_path)
    _write(tmp_path, before)
    with FolderLock(tmp_path) as lock, pytest.raises(UserError):
        lock.claim()
    _write(tmp_path, replace(before, process_start="1"))
    with FolderLock(tmp_path) as lock:
        lock.claim()


def test_an_owner_on_another_machine_is_alive_as_long_as_it_renews(
    tmp_path: Path, no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    with FolderLock(tmp_path, lease=QUICK) as first:
        claim = first.claim()
        monkeypatch.setattr(folder_lock, "_machine", lambda: "another machine")
        with FolderLock(tmp_path, notes.append, PATIENT) as second, pytest.raises(UserError, match="is in use by"):
            second.claim()
        dead = _owner(tmp_path)
    assert dead.claim_id == claim.claim_id
    _write(tmp_path, dead)
    assert may_be_owned(tmp_path)
    with FolderLock(tmp_path, notes.append, QUICK) as third:
        assert third.claim().run_id == claim.run_id
    assert len(notes) == 2
    assert f"waiting up to {PATIENT.duration_s:.0f} s for a sign of life from there" in notes[0]


def test_an_owner_on_another_machine_without_a_sign_of_life_for_long_is_not_waited_for(tmp_path: Path) -> None:
    _write(tmp_path, replace(_owned_before(tmp_path), machine="another machine"))
    os.utime(tmp_path / LOCK_FILE, (1e9, 1e9))
    with FolderLock(tmp_path, lease=Lease(duration_s=1e6)) as lock:
        lock.claim()


def test_a_folder_taken_by_force_is_lost_to_its_owner(tmp_path: Path) -> None:
    with FolderLock(tmp_path, lease=QUICK) as first, FolderLock(tmp_path, lease=QUICK) as second:
        claim = first.claim()
        claim.require()
        other = second.claim(force=True)
        assert other.run_id != claim.run_id, "drafts of a run that may be alive are not removed"
        first._thread.join(MAX_WAIT_S)
        assert first.is_lost
        with pytest.raises(FolderTaken, match=f"was taken over by process {os.getpid()} on"):
            claim.require()
        assert other.is_held()
        first.close()
        assert _owner(tmp_path).claim_id == other.claim_id
        assert not _owner(tmp_path).released
        # The lock of the operating system follows as soon as the former owner is gone.
        never_set = threading.Event()
        while not second._has_os_lock:
            assert not never_set.wait(QUICK.renewal_s)
        with FolderLock(tmp_path) as third, pytest.raises(UserError):
            third.claim()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff\xfe"])
def test_a_damaged_lock_file_names_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK_FILE).write_bytes(content)
    with FolderLock(tmp_path) as lock:
        assert lock.claim().is_held()
    assert _owner(tmp_path).released


def test_a_damaged_lock_file_is_watched_where_there_are_no_locks(tmp_path: Path, no_locks: None) -> None:
    (tmp_path / LOCK_FILE).write_bytes(b"{")
    with FolderLock(tmp_path, lease=QUICK) as lock:
        lock.claim()


def test_a_lock_file_removed_by_hand_names_no_other_owner(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        claim = lock.claim()
        (tmp_path / LOCK_FILE).unlink()
        assert claim.is_held()


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    message = f"{tmp_path / LOCK_FILE}: File too large"
    with FolderLock(tmp_path) as lock, pytest.raises(RunError, match=message), full_disk(0):
        lock.claim()


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("mine")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / LOCK_FILE).symlink_to(other)
    with FolderLock(run_dir) as lock, pytest.raises(UserError, match=f"{LOCK_FILE}: is a symbolic link, .*remove it"):
        lock.claim(force=True)
    assert other.read_text() == "mine"
