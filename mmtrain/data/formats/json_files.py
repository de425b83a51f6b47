"""Read JSON lists and JSON lines of conversations whose media are separate files, or data URLs inside of them."""

import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from mmtrain.data.formats.bad_sample import BadSampleError
from mmtrain.data.formats.conversation import MediaResolver, build_sample, entry_id
from mmtrain.data.formats.json_list import (
    MAX_ENTRY_BYTES,
    BadJsonError,
    JsonElement,
    NotAListError,
    NotTextError,
    read_json_list,
)
from mmtrain.data.formats.layout_table import EntryFormat
from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.data.media.data_urls import read_url_head
from mmtrain.data.media.media_bytes import InlineMedia, Media
from mmtrain.data.remote.locations import open_location
from mmtrain.errors import DataError
from mmtrain.foreign_json import parse_json
from mmtrain.limited_reads import now_reading_parts
from mmtrain.recipe.settings.source_path import SourcePath

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
_CALLED_JSONL = "a file with one sample per line must be called .jsonl"
# A JSON string that starts like a data URL; a quotation mark inside of a string has a backslash before it.
_DATA_URL = re.compile(rb'(?<!\\)"(data:[^"\\]*(?:\\.[^"\\]*)*)"')


def may_hold_data_urls(text: bytes) -> bool:
    """Return whether the JSON text of an entry may hold data URLs."""
    return b'"data:' in text


def resolve_data_urls(file: str, offset: int, text: bytes, resolve_media: MediaResolver) -> MediaResolver:
    """Return a resolver that locates data URLs in an entry, and leaves everything else to `resolve_media`.

    text: the JSON text of the entry, which is at byte `offset` of the file.
    """
    places: dict[str, InlineMedia] = {}
    for match in _DATA_URL.finditer(text):
        written = match[1]
        url = written.decode() if b"\\" not in written else json.loads(match[0])
        content_start = written.find(b",") + 1
        places[url] = InlineMedia(file, offset + match.start(1) + content_start, len(written) - content_start)

    def resolve(kind: str, value: object) -> Media:
        place = places.get(value) if isinstance(value, str) else None
        if place is None:
            return resolve_media(kind, value)
        assert isinstance(value, str), "only texts are keys"
        fault = read_url_head(kind, value)
        if fault is not None:
            raise BadSampleError(f"{kind}_url", fault)
        return place

    return resolve


def read_json(
    path: SourcePath, resolve_media: MediaResolver, entry_format: EntryFormat
) -> Iterator[Sample | Quarantined]:
    """Read every sample of a file in order.

    Raises `DataError` if the file is missing, is not JSON, or does not hold a list of samples.
    """
    now_reading_parts(str(path))
    try:
        with open_location(str(path)) as file:
            is_lines = path.suffix in JSON_LINES_SUFFIXES
            elements = _read_lines(file) if is_lines else _read_list(path, file)
            for index, element in enumerate(elements):
                entry = entry_format.columns.rename(element.value)
                resolve = resolve_media
                if element.text is not None:
                    resolve = resolve_data_urls(str(path), element.offset, element.text, resolve_media)
                try:
                    if isinstance(entry, BadSampleError):
                        raise entry
                    yield build_sample(entry, str(path), index, resolve, entry_format)
                except BadSampleError as bad:
                    yield Quarantined(str(path), index, entry_id(entry, str(index)), bad.kind, bad.reason)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _read_list(path: SourcePath, file: BinaryIO) -> Iterator[JsonElement]:
    """Yield the entries of a JSON list one by one: parsed all at once they would take gigabytes."""
    try:
        yield from read_json_list(file)
    except NotTextError as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    except NotAListError as error:
        what = f"{path}:1: found {error.reason} at the top, expected a list of samples"
        raise DataError(f"{what}; {_CALLED_JSONL}") from None
    except BadJsonError as error:
        raise DataError(f"{path}:{error.line}: not valid JSON: {error.reason}; {_CALLED_JSONL}") from None


def _read_lines(file: BinaryIO) -> Iterator[JsonElement]:
    """Yield the entries of JSON lines; a line that does not parse is one bad sample, not a bad file."""
    number = 0
    end = 0  # of the last line
    while line := file.readline(MAX_ENTRY_BYTES):
        number += 1
        start = end
        end += len(line)
        if len(line) == MAX_ENTRY_BYTES and not line.endswith(b"\n"):
            end += _skip_line(file)
            yield JsonElement(BadSampleError("malformed", f"line {number} is longer than {MAX_ENTRY_BYTES} bytes"))
        elif line.strip():
            try:
                value = parse_json(line)
            except ValueError as error:
                value = BadSampleError("malformed", f"line {number} is not valid JSON: {error}")
            yield JsonElement(value, start, line) if may_hold_data_urls(line) else JsonElement(value)


def _skip_line(file: BinaryIO) -> int:
    """Read to the end of a line of any length, holding only a piece of it at a time; return how much was left of it."""
    num_bytes = 0
    while piece := file.readline(MAX_ENTRY_BYTES):
        num_bytes += len(piece)
        if piece.endswith(b"\n"):
            break
    return num_bytes
