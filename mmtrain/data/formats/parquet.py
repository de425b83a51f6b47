"""Read Parquet and Arrow files: a row is an entry, and its media are bytes in a column, or paths.

Columns: the keys of any layout (`layout_table`), lists of turns as structs or as JSON; media in `image`, `images`,
`audio`, `audios`, `video`, `videos`, each cell holding bytes, a path, a data URL, a struct `{bytes, path}` (as the
`datasets` library writes it) or a list of these. Shards converted from WebDataset have bytes in columns called `jpg`,
`png` and the like. Other columns are not read. In an Arrow file, record batches stand for row groups.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from mmtrain.data.formats.allowed_folder import MediaFolder
from mmtrain.data.formats.bad_sample import BadSampleError
from mmtrain.data.formats.conversation import build_sample, entry_id
from mmtrain.data.formats.describe_entry import PREFERENCE_KEYS, describe_preference, describe_unknown
from mmtrain.data.formats.entry_messages import is_document
from mmtrain.data.formats.layout_table import LAYOUT_KEYS, LIST_KEYS, MEDIA_KIND_BY_KEY, EntryFormat
from mmtrain.data.formats.layouts import caption_to_conversation
from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.data.formats.target_keys import says_what_is_learned
from mmtrain.data.media.data_urls import find_embedded_media, is_data_url, read_url_head
from mmtrain.data.media.media_bytes import Media, ParquetCell
from mmtrain.data.media.parquet_cells import ARROW_SUFFIX, PARQUET_BATCH_ROWS, ArrowFile, decode_dictionary
from mmtrain.data.optional_packages import check_package_fits
from mmtrain.data.remote.locations import open_location
from mmtrain.errors import DataError, HostileFileError, RemoteReadError
from mmtrain.foreign_json import parse_json
from mmtrain.limited_reads import now_reading, now_reading_parts
from mmtrain.recipe.settings.data_settings import LimitSettings
from mmtrain.recipe.settings.source_columns import OTHER_ENTRY_KEYS
from mmtrain.recipe.settings.source_path import SourcePath

_MEDIA_KIND_BY_EXTENSION_COLUMN = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp"), "image"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac"), "audio"),
    "mp4": "video",
}
_TEXT_COLUMNS = (*LAYOUT_KEYS, *OTHER_ENTRY_KEYS)
# Limits of Parquet's own metadata (names, row groups, statistics): a hostile file must not fill the memory.
_MAX_METADATA_STRING_BYTES = 256 << 20
_MAX_METADATA_ENTRIES = 10_000_000


@dataclass(frozen=True)
class _ParquetSource:
    """What reading the rows of one file depends on."""

    file: Any  # pyarrow.parquet.ParquetFile, or ArrowFile
    path: SourcePath
    columns: tuple[str, ...]  # those that are read, in the order of the file
    media_kinds: Mapping[str, str]  # of those of them that hold media
    folder: MediaFolder
    limits: LimitSettings
    entry_format: EntryFormat

    def resolve(self, kind: str, value: Any) -> Media:
        """Return the medium that a cell stands for: the cell itself, or the file that it names."""
        media: Media = self.folder.file(kind, value) if isinstance(value, str) else value
        return media


def read_parquet(
    path: SourcePath, folder: MediaFolder, limits: LimitSettings, entry_format: EntryFormat
) -> Iterator[Sample | Quarantined]:
    """Read every row of a file in order. Raises `DataError` if the file cannot be opened, or has no samples."""
    now_reading_parts(str(path))
    with _open(path) as file:
        with _damage_named(path):
            schema = file.schema_arrow
            media_kinds = _media_columns(path, schema, entry_format)
            columns = tuple(_read_columns(schema.names, media_kinds, entry_format))
            _check_layout(path, schema, entry_format)
            is_arrow = isinstance(file, ArrowFile)
            rows_of_groups = [
                file.num_rows(number) if is_arrow else file.metadata.row_group(number).num_rows
                for number in range(file.num_row_groups)
            ]
        source = _ParquetSource(file, path, columns, media_kinds, folder, limits, entry_format)
        first_row = 0
        for row_group, num_rows in enumerate(rows_of_groups):
            if first_row + num_rows > limits.max_members:
                reason = f"{path}: more rows than data.limits.max_members = {limits.max_members}; the rest is not read"
                yield Quarantined(str(path), first_row, str(path), "parquet_too_many", reason)
                return
            yield from _read_row_group(source, row_group, first_row)
            first_row += num_rows


def _read_columns(names: Sequence[str], media_kinds: Mapping[str, str], entry_format: EntryFormat) -> Iterator[str]:
    """Yield the columns that are read, in the order of the file."""
    columns = entry_format.columns
    named = {columns.root(path, names) for path in columns.columns.values()}
    for name in names:
        is_ours = name not in columns.columns and (name in _TEXT_COLUMNS or _says_more(name))
        if name in named or name in media_kinds or is_ours:
            yield name


def _says_more(name: str) -> bool:
    """Return whether a column may say what is learned, or that the file holds preferences."""
    return name in PREFERENCE_KEYS or says_what_is_learned(name)


def _check_layout(path: SourcePath, schema: Any, entry_format: EntryFormat) -> None:
    """Raise `DataError` for a file whose columns are those of no layout; of others each row is looked at."""
    entry = entry_format.columns.rename({field.name: _value_of(field.type) for field in schema})
    if entry_format.find_layout(entry) is None:
        raise DataError(f"{path}: {describe_preference(entry) or describe_unknown(entry, entry_format)}")


def _value_of(value_type: Any) -> Any:
    """Return a value as a column of this type may hold it, by which the layout of its rows is found."""
    if pa.types.is_dictionary(value_type):
        value_type = value_type.value_type
    if pa.types.is_struct(value_type):
        return {field.name: _value_of(field.type) for field in value_type}
    if pa.types.is_list(value_type) or pa.types.is_large_list(value_type):
        return [_value_of(value_type.value_type)]
    return False if pa.types.is_boolean(value_type) else ""


def _media_columns(path: SourcePath, schema: Any, entry_format: EntryFormat) -> dict[str, str]:
    """Return the columns that hold media, each with the kind; those called like a suffix only if they hold bytes.

    Raises `DataError` for media inside of another column.
    """
    kinds = {}
    columns = entry_format.columns
    for target, column in columns.columns.items():
        if target in MEDIA_KIND_BY_KEY and column not in schema.names and "." in column:
            raise DataError(f"{path}: columns.{target} is {column}; allowed in Parquet files: a column, for media")
        if target in MEDIA_KIND_BY_KEY and column in schema.names:
            kinds[column] = MEDIA_KIND_BY_KEY[target]
    taken = {*columns.columns, *(columns.root(column, schema.names) for column in columns.columns.values())}
    for name in schema.names:
        if name in taken:
            continue
        if name in MEDIA_KIND_BY_KEY:
            kinds[name] = MEDIA_KIND_BY_KEY[name]
        elif name.lower() in _MEDIA_KIND_BY_EXTENSION_COLUMN and _holds_bytes(schema.field(name).type):
            kinds[name] = _MEDIA_KIND_BY_EXTENSION_COLUMN[name.lower()]
    return kinds


def _holds_bytes(value_type: Any) -> bool:
    """Return whether values of a type are bytes, or structs with bytes."""
    if pa.types.is_dictionary(value_type):
        value_type = value_type.value_type
    if pa.types.is_struct(value_type):
        return bool(value_type.get_field_index("bytes") >= 0)
    return bool(pa.types.is_binary(value_type) or pa.types.is_large_binary(value_type))


def _open(path: SourcePath) -> Any:
    if path.suffix == ARROW_SUFFIX and not isinstance(path, Path):
        raise DataError(f"{path}: Arrow files are mapped, which needs them on this machine; copy it, or write Parquet")
    with _damage_named(path):
        if isinstance(path, Path) and path.suffix == ARROW_SUFFIX:
            return ArrowFile(path)
        return pyarrow.parquet.ParquetFile(
            path if isinstance(path, Path) else open_location(str(path)),
            thrift_string_size_limit=_MAX_METADATA_STRING_BYTES,
            thrift_container_size_limit=_MAX_METADATA_ENTRIES,
        )


@contextmanager
def _damage_named(path: SourcePath) -> Iterator[None]:
    """Turn what pyarrow raises for the metadata of a damaged file into a DataError."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (DataError, RemoteReadError):
        raise
    except Exception as error:  # pyarrow's errors have no common base
        check_package_fits(error, "pyarrow")
        kind = "an Arrow file" if path.suffix == ARROW_SUFFIX else "a Parquet file"
        raise DataError(f"{path}: not {kind}, or a damaged one: {error}") from None


