"""Reading Parquet files: a row is an entry, and its media are bytes in a column, or paths.

Columns: `conversations` or `messages` as a list of structs or as JSON, or `caption` (`text`); media in `image`,
`images`, `audio`, `audios`, `video`, `videos`, each bytes, a path, a struct `{bytes, path}` (as `datasets` writes them)
or a list of these. Others are not read.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from mmtrain.data.formats.allowed_folder import AllowedFolder
from mmtrain.data.formats.conversation import (
    CONVERSATION_KEYS,
    MARK_BY_MEDIA_KIND,
    BadSampleError,
    build_sample,
    caption_to_conversation,
    entry_id,
)
from mmtrain.data.formats.json_files import parse_json
from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.data.media.media_bytes import Media, ParquetCell
from mmtrain.data.media.parquet_cells import PARQUET_BATCH_ROWS, decode_dictionary
from mmtrain.errors import DataError
from mmtrain.recipe.schema import LimitSettings

_MEDIA_COLUMNS = {key: kind for kind in MARK_BY_MEDIA_KIND for key in (kind, f"{kind}s")}
_TEXT_COLUMNS = (*CONVERSATION_KEYS, "system", "tools", "functions", "caption", "text", "id", "template")
_MAX_STRUCTURE_BYTES = 256 << 20  # of what describes a file: names, row groups, statistics


def read_parquet(path: Path, folder: AllowedFolder, limits: LimitSettings) -> Iterator[Sample | Quarantined]:
    """Read every row of a file in order. Raises `DataError` if it cannot be opened."""
    with _opened(path) as file:
        columns = [name for name in file.schema_arrow.names if name in _MEDIA_COLUMNS or name in _TEXT_COLUMNS]
        if not set(columns) & {*CONVERSATION_KEYS, "caption", "text"}:
            found = ", ".join(file.schema_arrow.names[:20])
            raise DataError(f"{path}: no column `conversations`, `messages`, `caption` or `text`; found {found}")
        first = 0
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            if first + num_rows > limits.max_members:
                reason = f"{path}: more rows than data.limits.max_members = {limits.max_members}; the rest is not read"
                yield Quarantined(str(path), first, str(path), "parquet_too_many", reason)
                return
            yield from _group(file, path, group, first, columns, folder, limits)
            first += num_rows


def _opened(path: Path) -> Any:
    limits = {"thrift_string_size_limit": _MAX_STRUCTURE_BYTES, "thrift_container_size_limit": 10_000_000}
    try:
        return pyarrow.parquet.ParquetFile(path, **limits)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except Exception as error:  # pyarrow's errors have several bases
        raise DataError(f"{path}: not a Parquet file, or a damaged one: {error}") from None


def _group(
    file: Any, path: Path, group: int, first: int, columns: list[str], folder: AllowedFolder, limits: LimitSettings
) -> Iterator[Sample | Quarantined]:
    """The rows of one row group, of which the first is row `first` of the file."""
    done, full = 0, _full(file, group, limits.max_member_bytes)
    read = [name for name in columns if name not in full]
    media = {name: name in full for name in columns if name in _MEDIA_COLUMNS}
    try:
        for batch in file.iter_batches(PARQUET_BATCH_ROWS, [group], read, use_threads=False):
            texts = {name: batch[name].to_pylist() for name in read if name not in _MEDIA_COLUMNS}
            for row in range(batch.num_rows):
                entry = {name: values[row] for name, values in texts.items() if values[row] is not None}
                where = partial(ParquetCell, str(path), group, done + row)
                yield _row(entry, media, batch, row, first + done + row, where, folder, limits)
            done += batch.num_rows
    except Exception as error:
        reason = f"{path}, row group {group}: its rows from {done} on cannot be read: {type(error).__name__}: {error}"
        yield Quarantined(str(path), first + done, str(path), "parquet_broken", reason)


def _full(file: Any, group: int, most: int) -> set[str]:
    """Columns of media with bytes in every row of a group, none too large: where these lie is known without reading."""
    metadata, found = file.metadata.row_group(group), set()
    for number in range(metadata.num_columns):
        leaf = metadata.column(number)
        name, _, rest = leaf.path_in_schema.partition(".")
        if name in _MEDIA_COLUMNS and rest in ("", "bytes") and name in file.schema_arrow.names:
            kind = file.schema_arrow.field(name).type
            kind = kind.field("bytes").type if pa.types.is_struct(kind) else kind
            counted = leaf.statistics is not None and leaf.statistics.has_null_count
            none_missing = counted and leaf.statistics.null_count == 0
            if pa.types.is_binary(kind) and none_missing and leaf.total_uncompressed_size <= most:
                found.add(name)
    return found


def _row(
    entry: dict[str, Any],
    media: dict[str, bool],
    batch: Any,
    row: int,
    number: int,
    where: Any,
    folder: AllowedFolder,
    limits: LimitSettings,
) -> Sample | Quarantined:
    """A row of a batch; `media` are its columns of such, and whether each surely holds bytes, and was not read."""
    source = where.args[0]
    try:
        kinds: list[str] = []
        for name, full in media.items():
            kind, cells = _MEDIA_COLUMNS[name], [where(name, None)]
            if not full:
                cells = _cells(batch[name][row], kind, partial(where, name), folder, limits.max_member_bytes)
            kinds += [kind] * len(cells)
            entry[name] = cells or None
        for key in CONVERSATION_KEYS:
            if isinstance(entry.get(key), str):
                entry[key] = parse_json(entry[key].encode())
        return build_sample(caption_to_conversation(entry, kinds), source, number, partial(_file, folder))
    except BadSampleError as bad:
        return Quarantined(source, number, entry_id(entry, str(number)), bad.kind, bad.reason)
    except ValueError as error:
        reason = f"its conversation is not valid JSON: {error}"
        return Quarantined(source, number, entry_id(entry, str(number)), "malformed", reason)


def _file(folder: AllowedFolder, kind: str, value: Any) -> Media:
    media: Media = folder.file(kind, value) if isinstance(value, str) else value
    return media


def _cells(
    value: Any, kind: str, where: Callable[[int | None], ParquetCell], folder: AllowedFolder, most: int
) -> list[Media]:
    """The media in one cell; a list's have places in it."""
    if not value.is_valid:
        return []
    value = decode_dictionary(value)
    if isinstance(value, pa.ListScalar):
        return [_cell(each, kind, where(place), folder, most) for place, each in enumerate(value)]
    return [_cell(value, kind, where(None), folder, most)]


def _cell(value: Any, kind: str, cell: ParquetCell, folder: AllowedFolder, most: int) -> Media:
    """The medium that a value stands for: bytes in `cell`, or a path. In structs the bytes come first."""
    if isinstance(value, pa.StructScalar) and value.is_valid:
        fields = {name: value[name] for name in value.keys() if value[name].is_valid}  # noqa: SIM118 - no mapping
        value = fields.get("bytes", fields.get("path", pa.NULL))
    if not value.is_valid:
        raise BadSampleError(f"missing_{kind}", f"{cell} is empty")
    if not isinstance(value, pa.BinaryScalar):
        raise BadSampleError("malformed", f"{cell} is {value.type}, expected bytes, a path or both")
    if isinstance(value, pa.StringScalar | pa.LargeStringScalar):
        return folder.file(kind, value.as_py())
    if (size := value.as_buffer().size) > most:
        reason = f"{cell}: {size} bytes, data.limits.max_member_bytes = {most}"
        raise BadSampleError("parquet_cell_size", reason)
    return cell
