"""A step's data as bytes that another process or machine reads back: a JSON header, then the arrays as they are.

    magic, version, bytes of the header, bytes in all | header | padding | array | padding | array ...

The header holds the value with every array replaced by its number, and the type and shape of each array; their places
follow from these. What may stand where is read off the type hints of the frozen dataclasses on both sides, so nothing
can be sent that was not declared, a new field needs no line here, and `format_fingerprint` tells two versions apart.
Numbers are little-endian. There is no pickle: reading builds what the types say, or raises `WireError`.
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
_ALIGN = 64  # so that arrays can be used where they lie
_MAX_DIMENSIONS = 8
_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float64": np.dtype("<f8"), "int64": np.dtype("<i8")}

assert sys.byteorder == "little", "arrays go over the wire as they lie in memory"


class WireError(ValueError):
    """Bytes that are no message of this version, or claim what they do not hold."""


@dataclass(frozen=True)
class PackedMessage:
    """A message: `chunks` one after another are its bytes."""

    chunks: tuple[memoryview, ...]
    nbytes: int


def format_fingerprint(kind: type) -> str:
    """SHA-256 over the version of the format and every field that a `kind` may hold; equal where messages are."""
    return hashlib.sha256(f"{VERSION}:{_describe(kind, ())}".encode()).hexdigest()


def pack(value: Any) -> PackedMessage:
    """Lay out a dataclass, without copying its arrays."""
    arrays: list[AnyArray] = []
    plain = _to_plain(type(value), value, arrays)
    shapes = [[array.dtype.name, *array.shape] for array in arrays]
    header = json.dumps({"value": plain, "arrays": shapes}, separators=(",", ":")).encode()
    chunks: list[memoryview] = []
    place = _HEAD.size + len(header)
    for array in arrays:
        chunks += [memoryview(bytes(_padding(place))), array.reshape(-1).view(np.uint8).data]
        place += _padding(place) + array.nbytes
    head = _HEAD.pack(_MAGIC, VERSION, len(header), place)
    return PackedMessage((memoryview(head + header), *chunks), place)


def unpack(kind: type[T], message: memoryview | bytes) -> T:
    """Read a `kind` back; its arrays lie in `message` and are as writable as that is. Raises `WireError`."""
    message = memoryview(message).cast("B")
    if len(message) < _HEAD.size:
        raise WireError(f"{len(message)} bytes are less than the start of a message")
    magic, version, header_bytes, total = _HEAD.unpack_from(message)
    if magic != _MAGIC or version != VERSION:
        raise WireError(f"starts with {magic!r}, version {version}; expected {_MAGIC!r}, version {VERSION}")
    if total != len(message) or header_bytes > total - _HEAD.size:
        raise WireError(f"claims {total} bytes with a header of {header_bytes}, holds {len(message)}")
    end = _HEAD.size + header_bytes
    header = _parsed(bytes(message[_HEAD.size : end]))
    if not isinstance(header, dict) or header.keys() != {"value", "arrays"} or not isinstance(header["arrays"], list):
        raise WireError("the header is not an object of `value` and `arrays`")
    value: T = _from_plain(kind, header["value"], list(_arrays(header["arrays"], message, end)), kind.__name__)
    return value


def to_json(value: Any) -> str:
    """Write a dataclass without arrays as JSON."""
    arrays: list[AnyArray] = []
    text = json.dumps(_to_plain(type(value), value, arrays), separators=(",", ":"))
    assert not arrays, "JSON holds no arrays"
    return text


def from_json(kind: type[T], text: str | bytes) -> T:
    """Read a `kind` back from what `to_json` wrote. Raises `WireError`."""
    value: T = _from_plain(kind, _parsed(text), [], kind.__name__)
    return value


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not valid JSON: {error}") from None


def _arrays(shapes: list[Any], message: memoryview, place: int) -> Iterator[AnyArray]:
    """The arrays behind the header, each checked to lie inside the message; they must fill it to its end."""
    for entry in shapes:
        if not isinstance(entry, list) or not 1 <= len(entry) <= 1 + _MAX_DIMENSIONS:
            raise WireError(f"{entry!r} is no type and shape of an array")
        name, *shape = entry
        if name not in _DTYPES or not all(type(n) is int and n >= 0 for n in shape):
            raise WireError(f"{entry!r} is no type and shape of an array; types are {', '.join(_DTYPES)}")
        count, place = math.prod(shape), place + _padding(place)
        nbytes = count * _DTYPES[name].itemsize
        if nbytes > len(message) - place:
            raise WireError(f"an array {entry} of {nbytes} bytes does not fit into the {len(message) - place} left")
        yield np.frombuffer(message, _DTYPES[name], count, place if count else 0).reshape(shape)
        place += nbytes
    if place != len(message):
        raise WireError(f"{len(message) - place} bytes follow the last array")


def _padding(place: int) -> int:
    return -place % _ALIGN


def _to_plain(kind: Any, value: Any, arrays: list[AnyArray]) -> Any:
    """What JSON takes for a value of type `kind`; arrays go to `arrays`, their numbers stay."""
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
        return [_to_plain(k, v, arrays) for k, v in zip(_elements(args, len(value)), value, strict=True)]
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return {name: _to_plain(hint, getattr(value, name), arrays) for name, hint in hints.items()}
    assert kind in (int, float, str, bool), f"{kind} cannot be sent"
    return value


def _from_plain(kind: Any, plain: Any, arrays: list[AnyArray], where: str) -> Any:
    """The value of type `kind` that `plain` stands for; `where` names it in errors."""
    kind, optional = _without_none(kind)
    if optional and plain is None:
        return None
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is np.ndarray:
        if type(plain) is not int or not 0 <= plain < len(arrays):
            raise WireError(f"{where}: {plain!r} is the number of no array")
        if arrays[plain].dtype != (wanted := _dtype(args)):
            raise WireError(f"{where}: an array of {arrays[plain].dtype}, expected {wanted}")
        return arrays[plain]
    if origin in (dict, Mapping):
        pairs = _list(plain, where)
        return {
            _from_plain(args[0], k, arrays, where): _from_plain(args[1], v, arrays, f"{where}[{k}]")
            for k, v in (_list(pair, where, 2) for pair in pairs)
        }
    if origin is tuple:
        found = _list(plain, where, None if args[-1] is Ellipsis else len(args))
        return tuple(_from_plain(k, v, arrays, where) for k, v in zip(_elements(args, len(found)), found, strict=True))
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        if not isinstance(plain, dict) or plain.keys() != hints.keys():
            raise WireError(f"{where}: expected an object with {', '.join(hints)}")
        return kind(**{name: _from_plain(hint, plain[name], arrays, f"{where}.{name}") for name, hint in hints.items()})
    if type(plain) is not kind:
        raise WireError(f"{where}: found {plain!r:.50}, expected {kind.__name__}")
    return plain


def _list(plain: Any, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(plain, list) or length not in (None, len(plain)):
        raise WireError(f"{where}: found {plain!r:.50}, expected a list{f' of {length}' if length else ''}")
    return plain


def _elements(args: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """Types of a tuple's elements."""
    return (args[0],) * length if args[-1] is Ellipsis else args


def _without_none(kind: Any) -> tuple[Any, bool]:
    """The type that is left of `X | None`, and whether None was allowed."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind, False
    rest = [arg for arg in typing.get_args(kind) if arg is not types.NoneType]
    assert len(rest) == 1, f"{kind} says nothing about which type it is"
    return rest[0], True


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _dtype(args: tuple[Any, ...]) -> np.dtype[Any]:
    """The element type of `NDArray[np.int64]`."""
    return _DTYPES[typing.get_args(args[1])[0].__name__]


def _describe(kind: Any, inside: tuple[type, ...]) -> str:
    """A type spelled out down to numbers and texts."""
    if isinstance(kind, type) and is_dataclass(kind):
        assert kind not in inside, f"{kind} holds itself"
        return f"{kind.__name__}({', '.join(f'{n}: {_describe(h, (*inside, kind))}' for n, h in _hints(kind).items())})"
    args = typing.get_args(kind)
    if typing.get_origin(kind) is np.ndarray:
        return f"array of {_dtype(args)}"
    name = getattr(typing.get_origin(kind) or kind, "__name__", str(kind))
    return f"{name}[{', '.join(_describe(arg, inside) for arg in args)}]" if args else name
