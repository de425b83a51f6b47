"""Read the bytes of media in cells of Parquet and Arrow files.

A cell of a Parquet file cannot be read alone: the column of its row group must be decoded. The last few columns stay in
memory, because reads are mostly of neighboring cells. Random access to row groups of many hundred megabytes is slow;
writers should make row groups small.

An Arrow file, as the `datasets` library of Hugging Face saves it, stands in for a Parquet file, and its record batches
for row groups. They are mapped, not loaded.
"""

import io
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Self

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from mmtrain.data.media.data_urls import decode_base64, find_embedded_media
from mmtrain.data.optional_packages import check_package_fits
from mmtrain.data.remote.locations import Version, location_version, open_location
from mmtrain.recipe.settings.source_path import is_url

ARROW_SUFFIX = ".arrow"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_FILE_MAGIC = b"ARROW1"  # of the format with a footer, which Feather has
_MAX_MAPPED_FILES = 64  # a mapping costs addresses, not memory
PARQUET_BATCH_ROWS = 1  # decoded at once: in a dictionary column a few bytes may stand for a large value in each row
MAX_PARQUET_COLUMN_BYTES = 4 << 30  # of one column of a row group, decoded
_decoding = threading.Lock()  # threads that ask for one column must not decode it several times


class ArrowFile:
    """The record batches of a file, with the functions of `pyarrow.parquet.ParquetFile` that reading samples needs."""

    metadata: None = None  # Arrow has no statistics

    def __init__(self, path: Path) -> None:
        """Map the file. Raises OSError or ArrowException if it is damaged, truncated or compressed."""
        self._batches = _map_batches(str(path), location_version(str(path)))
        self.schema_arrow = self._batches[0].schema if self._batches else pa.schema([])
        self.num_row_groups = len(self._batches)

    def num_rows(self, row_group: int) -> int:
        """Count the rows of a record batch."""
        return int(self._batches[row_group].num_rows)

    def iter_batches(
        self, batch_size: int, row_groups: Sequence[int], columns: Sequence[str], use_threads: bool = False
    ) -> Iterator[Any]:
        """Yield the columns of whole record batches; `batch_size` means nothing where nothing is decoded."""
        for row_group in row_groups:
            batch = self._batches[row_group].select(list(columns))
            batch.validate(full=True)  # offsets of a hostile file could lead anywhere
            yield batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def map_column(file: str, version: Version, row_group: int, column: str) -> Any:
    """Return a column of a record batch; `version`: of the file. Raises as `ArrowFile`."""
    values = _map_batches(file, version)[row_group][column]
    values.validate(full=True)
    return values


@lru_cache(maxsize=_MAX_MAPPED_FILES)
def _map_batches(file: str, version: Version) -> list[Any]:
    mapped = pa.memory_map(file)
    size = mapped.size()
    if mapped.read_at(len(_FILE_MAGIC), 0) == _FILE_MAGIC:
        reader = pa.ipc.open_file(mapped)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        if mapped.read_at(len(_END_OF_STREAM), max(0, size - len(_END_OF_STREAM))) != _END_OF_STREAM:
            raise OSError("it does not end as an Arrow stream does: the file is truncated or damaged")
        batches = iter(pa.ipc.open_stream(mapped))
    mapped_batches = []
    num_bytes = 0
    for batch in batches:
        num_bytes += sum(column.nbytes for column in batch.columns if not pa.types.is_dictionary(column.type))
        if num_bytes > size:  # buffers that are not in the file have been unpacked into memory
            raise OSError("its record batches are compressed: write them without compression, or as Parquet")
        mapped_batches.append(batch)
    return mapped_batches


def read_cell(file: str, row_group: int, column: str, row: int, place: int | None) -> BinaryIO | None:
    """Return the bytes of one cell, or None if it is empty. Raises OSError.

    row: in the row group. place: in the list that the cell holds; None where the cell itself holds the bytes.
    """
    version = location_version(file)
    try:
        with _decoding:
            values = _decode_column(file, version, row_group, column)
        value = values[row]
        if place is not None:
            value = value[place]
        value = decode_dictionary(value)
        if isinstance(value, pa.StructScalar):
            value = value["bytes"] if value["bytes"].is_valid else value["path"]
        if not value.is_valid:
            return None
        if isinstance(value, pa.StringScalar | pa.LargeStringScalar):  # a data URL: paths are opened elsewhere
            return io.BytesIO(decode_base64(value.as_py().partition(",")[2].encode()))
        return io.BytesIO(value.as_buffer())
    except (pa.ArrowException, LookupError, AttributeError) as error:
        check_package_fits(error, "pyarrow")
        raise OSError(f"{type(error).__name__}: {error}") from None


def read_embedded(file: str, row_group: int, column: str, row: int, number: int) -> BinaryIO:
    """Return a medium that the conversation of one cell holds; `number` counts those in it. Raises OSError."""
    version = location_version(file)
    try:
        with _decoding:
            values = _decode_column(file, version, row_group, column)
        conversation = values[row].as_py()
        if isinstance(conversation, str):
            conversation = json.loads(conversation)
        medium = find_embedded_media(conversation)[number]
    except (pa.ArrowException, LookupError, ValueError, RecursionError) as error:
        raise OSError(f"{type(error).__name__}: {error}") from None
    return io.BytesIO(medium if isinstance(medium, bytes) else decode_base64(medium.partition(",")[2].encode()))


def decode_dictionary(value: Any) -> Any:
    """Return the plain value of an Arrow scalar whose column stores indices into a dictionary."""
    return value.value if isinstance(value, pa.DictionaryScalar) else value


@lru_cache(maxsize=3)
def _decode_column(file: str, version: Version, row_group: int, column: str) -> Any:
    """Decode a column of a row group; `version` keeps a changed file out of the cache."""
    if file.endswith(ARROW_SUFFIX):
        return map_column(file, version, row_group, column)
    batches = []
    num_bytes = 0
    with (
        open_location(file) if is_url(file) else nullcontext(file) as opened,
        pyarrow.parquet.ParquetFile(opened) as parquet,
    ):
        for batch in parquet.iter_batches(PARQUET_BATCH_ROWS, [row_group], [column], use_threads=False):
            num_bytes += batch.nbytes
            if num_bytes > MAX_PARQUET_COLUMN_BYTES:
                what = f"{file}: column {column} of row group {row_group}"
                raise OSError(f"{what} is above {MAX_PARQUET_COLUMN_BYTES} bytes")
            batches.append(batch.column(0))
    return pa.chunked_array(batches)
