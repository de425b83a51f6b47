"""Read Arrow files, as the `datasets` library of Hugging Face saves them: record batches that are mapped, not loaded.

An Arrow file stands in for a Parquet file, and its record batches for row groups.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.ipc

from mmtrain.data.remote.locations import Version, location_version

ARROW_SUFFIX = ".arrow"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_FILE_MAGIC = b"ARROW1"  # of the format with a footer, which Feather has
_MAX_MAPPED_FILES = 64  # a mapping costs addresses, not memory


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
