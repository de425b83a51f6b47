"""Keep blocks of remote files on disk for all processes of a machine, in at most a given number of bytes.

    <folder>/blocks/<2 digits>/<SHA-256 of URL and version>-<number>    the bytes of one block, read-only
    <folder>/locks/<2 digits>                                           held while a block is fetched
    <folder>/used                                                       bytes in all, under a lock of its own

A block appears complete, by renaming. The bytes that a new block takes are booked before it is written, and the blocks
that were used longest ago are removed when they would not fit. What a killed process had booked or left half written is
found when blocks are removed the next time.
"""

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mmtrain.data.remote.remote_files import FileVersion
from mmtrain.durable_files import take_lock
from mmtrain.errors import DataError

_KEPT_SHARE = 0.9  # of the allowed bytes, after old blocks were removed
_MARK_USED_AFTER_S = 60.0  # a block's time of use is this coarse, so that reading it does not write each time
_UNFINISHED_AFTER_S = 3600.0  # whoever wrote a file that is older has been killed
_TEMPORARY = ".part"


class BlockCache:
    """Blocks of remote files on disk."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Keep at most `max_bytes` in `folder`. Raises `DataError` where it cannot be written."""
        self._blocks = folder / "blocks"
        self._locks = folder / "locks"
        self._used = folder / "used"
        self._max_bytes = max_bytes
        try:
            for private in (folder, self._blocks, self._locks):  # others need not see private data
                private.mkdir(parents=True, exist_ok=True, mode=0o700)
                with suppress(PermissionError):  # another user's, who decides
                    private.chmod(0o700)
        except OSError as error:
            raise DataError(
                f"{folder}: cannot be written ({error.strerror or error}), but remote files are cached there; set the "
                "environment variable MMTRAIN_REMOTE_CACHE to another folder"
            ) from None

    def load(self, url: str, version: FileVersion, number: int, num_bytes: int) -> bytes | None:
        """Return a block of this many bytes; None if it is not there."""
        path = self._path(url, version, number)
        try:
            with path.open("rb") as file:
                content = file.read()
                is_marked = time.time() - os.fstat(file.fileno()).st_mtime < _MARK_USED_AFTER_S
        except OSError:
            return None
        if len(content) != num_bytes:  # the disk was full, or the machine died while it was written
            return None
        if not is_marked:
            with suppress(OSError):
                os.utime(path)
        return content

    def store(self, url: str, version: FileVersion, number: int, content: bytes) -> None:
        """Keep a block. A disk that is full is no reason to stop: the block is fetched again when it is needed."""
        path = self._path(url, version, number)
        if len(content) > self._max_bytes or path.exists():
            return
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}{_TEMPORARY}")
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            self._book(len(content))
            with open(temporary, "wb", opener=_open_private) as file:
                file.write(content)
            temporary.rename(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()

    @contextmanager
    def fetching(self, url: str, version: FileVersion, number: int) -> Iterator[None]:
        """Let one thread of one process fetch a block while the others wait for it."""
        name = self._path(url, version, number).name
        lock = self._locks / hashlib.sha256(name.encode()).hexdigest()[:2]
        with open(lock, "ab", opener=_open_private) as file:
            take_lock(file.fileno(), wait=True)  # without locks, some blocks are fetched twice
            yield

    def _path(self, url: str, version: FileVersion, number: int) -> Path:
        key = hashlib.sha256(f"{url}\n{version.num_bytes}\n{version.tag}".encode()).hexdigest()
        return self._blocks / key[:2] / f"{key[:40]}-{number}"

    def _book(self, num_bytes: int) -> None:
        """Add to the bytes in use, and remove old blocks first where that would be too much."""
        with open(self._used, "a+b", opener=_open_private) as file:
            take_lock(file.fileno(), wait=True)
            file.seek(0)
            text = file.read()
            used = int(text) if text.isdigit() else self._max_bytes  # unknown: count
            if used + num_bytes > self._max_bytes:
                used = self._remove_old(num_bytes)
            file.truncate(0)
            file.write(str(used + num_bytes).encode())

    def _remove_old(self, num_bytes: int) -> int:
        """Remove blocks until `num_bytes` more fit; return how many bytes are left."""
        now = time.time()
        blocks: list[tuple[float, int, str]] = []
        for folder in os.scandir(self._blocks):
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    is_unfinished = entry.name.endswith(_TEMPORARY) and now - status.st_mtime > _UNFINISHED_AFTER_S
                    blocks.append((0.0 if is_unfinished else status.st_mtime, status.st_size, entry.path))
        left = sum(size for _, size, _ in blocks)
        allowed = min(self._max_bytes * _KEPT_SHARE, self._max_bytes - num_bytes)
        for last_used, size, path in sorted(blocks):
            if left <= allowed:
                break
            if last_used == 0.0 or not path.endswith(_TEMPORARY):
                with suppress(FileNotFoundError):
                    os.unlink(path)
                left -= size
        return left


def _open_private(path: str, flags: int) -> int:
    """Open a file that no other user may read."""
    return os.open(path, flags, 0o600)
