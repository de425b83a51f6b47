"""The five operations by which saving changes the disk, injected so that tests can let each of them fail or slow it."""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mmtrain.durable_files import sync_file, sync_folder

PIECE_BYTES = 4 << 20  # read or written between two reports
# Bytes that wait in the page cache: a sync reports nothing before it ends, and at 0.3 MB/s this one takes 200 seconds.
SYNC_INTERVAL_BYTES = 64 << 20

ProgressCallback = Callable[[Path, int], None]
"""Called with a file or folder and the number of its bytes that were read or written since the last call."""


def ignore_progress(path: Path, num_bytes: int) -> None:
    """Do nothing: a `ProgressCallback` for callers that nobody watches."""


@dataclass(frozen=True)
class FileSum:
    """Size and SHA-256 of a file."""

    num_bytes: int
    sha256: str


class Storage(Protocol):
    """The file system operations of saving. All but `write` are atomic or repeatable; all raise OSError."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and its missing parents; the folder may exist."""
        ...

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """Write a new file, so that its bytes survive a power cut when this returns.

        The sum is that of the bytes passed in, so that damage on the way to the disk is detected later.
        """
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder atomically; an existing file is replaced."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Make renames and new files in a folder survive a power cut."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with its contents, if it exists."""
        ...


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> int:
    """Write a new file, so that its bytes survive a power cut when this returns; return their number.

    Nothing is hashed: folders for other programs hold no sums. Raises OSError.
    """
    num_bytes = 0
    num_synced_bytes = 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            num_bytes += len(chunk)
            if num_bytes - num_synced_bytes >= SYNC_INTERVAL_BYTES:
                file.flush()
                sync_file(file.fileno())
                num_synced_bytes = num_bytes
        file.flush()
        sync_file(file.fileno())
    return num_bytes


class LocalStorage:
    """A POSIX file system."""

    def make_folder(self, path: Path) -> None:
        """See `Storage`."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """See `Storage`."""
        digest = hashlib.sha256()

        def hashed() -> Iterator[bytes | memoryview]:
            for chunk in chunks:
                digest.update(chunk)
                yield chunk

        num_bytes = write_durably(path, hashed())
        return FileSum(num_bytes, digest.hexdigest())

    def rename(self, source: Path, target: Path) -> None:
        """See `Storage`."""
        source.rename(target)

    def sync_folder(self, path: Path) -> None:
        """See `Storage`."""
        sync_folder(path)

    def remove(self, path: Path) -> None:
        """See `Storage`."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class MonitoredStorage:
    """Another storage, which reports to `progress` before each operation and after each piece that it has written."""

    def __init__(self, storage: Storage, progress: ProgressCallback) -> None:
        self._storage, self._progress = storage, progress

    def make_folder(self, path: Path) -> None:
        """See `Storage`."""
        self._progress(path, 0)
        self._storage.make_folder(path)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """See `Storage`."""
        self._progress(path, 0)
        written = self._storage.write(path, self._reported(path, chunks))
        self._progress(path, 0)
        return written

    def rename(self, source: Path, target: Path) -> None:
        """See `Storage`."""
        self._progress(target, 0)
        self._storage.rename(source, target)

    def sync_folder(self, path: Path) -> None:
        """See `Storage`."""
        self._progress(path, 0)
        self._storage.sync_folder(path)

    def remove(self, path: Path) -> None:
        """See `Storage`. The files of a folder are removed one by one, so that each of them is reported."""
        if path.is_dir() and not path.is_symlink():
            for file in sorted(path.iterdir()):
                self._progress(file, 0)
                self._storage.remove(file)
        self._progress(path, 0)
        self._storage.remove(path)

    def _reported(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
        """Yield the chunks in pieces. A storage that asks for the next piece has written the one before."""
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                yield piece
                self._progress(path, len(piece))
