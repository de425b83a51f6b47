"""Reading LLaVA-format files: JSON lists and JSON lines of conversations about images and sounds.

    {"id": "7", "image": "images/7.png" or ["a.png", "b.png"] or absent, "audio": likewise,
     "conversations": [{"from": "human", "value": "<image>\nWhat colour?"}, {"from": "gpt", "value": "red"}]}

A file that cannot be read at all is a `DataError`; one bad sample is set aside as `Quarantined`, and named.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtrain.data.media import FileMedia
from mmtrain.data.sample import Quarantined, Role, Sample, Turn
from mmtrain.errors import DataError

_ROLES: dict[str, Role] = {"system": "system", "human": "user", "gpt": "assistant"}
_LINE_SUFFIXES = (".jsonl", ".ndjson")


def read(path: Path, image_root: Path | None = None) -> Iterator[Sample | Quarantined]:
    """Read every sample of a file in order; paths of media start at `image_root`, by default the file's folder.

    Raises `DataError` if the file is missing, is not JSON, or does not hold a list of samples.
    """
    root = os.path.abspath(image_root or path.parent)
    for index, entry in enumerate(_entries(path)):
        try:
            yield _sample(entry, str(path), index, root)
        except _BadSampleError as bad:
            yield Quarantined(str(path), index, _id(entry, index), bad.kind, bad.reason)


class _BadSampleError(Exception):
    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


@dataclass(frozen=True)
class _BrokenLine:
    """A line of a JSON-lines file that does not parse: one bad sample, not a bad file."""

    reason: str


def _entries(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; data sources are LLaVA-format .json or .jsonl files") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    if path.suffix in _LINE_SUFFIXES:
        return [_line(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    try:
        entries = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        message = getattr(error, "msg", "nested too deeply")
        raise DataError(
            f"{path}:{line}: not valid JSON: {message}; a file with one sample a line must be called .jsonl"
        ) from None
    if not isinstance(entries, list):
        raise DataError(f"{path}:1: found {_kind(entries)} at the top, expected a list of samples")
    return entries


def _line(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        return _BrokenLine(f"line {number} is not valid JSON: {error}")


def _sample(entry: Any, source: str, index: int, root: str) -> Sample:
    if isinstance(entry, _BrokenLine):
        raise _BadSampleError("malformed", entry.reason)
    if not isinstance(entry, dict):
        raise _BadSampleError("malformed", f"found {_kind(entry)}, expected an object with `conversations`")
    turns = entry.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise _BadSampleError("malformed", f"`conversations` is {_kind(turns)}, expected a list of messages")
    template = entry.get("template")
    return Sample(
        id=_id(entry, index),
        source=source,
        index=index,
        turns=tuple(_turn(i, turn) for i, turn in enumerate(turns)),
        images=_paths(entry, "image", root),
        template=template if isinstance(template, str) else None,
        clips=_paths(entry, "audio", root),
    )


def _turn(number: int, turn: Any) -> Turn:
    where = f"`conversations[{number}]`"
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise _BadSampleError("malformed", f"{where} has no text `value`")
    role = turn.get("from")
    if not isinstance(role, str) or role not in _ROLES:
        raise _BadSampleError("malformed", f"{where}.from is {role!r}, expected one of {', '.join(sorted(_ROLES))}")
    try:
        turn["value"].encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair; no tokenizer takes it
        raise _BadSampleError("malformed", f"{where}.value is not valid Unicode: {error.reason}") from None
    return Turn(_ROLES[role], turn["value"])


def _paths(entry: dict[str, Any], key: str, root: str) -> tuple[FileMedia, ...]:
    """The files of a sample's images or clips."""
    paths = entry.get(key)
    if paths is None:
        return ()
    if isinstance(paths, str):
        paths = [paths]
    if not isinstance(paths, list) or not all(isinstance(p, str) and p for p in paths):
        raise _BadSampleError("malformed", f"`{key}` is {_kind(paths)}, expected a path or a list of paths")
    return tuple(_path(p, key, root) for p in paths)


def _path(path: str, key: str, root: str) -> FileMedia:
    """A path inside `root`: data from elsewhere must not make us open any file of this machine, or fetch one."""
    if "://" in path:
        raise _BadSampleError(f"{key}_path", f"{path!r} is a URL; download it and give its path")
    full = os.path.normpath(os.path.join(root, path))
    if "\0" in path or os.path.commonpath([root, full]) != root:
        raise _BadSampleError(f"{key}_path", f"{path!r} lies outside of the {key} folder {root}")
    return FileMedia(full)


def _id(entry: Any, index: int) -> str:
    found = entry.get("id") if isinstance(entry, dict) else None
    return str(found) if isinstance(found, str | int) else str(index)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", type(None): "missing"}
    return names.get(type(value), f"a {type(value).__name__}")
