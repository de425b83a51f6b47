"""The five operations by which saving changes the disk, injected so that tests can let each of them fail."""

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


class LocalStorage:
    """A POSIX file system."""

    def make_folder(self, path: Path) -> None:
        """See `Storage`."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """See `Storage`."""
        digest = hashlib.sha256()
        num_bytes = 0
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
