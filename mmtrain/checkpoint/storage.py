"""The only ways in which saving changes the disk: five operations, injected so that tests can fail each of them."""

import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class FileSum:
    """Size and SHA-256 of a file."""

    num_bytes: int
    sha256: str


class Storage(Protocol):
    """What saving needs of a file system. All but `write` are atomic or may be repeated; all raise OSError."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and its missing parents; it may exist."""
        ...

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """Write a new file; when this returns, its bytes survive a power cut. The sum is of the bytes given, so
        damage on the way to the disk shows later.
        """
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder in one step; a file that is there is replaced."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Make renames and new files in a folder survive a power cut."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file or a folder with all it holds, if it exists."""
        ...


class LocalStorage:
    """A POSIX file system."""

    def make_folder(self, path: Path) -> None:
        """See `Storage`."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """See `Storage`."""
        digest, num_bytes = hashlib.sha256(), 0
        with path.open("xb") as file:
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
                num_bytes += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        return FileSum(num_bytes, digest.hexdigest())

    def rename(self, source: Path, target: Path) -> None:
        """See `Storage`."""
        source.rename(target)

    def sync_folder(self, path: Path) -> None:
        """See `Storage`."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, path: Path) -> None:
        """See `Storage`."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