def _read_row_group(source: _ParquetSource, row_group: int, first_row: int) -> Iterator[Sample | Quarantined]:
    """Read the rows of one row group; its first row is row `first_row` of the file."""
    path = source.path
    media_columns = [name for name in source.columns if name in source.media_kinds]
    num_read = 0
    place = f"{path}, row group {row_group}"
    try:
        now_reading(place)
        unread = _columns_full_of_bytes(source, row_group)
        read = [name for name in source.columns if name not in unread]
        batches = source.file.iter_batches(PARQUET_BATCH_ROWS, [row_group], read, use_threads=False)
        while (batch := next(batches, None)) is not None:
            texts = {name: batch[name].to_pylist() for name in read if name not in source.media_kinds}
            for row in range(batch.num_rows):
                entry = {name: values[row] for name, values in texts.items() if values[row] is not None}
                cell = partial(ParquetCell, str(path), row_group, num_read + row)
                # A column that is full of bytes has not been read: the location of its cells is enough.
                values = {name: None if name in unread else batch[name][row] for name in media_columns}
                yield _read_row(source, entry, values, cell, first_row + num_read + row)
            num_read += batch.num_rows
            now_reading(place)
    except RemoteReadError:
        raise
    except HostileFileError as error:
        yield Quarantined(str(path), first_row + num_read, str(path), "parquet_broken", str(error))
    except Exception as error:
        check_package_fits(error, "pyarrow")
        what = f"{place}: its rows from {num_read} on cannot be read"
        reason = f"{what}: {type(error).__name__}: {error}"
        yield Quarantined(str(path), first_row + num_read, str(path), "parquet_broken", reason)


