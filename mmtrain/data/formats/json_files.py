"""Read JSON lists and JSON lines of conversations whose media are separate files."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mmtrain.data.formats.conversation import BadSampleError, MediaResolver, build_sample, entry_id, json_type_name
from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.errors import DataError

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
MAX_ENTRY_BYTES = 64 << 20  # of one line, and of one JSON or text member of a tar; keeps a hostile file out of memory
_WHITE_SPACE = re.compile(r"[ \t\n\r]*")


def read_json(
    path: Path, resolve_media: MediaResolver, conversation_keys: tuple[str, ...]
) -> Iterator[Sample | Quarantined]:
    """Read every sample of a file in order.

    Raises `DataError` if the file is missing, is not JSON, or does not hold a list of samples.
    """
    try:
        with path.open("rb") as file:
            is_lines = path.suffix in JSON_LINES_SUFFIXES
            entries = _read_lines(file) if is_lines else _read_list(path, file.read())
            for index, entry in enumerate(entries):
                try:
                    if isinstance(entry, BadSampleError):
                        raise entry
                    yield build_sample(entry, str(path), index, resolve_media, conversation_keys)
                except BadSampleError as bad:
                    yield Quarantined(str(path), index, entry_id(entry, str(index)), bad.kind, bad.reason)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def parse_json(text: bytes) -> Any:
    """Parse JSON in UTF-8. Raises `ValueError` for every fault, also for bombs of brackets or digits."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _read_list(path: Path, text: bytes) -> Iterator[Any]:
    """Yield the entries of a JSON list one by one: parsed all at once they would take gigabytes."""
    try:
        yield from _list_elements(path, text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        message = getattr(error, "msg", str(error))
        raise DataError(
            f"{path}:{line}: not valid JSON: {message}; a file with one sample per line must be called .jsonl"
        ) from None
    except RecursionError:
        raise DataError(f"{path}:1: not valid JSON: nested too deeply") from None


def _list_elements(path: Path, text: str) -> Iterator[Any]:
    """Yield the elements of a JSON list.

    Raises `ValueError` where `json.loads` would, and `DataError` if the text is not a list.
    """
    position = _skip_white_space(text, 0)
    if not text.startswith("[", position):
        what = json_type_name(json.loads(text))
        raise DataError(f"{path}:1: found {what} at the top, expected a list of samples")
    decode = json.JSONDecoder().raw_decode
    position = _skip_white_space(text, position + 1)
    has_more = not text.startswith("]", position)
    while has_more:
        entry, position = decode(text, position)
        yield entry
        position = _skip_white_space(text, position)
        has_more = text.startswith(",", position)
        if has_more:
            position = _skip_white_space(text, position + 1)
        elif not text.startswith("]", position):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
    position = _skip_white_space(text, position + 1)
    if position != len(text):
        raise json.JSONDecodeError("Extra data", text, position)


def _skip_white_space(text: str, position: int) -> int:
    match = _WHITE_SPACE.match(text, position)
    assert match is not None, "the pattern also matches nothing"
    return match.end()


def _read_lines(file: BinaryIO) -> Iterator[Any]:
    """Yield the entries of JSON lines; a line that does not parse is one bad sample, not a bad file."""
    number = 0
    while line := file.readline(MAX_ENTRY_BYTES):
        number += 1
        if len(line) == MAX_ENTRY_BYTES and not line.endswith(b"\n"):
            _skip_line(file)
            yield BadSampleError("malformed", f"line {number} is longer than {MAX_ENTRY_BYTES} bytes")
        elif line.strip():
            try:
                yield parse_json(line)
            except ValueError as error:
                yield BadSampleError("malformed", f"line {number} is not valid JSON: {error}")


def _skip_line(file: BinaryIO) -> None:
    """Read to the end of a line of any length, holding only a piece of it at a time."""
    while piece := file.readline(MAX_ENTRY_BYTES):
        if piece.endswith(b"\n"):
            return
