"""Read the bytes of media in cells of Parquet files.

A cell cannot be read alone: the column of its row group must be decoded. The last few columns stay in memory, because
reads are mostly of neighboring cells. Random access to row groups of many hundred megabytes is slow; writers should
make row groups small.
"""

import io
import json
import threading
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet

from mmtrain.data.media.arrow_files import ARROW_SUFFIX, map_column
from mmtrain.data.media.data_urls import decode_base64, find_embedded_media
from mmtrain.data.optional_packages import check_package_fits
from mmtrain.data.remote.locations import Version, location_version, open_location
from mmtrain.recipe.settings.source_path import is_url

PARQUET_BATCH_ROWS = 1  # decoded at once: in a dictionary column a few bytes may stand for a large value in each row
MAX_PARQUET_COLUMN_BYTES = 4 << 30  # of one column of a row group, decoded
_decoding = threading.Lock()  # threads that ask for one column must not decode it several times


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