def _columns_full_of_bytes(source: _ParquetSource, row_group: int) -> set[str]:
    """Return the media columns that surely hold bytes in every row of a row group, each cell small enough.

    They need not be read for indexing. Known from the statistics in the file's metadata.
    """
    file = source.file
    if file.metadata is None:  # of an Arrow file, where looking at a column reads nothing
        return set()
    max_bytes = source.limits.max_member_bytes
    metadata = file.metadata.row_group(row_group)
    names = set()
    for number in range(metadata.num_columns):
        leaf = metadata.column(number)
        name, _, field = leaf.path_in_schema.partition(".")
        if name not in source.media_kinds or field not in ("", "bytes") or name not in file.schema_arrow.names:
            continue
        value_type = file.schema_arrow.field(name).type
        if pa.types.is_struct(value_type):
            value_type = value_type.field("bytes").type
        counts_nulls = leaf.statistics is not None and leaf.statistics.has_null_count
        has_no_nulls = counts_nulls and leaf.statistics.null_count == 0
        if pa.types.is_binary(value_type) and has_no_nulls and leaf.total_uncompressed_size <= max_bytes:
            names.add(name)
    return names


def _read_row(
    source: _ParquetSource,
    entry: dict[str, Any],
    values: dict[str, Any],
    cell: Callable[[str, int | None], ParquetCell],
    number: int,
) -> Sample | Quarantined:
    """Build the sample of row `number` of the file.

    values: media column -> the row's value as an Arrow scalar; None for a column that was not read, because it surely
    holds bytes. cell: (column, place) -> the location of the row's bytes in that column.
    """
    path = str(source.path)
    try:
        raw = entry
        entry = source.entry_format.columns.rename(entry)
        for key in LIST_KEYS:
            if isinstance(entry.get(key), str):
                entry[key] = parse_json(entry[key].encode())
            elif isinstance(entry.get(key), dict):
                entry[key] = _list_of_turns(entry[key])
        has_gaps = is_document(entry)
        media_kinds: list[str] = []
        for name, value in values.items():
            kind = source.media_kinds[name]
            media: list[Media | None] = [cell(name, None)]
            if value is not None:
                media = _media_in_value(source, value, kind, partial(cell, name), has_gaps)
            media_kinds += [kind] * len(media)
            key = name if name in MEDIA_KIND_BY_KEY else f"{kind}s"
            entry[key] = [*(entry.get(key) or ()), *media] or None
        resolve = partial(_resolve_in_row, source, raw, cell)
        entry = caption_to_conversation(entry, media_kinds, source.entry_format)
        return build_sample(entry, path, number, resolve, source.entry_format)
    except BadSampleError as bad:
        return Quarantined(path, number, entry_id(entry, str(number)), bad.kind, bad.reason)
    except ValueError as error:
        reason = f"its conversation is not valid JSON: {error}"
        return Quarantined(path, number, entry_id(entry, str(number)), "malformed", reason)


