"""Where the bytes of an image, clip or video are: a file, a member of a tar shard, a cell of Parquet, or inside a text.

Nothing is opened before the medium is read.
"""

import io
import os
import stat
from dataclasses import dataclass
from typing import BinaryIO, ClassVar

from mmtrain.data.media.data_urls import decode_base64
from mmtrain.data.media.nearest_name import show_path, suggest_existing
from mmtrain.data.remote.locations import SeekableReader, open_location
from mmtrain.recipe.settings.source_path import is_url
from mmtrain.system_calls import open_to_read


class NotAFileError(OSError):
    """A folder, a pipe or a device where a file is meant."""


class BadMediaError(Exception):
    """An image, clip or video that cannot be used; `kind` is one of `QUARANTINE_REASONS`."""

    missing_kind: ClassVar[str]  # of a file that is not there
    other_kind: ClassVar[str]  # of a file that holds something else
    packages: ClassVar[tuple[str, ...]]  # that decode

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class FileMedia:
    """A medium in a file of its own."""

    path: str

    @property
    def name(self) -> str:
        """The name of the file, without its folder."""
        return os.path.basename(self.path)

    def open(self) -> BinaryIO:
        """Open the file for reading. Raises OSError; a pipe or device is rejected, since reading it may block."""
        if is_url(self.path):
            return open_location(self.path)
        descriptor = open_to_read(self.path)
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            raise NotAFileError("a folder, not a file" if stat.S_ISDIR(mode) else "a pipe or a device, not a file")
        return os.fdopen(descriptor, "rb")

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class TarMember:
    """A medium in the bytes [offset, offset + size) of a tar shard."""

    shard: str
    name: str  # of the member
    offset: int
    size: int

    def open(self) -> BinaryIO:
        """Open the member for reading; the rest of the shard is out of reach. Raises OSError."""
        return io.BufferedReader(_FileSlice(open_location(self.shard), self.offset, self.size))

    def __str__(self) -> str:
        return f"{self.shard}, member {self.name}"


@dataclass(frozen=True, slots=True)
class ParquetCell:
    """A medium in a cell of a Parquet file: its bytes, or a medium in the conversation that the cell holds."""

    file: str
    row_group: int
    row: int  # in the row group
    column: str
    place: int | None  # in the list that the cell holds; None where the cell itself holds the bytes
    # The number of a data URL or of bytes in the cell's conversation; None where the cell itself holds the medium.
    embedded: int | None = None

    @property
    def name(self) -> str:
        """Column, row and place."""
        if self.embedded is not None:
            return f"{self.column}[{self.row}], medium {self.embedded}"
        return f"{self.column}[{self.row}]" if self.place is None else f"{self.column}[{self.row}][{self.place}]"

    def open(self) -> BinaryIO:
        """Read the cell into memory. Raises OSError."""
        # pyarrow is an optional package
        from mmtrain.data.media.parquet_cells import read_cell, read_embedded

        if self.embedded is not None:
            return read_embedded(self.file, self.row_group, self.column, self.row, self.embedded)
        content = read_cell(self.file, self.row_group, self.column, self.row, self.place)
        if content is None:
            raise OSError(f"{self} is empty")
        return content

    def __str__(self) -> str:
        return f"{self.file}, row group {self.row_group}, {self.name}"


@dataclass(frozen=True, slots=True)
class InlineMedia:
    """A medium in base64 in the bytes [offset, offset + size) of a file, inside of a JSON string."""

    file: str
    offset: int
    size: int

    @property
    def name(self) -> str:
        """The place in the file."""
        return f"data URL at byte {self.offset}"

    def open(self) -> BinaryIO:
        """Read and decode the text. Raises OSError."""
        with open_location(self.file) as file:
            file.seek(self.offset)
            return io.BytesIO(decode_base64(file.read(self.size)))

    def __str__(self) -> str:
        return f"{self.file}, {self.name}"


Media = FileMedia | TarMember | ParquetCell | InlineMedia


def describe_missing(media: Media) -> str:
    """Say that a medium's file does not exist, and which existing one may be meant."""
    if isinstance(media, FileMedia) and not is_url(media.path):
        return f"{show_path(media.path)}: no such file{suggest_existing(media.path)}"
    return f"{media}: no such file"


def describe_changed(what: object) -> str:
    """Say that a medium, or what was found of it, is not as it was when the lengths of samples were read."""
    return f"{what}: it has changed since lengths were read; start again, so that they are read again"


class _FileSlice(SeekableReader):
    """The bytes [offset, offset + size) of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        super().__init__(size)
        self._file = file
        self._offset = offset

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        num_wanted = max(0, min(len(buffer), self._num_bytes - self._position))
        self._file.seek(self._offset + self._position)
        content = self._file.read(num_wanted)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()
