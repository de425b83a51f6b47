"""Reading JSON lists and JSON lines of conversations, whose media are files beside them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mmtrain.data.conversation import BadSampleError, MediaOf, describe, name_of, sample_of
from mmtrain.data.sample import Quarantined, Sample
from mmtrain.errors import DataError

LINE_SUFFIXES = (".jsonl", ".ndjson")
MAX_ENTRY_BYTES = 64 << 20  # of one line, or of one JSON or text member of a tar


def read_json(path: Path, media_of: MediaOf, layout: tuple[str, ...]) -> Iterator[Sample | Quarantined]:
    """Read every sample of a file in order.

    Raises `DataError` if the file is missing, is not JSON, or does not hold a list of samples.
    """
    try:
        with path.open("rb") as file:
            entries = _lines(file) if path.suffix in LINE_SUFFIXES else iter(_list(path, file.read()))
            for index, entry in enumerate(entries):
                try:
                    if isinstance(entry, BadSampleError):
                        raise entry
                    yield sample_of(entry, str(path), index, media_of, layout)
                except BadSampleError as bad:
                    yield Quarantined(str(path), index, name_of(entry, str(index)), bad.kind, bad.reason)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def parse(text: bytes) -> Any:
    """Parse JSON in UTF-8. Raises `ValueError` for all that is wrong with it, bombs of brackets and digits included."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _list(path: Path, text: bytes) -> list[Any]:
    try:
        entries = parse(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    except ValueError as error:
        line, message = getattr(error, "lineno", 1), getattr(error, "msg", str(error))
        raise DataError(
            f"{path}:{line}: not valid JSON: {message}; a file with one sample a line must be called .jsonl"
        ) from None
    if not isinstance(entries, list):
        raise DataError(f"{path}:1: found {describe(entries)} at the top, expected a list of samples")
    return entries


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
                yield parse(line)
            except ValueError as error:
                yield BadSampleError("malformed", f"line {number} is not valid JSON: {error}")