def _list_of_turns(lists: dict[str, Any]) -> Any:
    """Return turns from a list for each of their fields, as `datasets` stores a `Sequence` of structs."""
    columns = list(lists.values())
    if not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        return lists
    return [dict(zip(lists, values, strict=True)) for values in zip(*columns, strict=True)]


def _resolve_in_row(
    source: _ParquetSource, row: dict[str, Any], cell: Callable[[str, int | None], ParquetCell], kind: str, value: Any
) -> Media:
    """Return the medium of a row that its media columns or its conversation name, or which the latter holds itself."""
    if not isinstance(value, bytes) and not (isinstance(value, str) and is_data_url(value)):
        return source.resolve(kind, value)
    fault = read_url_head(kind, value) if isinstance(value, str) else None
    if fault is not None:
        raise BadSampleError(f"{kind}_url", fault)
    max_bytes = source.limits.max_member_bytes
    if len(value) > max_bytes:
        reason = f"a message holds {len(value)} bytes, data.limits.max_member_bytes = {max_bytes}"
        raise BadSampleError("parquet_cell_size", reason)
    for column, of_column in row.items():
        embedded = find_embedded_media(_parsed(of_column))
        if value in embedded:
            return replace(cell(column, None), embedded=embedded.index(value))
    raise AssertionError("media columns hold no other texts than paths once they are read")


def _parsed(value: Any) -> Any:
    """Return what a text holds that is JSON, as a column with turns may be; other values as they are."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return parse_json(value.encode())
    except ValueError:
        return value


def _media_in_value(
    source: _ParquetSource, value: Any, kind: str, cell: Callable[[int | None], ParquetCell], has_gaps: bool
) -> list[Media | None]:
    """Return the media in the value of one cell; those of a list are numbered by their place in it.

    has_gaps: empty places of a list are None, since a document has texts there; elsewhere they are faults.
    """
    if not value.is_valid:
        return []
    value = decode_dictionary(value)
    if not isinstance(value, pa.ListScalar):
        return [_medium_in_value(source, _bytes_or_path(value), kind, cell(None))]
    media: list[Media | None] = []
    for place, element in enumerate(value):
        content = _bytes_or_path(element)
        is_gap = has_gaps and not content.is_valid
        media.append(None if is_gap else _medium_in_value(source, content, kind, cell(place)))
    return media


def _bytes_or_path(value: Any) -> Any:
    """Return what a struct holds of a medium, bytes before a path; other values as they are."""
    if not isinstance(value, pa.StructScalar) or not value.is_valid:
        return value
    fields = {name: value[name] for name in value.keys() if value[name].is_valid}  # noqa: SIM118 - not a dict
    return fields.get("bytes", fields.get("path", pa.NULL))


def _medium_in_value(source: _ParquetSource, value: Any, kind: str, cell: ParquetCell) -> Media:
    """Return the medium that a value stands for: the bytes in `cell`, or a path."""
    if not value.is_valid:
        raise BadSampleError(f"missing_{kind}", f"{cell} is empty")
    if not isinstance(value, pa.BinaryScalar):
        raise BadSampleError("malformed", f"{cell} is {value.type}, expected bytes, a path or both")
    if isinstance(value, pa.StringScalar | pa.LargeStringScalar):
        text = value.as_py()
        if not is_data_url(text):
            return source.folder.file(kind, text)
        fault = read_url_head(kind, text)
        if fault is not None:
            raise BadSampleError(f"{kind}_url", fault)
    size = value.as_buffer().size
    max_bytes = source.limits.max_member_bytes
    if size > max_bytes:
        raise BadSampleError("parquet_cell_size", f"{cell}: {size} bytes, data.limits.max_member_bytes = {max_bytes}")
    return cell
