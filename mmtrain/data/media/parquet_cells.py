"""Bytes of media in cells of Parquet files.

A cell cannot be read alone: its row group's column is decoded, and the last few are kept, since neighbours mostly
follow. Random access to row groups of many hundred megabytes is slow; writers should make them small.
"""

import io
import os
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet

if TYPE_CHECKING:
    from mmtrain.data.media.media_bytes import ParquetCell

PARQUET_BATCH_ROWS = 1  # rows decoded at once: a few bytes may stand for one large value in each of them (dictionaries)
MAX_PARQUET_COLUMN_BYTES = 4 << 30  # of one column of a row group, decoded
_reading = threading.Lock()  # several threads asking for the same column must not decode it each


def open_cell(cell: "ParquetCell") -> BinaryIO:
    """The bytes of one cell. Raises OSError."""
    stat = os.stat(cell.file)
    try:
        with _reading:
            column = _column(cell.file, (stat.st_mtime_ns, stat.st_size), cell.row_group, cell.column)
        value = column[cell.row]
        value = value if cell.place is None else value[cell.place]
        value = decode_dictionary(value)
        value = value["bytes"] if isinstance(value, pa.StructScalar) else value
        if not value.is_valid:
            raise OSError(f"{cell} is empty")
        return io.BytesIO(value.as_buffer())
    except (pa.ArrowException, LookupError, AttributeError) as error:
        raise OSError(f"{type(error).__name__}: {error}") from None


def decode_dictionary(value: Any) -> Any:
    """A value of a column, looked up where the column stores numbers of a dictionary's entries."""
    return value.value if isinstance(value, pa.DictionaryScalar) else value


@lru_cache(maxsize=3)
def _column(file: str, stamp: tuple[int, int], row_group: int, name: str) -> Any:
    """A column of a row group; `stamp` tells versions of the file apart."""
    batches, size = [], 0
    with pyarrow.parquet.ParquetFile(file) as parquet:
        for batch in parquet.iter_batches(PARQUET_BATCH_ROWS, [row_group], [name], use_threads=False):
            size += batch.nbytes
            if size > MAX_PARQUET_COLUMN_BYTES:
                raise OSError(
                    f"{file}: column {name} of row group {row_group} is above {MAX_PARQUET_COLUMN_BYTES} bytes"
                )
            batches.append(batch.column(0))
    return pa.chunked_array(batches)
