"""Arrays that the processes of a machine derive from an index once and then share: files beside it, mapped by all.

The order of a billion samples is 4 GB; each rank, and the host of its loader workers, would otherwise hold its own.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmtrain.balance.columns import FilePlace, IntArray, StoredColumn
from mmtrain.durable_files import take_lock
from mmtrain.system_calls import reserve_bytes

MIN_SHARED_ROWS = 1 << 20  # below it every process holds its own array: 4 MB
_LOCK_FILE = "lock"

SignedArray = npt.NDArray[np.signedinteger[Any]]


class SharedArrays:
    """The folder of the arrays that belong to one index."""

    def __init__(self, folder: Path | None, key: str) -> None:
        """Keep arrays in `folder`, or in memory if that is None.

        Names depend on `key`, so that indexes which differ share nothing.
        """
        self._folder = folder
        self._key = key

    def column(
        self, name: str, size: int, num_rows: int, largest: int, fill: Callable[[SignedArray], None]
    ) -> StoredColumn:
        """Return the column `name`, which `fill` computes in place if no process has done so before.

        num_rows: of the samples that it is about. largest: no number in it is above this, or below its negative.
        """
        dtype = np.dtype(np.int32 if largest < 2**31 else np.int64)
        path = self._path(name, num_rows)
        if path is None:
            return private_column(size, largest, fill)
        num_bytes = size * dtype.itemsize
        try:
            if not _is_whole(path, num_bytes):
                with open(path.parent / _LOCK_FILE, "ab") as lock:
                    take_lock(lock.fileno(), wait=True)
                    if not _is_whole(path, num_bytes):  # else another process wrote it meanwhile
                        _write(path, size, dtype, fill)
            return StoredColumn.mapped(FilePlace(path, 0, dtype.str, size))
        except OSError:  # a full disk, or a folder that this user may only read
            return private_column(size, largest, fill)

    def counts(self, name: str, size: int, num_rows: int) -> "SharedCounts":
        """Return `size` counts that processes find one by one; num_rows: of the samples that they are about."""
        return SharedCounts(self._path(name, num_rows), size)

    def remove(self, name: str) -> None:
        """Remove an array; processes that have it mapped keep it."""
        path = self._path(name, MIN_SHARED_ROWS)
        if path is not None:
            with suppress(OSError):
                path.unlink()

    def _path(self, name: str, num_rows: int) -> Path | None:
        if self._folder is None or num_rows < MIN_SHARED_ROWS:
            return None
        return self._folder / hashlib.sha256(f"{self._key} {name}".encode()).hexdigest()[:32]


class SharedCounts:
    """Counts that any process of a machine may find, at most a few of them twice; 0 means that none has."""

    def __init__(self, path: Path | None, size: int) -> None:
        """Map the file at `path`; hold the counts in memory if that is None, or no file can be written."""
        self._path = path
        self._size = size
        self._values: npt.NDArray[np.int32] = np.zeros(size, dtype=np.int32)
        if path is not None and size:
            with suppress(OSError):
                self._values = _map_counts(path, size)

    def __getitem__(self, number: int) -> int:
        return int(self._values[number])

    def __setitem__(self, number: int, count: int) -> None:
        self._values[number] = count

    def missing(self) -> list[int]:
        """Return the numbers that nobody has counted."""
        return np.flatnonzero(self._values == 0).tolist()

    def all(self) -> IntArray:
        """Return all counts."""
        return self._values.astype(np.int64)

    def __reduce__(self) -> tuple[Any, ...]:  # another process maps the file again
        return SharedCounts, (self._path, self._size)


def private_column(size: int, largest: int, fill: Callable[[SignedArray], None]) -> StoredColumn:
    """Return a column in memory."""
    rows: SignedArray = np.empty(size, dtype=np.int32 if largest < 2**31 else np.int64)
    fill(rows)
    return StoredColumn(rows)


def _is_whole(path: Path, num_bytes: int) -> bool:
    return path.exists() and path.stat().st_size == num_bytes


def _write(path: Path, size: int, dtype: "np.dtype[Any]", fill: Callable[[SignedArray], None]) -> None:
    """Compute an array in a new file, and rename it when it is complete."""
    file, name = tempfile.mkstemp(prefix="making-", dir=path.parent)
    try:
        try:
            reserve_bytes(file, size * dtype.itemsize)
        finally:
            os.close(file)
        rows = np.memmap(name, dtype, "r+", shape=(size,))
        fill(rows.view(np.ndarray))
        rows.flush()
        del rows  # Windows renames no file that is mapped
        os.chmod(name, 0o644)  # other users may read what is beside data that they can read
        os.replace(name, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def _map_counts(path: Path, size: int) -> npt.NDArray[np.int32]:
    num_bytes = 4 * size
    with open(path, "ab") as file:
        if os.fstat(file.fileno()).st_size < num_bytes:
            reserve_bytes(file.fileno(), num_bytes)
    counts = np.memmap(path, np.int32, "r+", shape=(size,))
    return counts.view(np.ndarray)
