"""Encode a step's data as bytes for another process or machine: a JSON header, then the arrays as they are in memory.

    magic, version, bytes of the header, bytes in all | header | padding | array | padding | array ...

The header holds the value with every array replaced by its number, and the type and shape of each array, from which its
offset follows. Both sides take the allowed types from the frozen dataclasses (`message_types`), so nothing can be sent
that was not declared, a new field needs no code here, and `format_fingerprint` differs between versions. Numbers are
little-endian. There is no pickle: decoding builds what the types declare, or raises `WireError`.
"""

import hashlib
import json
import math
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mmtrain.data.loading.message_types import (
    DTYPES,
    ArrayType,
    MappingType,
    MessageType,
    OptionalType,
    RecordType,
    TupleType,
    record_type,
)

T = TypeVar("T")
AnyArray = npt.NDArray[Any]

VERSION = 1
_MAGIC = b"MMTW"
_HEAD = struct.Struct("<4sIQQ")
_ALIGNMENT = 64  # so that arrays can be used in place
_MAX_DIMENSIONS = 8

assert sys.byteorder == "little", "arrays are sent as they are in memory"


class WireError(ValueError):
    """Bytes that are not a message of this version, or whose header does not match their content."""


@dataclass(frozen=True)
class PackedMessage:
    """A message; the concatenation of `chunks` is its bytes."""

    chunks: tuple[memoryview, ...]
    nbytes: int


def format_fingerprint(kind: type) -> str:
    """Return the SHA-256 of the format version and of every field of a `kind`: equal if and only if the formats are."""
    return hashlib.sha256(f"{VERSION}:{record_type(kind)}".encode()).hexdigest()


def pack(value: Any) -> PackedMessage:
    """Encode a dataclass without copying its arrays."""
    arrays: list[AnyArray] = []
    plain = _to_plain(record_type(type(value)), value, arrays)
    shapes = [[array.dtype.name, *array.shape] for array in arrays]
    header = json.dumps({"value": plain, "arrays": shapes}, separators=(",", ":")).encode()
    chunks: list[memoryview] = []
    offset = _HEAD.size + len(header)
    for array in arrays:
        chunks += [memoryview(bytes(_padding(offset))), array.reshape(-1).view(np.uint8).data]
        offset += _padding(offset) + array.nbytes
    head = _HEAD.pack(_MAGIC, VERSION, len(header), offset)
    return PackedMessage((memoryview(head + header), *chunks), offset)


def unpack(kind: type[T], message: memoryview | bytes) -> T:
    """Decode a `kind`; its arrays are views of `message`, writable if that is. Raises `WireError`."""
    message = memoryview(message).cast("B")
    if len(message) < _HEAD.size:
        raise WireError(f"{len(message)} bytes are less than the start of a message")
    magic, version, header_bytes, total = _HEAD.unpack_from(message)
    if magic != _MAGIC or version != VERSION:
        raise WireError(f"starts with {magic!r}, version {version}; expected {_MAGIC!r}, version {VERSION}")
    if total != len(message) or header_bytes > total - _HEAD.size:
        raise WireError(f"claims {total} bytes with a header of {header_bytes}, holds {len(message)}")
    end = _HEAD.size + header_bytes
    header = _parse_json(bytes(message[_HEAD.size : end]))
    has_keys = isinstance(header, dict) and header.keys() == {"value", "arrays"}
    if not has_keys or not isinstance(header["arrays"], list):
        raise WireError("the header is not an object of `value` and `arrays`")
    arrays = list(_read_arrays(header["arrays"], message, end))
    value: T = _from_plain(record_type(kind), header["value"], arrays, kind.__name__)
    return value


def to_json(value: Any) -> str:
    """Encode a dataclass without arrays as JSON."""
    arrays: list[AnyArray] = []
    text = json.dumps(_to_plain(record_type(type(value)), value, arrays), separators=(",", ":"))
    assert not arrays, "JSON holds no arrays"
    return text


def from_json(kind: type[T], text: str | bytes) -> T:
    """Decode a `kind` from what `to_json` wrote. Raises `WireError`."""
    value: T = _from_plain(record_type(kind), _parse_json(text), [], kind.__name__)
    return value


