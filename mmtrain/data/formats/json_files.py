"""Reading JSON lists and JSON lines of conversations, whose media are files beside them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mmtrain.data.formats.conversation import BadSampleError, MediaResolver, build_sample, entry_id, json_type_name
from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.errors import DataError

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
_SPACES = re.compile(r"[ \t\n\r]*")
MAX_ENTRY_BYTES = 64 << 20  # of one line, or of one JSON or text member of a tar


def read_json(path: Path, media_of: MediaResolver, layout: tuple[str, ...]) -> Iterator[Sample | Quarantined]:
    """Read every sample of a file in order.

    Raises `DataError` if the file is missing, is not JSON, or does not hold a list of samples.
    """
    try:
        with path.open("rb") as file:
            entries = _lines(file) if path.suffix in JSON_LINES_SUFFIXES else _list(path, file.read())
            for index, entry in enumerate(entries):
                try:
                    if isinstance(entry, BadSampleError):
                        raise entry
                    yield build_sample(entry, str(path), index, media_of, layout)
                except BadSampleError as bad:
                    yield Quarantined(str(path), index, entry_id(entry, str(index)), bad.kind, bad.reason)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def parse_json(text: bytes) -> Any:
    """Parse JSON in UTF-8. Raises `ValueError` for all that is wrong with it, bombs of brackets and digits included."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _list(path: Path, text: bytes) -> Iterator[Any]:
    """The entries of a JSON list, one after the other: all together would take gigabytes."""
    try:
        yield from _elements(path, text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    except ValueError as error:
        line, message = getattr(error, "lineno", 1), getattr(error, "msg", str(error))
        raise DataError(
            f"{path}:{line}: not valid JSON: {message}; a file with one sample a line must be called .jsonl"
        ) from None
    except RecursionError:
        raise DataError(f"{path}:1: not valid JSON: nested too deeply") from None


def _elements(path: Path, text: str) -> Iterator[Any]:
    """The elements of a list in JSON. Raises `ValueError` as `json.loads` would, and `DataError` if it is no list."""
    at = _after_spaces(text, 0)
    if not text.startswith("[", at):
        found = json_type_name(json.loads(text))
        raise DataError(f"{path}:1: found {found} at the top, expected a list of samples")
    decode = json.JSONDecoder().raw_decode
    at = _after_spaces(text, at + 1)
    more = not text.startswith("]", at)
    while more:
        entry, at = decode(text, at)
        yield entry
        at = _after_spaces(text, at)
        more = text.startswith(",", at)
        if more:
            at = _after_spaces(text, at + 1)
        elif not text.startswith("]", at):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    at = _after_spaces(text, at + 1)
    if at != len(text):
        raise json.JSONDecodeError("Extra data", text, at)


def _after_spaces(text: str, at: int) -> int:
    found = _SPACES.match(text, at)
    assert found is not None, "no spaces are spaces too"
    return found.end()


def _lines(file: BinaryIO) -> Iterator[Any]:
    """The entries of JSON lines; a line that does not parse is one bad sample, not a bad file."""
    number = 0
    while line := file.readline(MAX_ENTRY_BYTES):
        number += 1
        too_long = len(line) == MAX_ENTRY_BYTES and not line.endswith(b"\n")
        while too_long and (more := file.readline(MAX_ENTRY_BYTES)) and not more.endswith(b"\n"):
            pass
        if too_long:
            yield BadSampleError("malformed", f"line {number} is longer than {MAX_ENTRY_BYTES} bytes")
        elif line.strip():
            try:
                yield parse_json(line)
            except ValueError as error:
                yield BadSampleError("malformed", f"line {number} is not valid JSON: {error}")
