"""Where the bytes of an image, clip or video lie: a file, or a piece of an archive. Opened only when looked at."""

import io
import os
import stat
from dataclasses import dataclass
from typing import BinaryIO


class BadMediaError(Exception):
    """An image, clip or video that cannot be used; `kind` is the quarantine's."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class FileMedia:
    """A file of its own."""

    path: str

    @property
    def name(self) -> str:
        """File name without its folder."""
        return os.path.basename(self.path)

    def open(self) -> BinaryIO:
        """Open for reading. Raises OSError; a pipe or device is refused, since reading one may wait for ever."""
        file = os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK), "rb")
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(f"{self.path} is not a regular file")
        return file

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class TarMember:
    """The bytes [offset, offset + size) of a tar shard."""

    shard: str
    name: str  # of the member
    offset: int
    size: int

    def open(self) -> BinaryIO:
        """Open the member for reading, whatever else the shard holds. Raises OSError."""
        return io.BufferedReader(_Window(open(self.shard, "rb"), self.offset, self.size))

    def __str__(self) -> str:
        return f"{self.shard}, member {self.name}"


@dataclass(frozen=True, slots=True)
class ParquetCell:
    """The bytes in a cell of a Parquet file, or in one place of the list that stands there."""

    file: str
    row_group: int
    row: int  # in the row group
    column: str
    place: int | None  # in the cell's list; None where the cell itself holds the bytes

    @property
    def name(self) -> str:
        """Column, row and place."""
        return f"{self.column}[{self.row}]" if self.place is None else f"{self.column}[{self.row}][{self.place}]"

    def open(self) -> BinaryIO:
        """Read the cell. Raises OSError."""
        from mmtrain.data.media.parquet_cells import open_cell

        return open_cell(self)

    def __str__(self) -> str:
        return f"{self.file}, row group {self.row_group}, {self.name}"


Media = FileMedia | TarMember | ParquetCell


class _Window(io.RawIOBase):
    """A stretch of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._file, self._offset, self._size, self._at = file, offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError(f"seek to {start + offset}")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        wanted = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._offset + self._at)
        found = self._file.read(wanted)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def close(self) -> None:
        self._file.close()
        super().close()