def _parse_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not valid JSON: {error}") from None


def _read_arrays(shapes: list[Any], message: memoryview, offset: int) -> Iterator[AnyArray]:
    """Yield the arrays after the header; each must be inside the message, and together they must fill it."""
    for entry in shapes:
        if not isinstance(entry, list) or not 1 <= len(entry) <= 1 + _MAX_DIMENSIONS:
            raise WireError(f"{entry!r} is not the type and shape of an array")
        name, *shape = entry
        if name not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
            raise WireError(f"{entry!r} is not the type and shape of an array; types are {', '.join(DTYPES)}")
        count = math.prod(shape)
        offset += _padding(offset)
        nbytes = count * DTYPES[name].itemsize
        if nbytes > len(message) - offset:
            raise WireError(f"an array {entry} of {nbytes} bytes does not fit into the {len(message) - offset} left")
        yield np.frombuffer(message, DTYPES[name], count, offset if count else 0).reshape(shape)
        offset += nbytes
    if offset != len(message):
        raise WireError(f"{len(message) - offset} bytes follow the last array")


def _padding(offset: int) -> int:
    return -offset % _ALIGNMENT


def _to_plain(kind: MessageType, value: Any, arrays: list[AnyArray]) -> Any:
    """Return what JSON can hold of a value of type `kind`: arrays are moved to `arrays`, and their numbers stay."""
    if isinstance(kind, OptionalType):
        return None if value is None else _to_plain(kind.of, value, arrays)
    if isinstance(kind, ArrayType):
        assert value.dtype.name in DTYPES, f"an array of {value.dtype} cannot be sent"
        arrays.append(np.ascontiguousarray(value))
        return len(arrays) - 1
    if isinstance(kind, MappingType):
        return [[_to_plain(kind.key, k, arrays), _to_plain(kind.value, v, arrays)] for k, v in value.items()]
    if isinstance(kind, TupleType):
        return [_to_plain(k, v, arrays) for k, v in zip(kind.of_length(len(value)), value, strict=True)]
    if isinstance(kind, RecordType):
        return {name: _to_plain(of, getattr(value, name), arrays) for name, of in kind.fields}
    return value


def _from_plain(kind: MessageType, plain: Any, arrays: list[AnyArray], where: str) -> Any:
    """Return the value of type `kind` that `plain` encodes; errors call it `where`."""
    if isinstance(kind, OptionalType):
        return None if plain is None else _from_plain(kind.of, plain, arrays, where)
    if isinstance(kind, ArrayType):
        if type(plain) is not int or not 0 <= plain < len(arrays):
            raise WireError(f"{where}: {plain!r} is not the number of an array")
        array = arrays[plain]
        if array.dtype.name not in kind.dtypes:
            raise WireError(f"{where}: an array of {array.dtype}, expected {' or '.join(kind.dtypes)}")
        return array
    if isinstance(kind, MappingType):
        pairs = _checked_list(plain, where)
        return {
            _from_plain(kind.key, k, arrays, where): _from_plain(kind.value, v, arrays, f"{where}[{k}]")
            for k, v in (_checked_list(pair, where, 2) for pair in pairs)
        }
    if isinstance(kind, TupleType):
        elements = _checked_list(plain, where, None if kind.repeats else len(kind.elements))
        kinds = kind.of_length(len(elements))
        return tuple(_from_plain(k, v, arrays, where) for k, v in zip(kinds, elements, strict=True))
    if isinstance(kind, RecordType):
        expected = [name for name, _ in kind.fields]
        if not isinstance(plain, dict) or plain.keys() != set(expected):
            raise WireError(f"{where}: expected an object with {', '.join(expected)}")
        values = {name: _from_plain(of, plain[name], arrays, f"{where}.{name}") for name, of in kind.fields}
        return kind.kind(**values)
    if type(plain) is not kind.kind:
        raise WireError(f"{where}: found {plain!r:.50}, expected {kind}")
    return plain


def _checked_list(plain: Any, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(plain, list) or length not in (None, len(plain)):
        raise WireError(f"{where}: found {plain!r:.50}, expected a list{f' of {length}' if length else ''}")
    return plain
