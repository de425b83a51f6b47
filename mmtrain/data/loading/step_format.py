"""Encode a step's data as bytes for another process or machine: a JSON header, then the arrays as they are in memory.

    magic, version, bytes of the header, bytes in all | header | padding | array | padding | array ...

The header holds the value with every array replaced by its number, and the type and shape of each array, from which its
offset follows. Both sides take the allowed types from the type hints of the frozen dataclasses, so nothing can be sent
that was not declared, a new field needs no code here, and `format_fingerprint` differs between versions. Numbers are
little-endian. There is no pickle: decoding builds what the types declare, or raises `WireError`.
"""

import hashlib
import json
import math
import struct
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
AnyArray = npt.NDArray[Any]

VERSION = 1
_MAGIC = b"MMTW"
_HEAD = struct.Struct("<4sIQQ")
_ALIGNMENT = 64  # so that arrays can be used in place
_MAX_DIMENSIONS = 8
_DTYPES: dict[str, np.dtype[Any]] = {
    "uint8": np.dtype("u1"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "int64": np.dtype("<i8"),
}

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
    return hashlib.sha256(f"{VERSION}:{_describe(kind, ())}".encode()).hexdigest()


def pack(value: Any) -> PackedMessage:
    """Encode a dataclass without copying its arrays."""
    arrays: list[AnyArray] = []
    plain = _to_plain(type(value), value, arrays)
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
    value: T = _from_plain(kind, header["value"], arrays, kind.__name__)
    return value


def to_json(value: Any) -> str:
    """Encode a dataclass without arrays as JSON."""
    arrays: list[AnyArray] = []
    text = json.dumps(_to_plain(type(value), value, arrays), separators=(",", ":"))
    assert not arrays, "JSON holds no arrays"
    return text


def from_json(kind: type[T], text: str | bytes) -> T:
    """Decode a `kind` from what `to_json` wrote. Raises `WireError`."""
    value: T = _from_plain(kind, _parse_json(text), [], kind.__name__)
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
        if name not in _DTYPES or not all(type(n) is int and n >= 0 for n in shape):
            raise WireError(f"{entry!r} is not the type and shape of an array; types are {', '.join(_DTYPES)}")
        count = math.prod(shape)
        offset += _padding(offset)
        nbytes = count * _DTYPES[name].itemsize
        if nbytes > len(message) - offset:
            raise WireError(f"an array {entry} of {nbytes} bytes does not fit into the {len(message) - offset} left")
        yield np.frombuffer(message, _DTYPES[name], count, offset if count else 0).reshape(shape)
        offset += nbytes
    if offset != len(message):
        raise WireError(f"{len(message) - offset} bytes follow the last array")


def _padding(offset: int) -> int:
    return -offset % _ALIGNMENT


def _to_plain(kind: Any, value: Any, arrays: list[AnyArray]) -> Any:
    """Return what JSON can hold of a value of type `kind`: arrays are moved to `arrays`, and their numbers stay."""
    kind, optional = _without_none(kind)
    if optional and value is None:
        return None
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is np.ndarray:
        assert value.dtype.name in _DTYPES, f"an array of {value.dtype} cannot be sent"
        arrays.append(np.ascontiguousarray(value))
        return len(arrays) - 1
    if origin in (dict, Mapping):
        return [[_to_plain(args[0], k, arrays), _to_plain(args[1], v, arrays)] for k, v in value.items()]
    if origin is tuple:
        return [_to_plain(k, v, arrays) for k, v in zip(_element_types(args, len(value)), value, strict=True)]
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return {name: _to_plain(hint, getattr(value, name), arrays) for name, hint in hints.items()}
    assert kind in (int, float, str, bool), f"{kind} cannot be sent"
    return value


def _from_plain(kind: Any, plain: Any, arrays: list[AnyArray], where: str) -> Any:
    """Return the value of type `kind` that `plain` encodes; errors call it `where`."""
    kind, optional = _without_none(kind)
    if optional and plain is None:
        return None
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is np.ndarray:
        if type(plain) is not int or not 0 <= plain < len(arrays):
            raise WireError(f"{where}: {plain!r} is not the number of an array")
        array = arrays[plain]
        if array.dtype not in _dtypes(args):
            raise WireError(f"{where}: an array of {array.dtype}, expected {_names(_dtypes(args))}")
        return array
    if origin in (dict, Mapping):
        pairs = _checked_list(plain, where)
        return {
            _from_plain(args[0], k, arrays, where): _from_plain(args[1], v, arrays, f"{where}[{k}]")
            for k, v in (_checked_list(pair, where, 2) for pair in pairs)
        }
    if origin is tuple:
        elements = _checked_list(plain, where, None if args[-1] is Ellipsis else len(args))
        kinds = _element_types(args, len(elements))
        return tuple(_from_plain(k, v, arrays, where) for k, v in zip(kinds, elements, strict=True))
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        if not isinstance(plain, dict) or plain.keys() != hints.keys():
            raise WireError(f"{where}: expected an object with {', '.join(hints)}")
        return kind(**{name: _from_plain(hint, plain[name], arrays, f"{where}.{name}") for name, hint in hints.items()})
    if type(plain) is not kind:
        raise WireError(f"{where}: found {plain!r:.50}, expected {kind.__name__}")
    return plain


def _checked_list(plain: Any, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(plain, list) or length not in (None, len(plain)):
        raise WireError(f"{where}: found {plain!r:.50}, expected a list{f' of {length}' if length else ''}")
    return plain


def _element_types(args: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """Return the types of a tuple's elements."""
    return (args[0],) * length if args[-1] is Ellipsis else args


def _without_none(kind: Any) -> tuple[Any, bool]:
    """Return X for `X | None`, and whether None is allowed."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind, False
    rest = [arg for arg in typing.get_args(kind) if arg is not types.NoneType]
    assert len(rest) == 1, f"{kind}: a message does not say which type of a union it holds"
    return rest[0], True


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _dtypes(args: tuple[Any, ...]) -> tuple[np.dtype[Any], ...]:
    """Return the element types that `NDArray[np.int64]` or `NDArray[np.uint8 | np.float32]` may have."""
    [element] = typing.get_args(args[1])
    return tuple(_DTYPES[kind.__name__] for kind in typing.get_args(element) or (element,))


def _names(dtypes: tuple[np.dtype[Any], ...]) -> str:
    return " or ".join(dtype.name for dtype in dtypes)


def _describe(kind: Any, inside: tuple[type, ...]) -> str:
    """Spell out a type, with all fields of all dataclasses in it."""
    if isinstance(kind, type) and is_dataclass(kind):
        assert kind not in inside, f"{kind} holds itself"
        hints = _hints(kind)
        described = [f"{name}: {_describe(hint, (*inside, kind))}" for name, hint in hints.items()]
        return f"{kind.__name__}({', '.join(described)})"
    args = typing.get_args(kind)
    if typing.get_origin(kind) is np.ndarray:
        return f"array of {_names(_dtypes(args))}"
    name = getattr(typing.get_origin(kind) or kind, "__name__", str(kind))
    return f"{name}[{', '.join(_describe(arg, inside) for arg in args)}]" if args else name
