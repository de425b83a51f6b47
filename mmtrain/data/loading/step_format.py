"""Encode a step's data as bytes for another process or machine: a JSON header, then the arrays as they are in memory.

    magic, version, bytes of the header, bytes in all | header | padding | array | padding | array ...

The header holds the value with every array replaced by its number, and the type and shape of each array, from which its
offset follows. Both sides take the allowed types from the frozen dataclasses (`record_type`). So nothing can be sent
that was not declared, a new field needs no code here, and `format_fingerprint` differs between versions. Numbers are
little-endian. There is no pickle: decoding builds what the types declare, or raises `WireError`.

Types are described in terms of our own. Versions of Python and numpy name the same type differently: numpy 2.5 declares
`NDArray` by a `type` statement, and since Python 3.14 `int | None` is a `typing.Union`. Neither what is sent nor the
fingerprint must depend on that.
"""

import collections.abc
import hashlib
import json
import math
import struct
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mmtrain.foreign_json import parse_json

DTYPES: dict[str, np.dtype[Any]] = {
    "uint8": np.dtype("u1"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "int64": np.dtype("<i8"),
}
_PLAIN = (int, float, str, bool)
T = TypeVar("T")
AnyArray = npt.NDArray[Any]

VERSION = 1
_MAGIC = b"MMTW"
_HEAD = struct.Struct("<4sIQQ")
_ALIGNMENT = 64  # so that arrays can be used in place
_MAX_DIMENSIONS = 8

assert sys.byteorder == "little", "arrays are sent as they are in memory"


@dataclass(frozen=True)
class PlainType:
    """A number, a text or a truth value."""

    kind: type

    def __str__(self) -> str:
        return self.kind.__name__


@dataclass(frozen=True)
class ArrayType:
    """An array of one of several element types, by their names in `DTYPES`."""

    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        return f"array of {' or '.join(self.dtypes)}"


@dataclass(frozen=True)
class OptionalType:
    """A value, or None."""

    of: "MessageType"

    def __str__(self) -> str:
        return f"optional {self.of}"


@dataclass(frozen=True)
class MappingType:
    """Values by keys."""

    key: "MessageType"
    value: "MessageType"

    def __str__(self) -> str:
        return f"mapping[{self.key}, {self.value}]"


@dataclass(frozen=True)
class TupleType:
    """A tuple of these elements, or of any number of the first one."""

    elements: "tuple[MessageType, ...]"
    repeats: bool

    def __str__(self) -> str:
        return f"tuple[{', '.join(map(str, self.elements))}{', ...' if self.repeats else ''}]"

    def of_length(self, length: int) -> "tuple[MessageType, ...]":
        """Return the types of the elements of a tuple of this length."""
        return self.elements * length if self.repeats else self.elements


@dataclass(frozen=True)
class RecordType:
    """A dataclass, with its fields in order."""

    kind: type
    fields: "tuple[tuple[str, MessageType], ...]"

    def __str__(self) -> str:
        return f"{self.kind.__name__}({', '.join(f'{name}: {of}' for name, of in self.fields)})"


MessageType = PlainType | ArrayType | OptionalType | MappingType | TupleType | RecordType


def record_type(kind: type) -> RecordType:
    """Return what a dataclass holds. A type that no message can hold is an AssertionError."""
    record = _read_annotation(kind)
    assert isinstance(record, RecordType), f"{kind} is no dataclass"
    return record


@cache
def _read_annotation(annotation: Any, inside: tuple[type, ...] = ()) -> MessageType:
    """Return the type that an annotation of a field of the dataclasses `inside` stands for."""
    annotation = _without_alias(annotation)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        rest = [arg for arg in args if arg is not types.NoneType]
        assert len(rest) == 1, f"{annotation}: a message does not say which type of a union it holds"
        return OptionalType(_read_annotation(rest[0], inside))
    if origin is np.ndarray:
        return ArrayType(_element_names(args))
    if origin in (dict, collections.abc.Mapping):
        return MappingType(_read_annotation(args[0], inside), _read_annotation(args[1], inside))
    if origin is tuple:
        repeats = args[-1] is Ellipsis
        return TupleType(tuple(_read_annotation(arg, inside) for arg in args if arg is not Ellipsis), repeats)
    if isinstance(annotation, type) and is_dataclass(annotation):
        assert annotation not in inside, f"{annotation} holds itself"
        hints = typing.get_type_hints(annotation)
        names = [field.name for field in fields(annotation)]
        return RecordType(
            annotation, tuple((name, _read_annotation(hints[name], (*inside, annotation))) for name in names)
        )
    assert annotation in _PLAIN, f"{annotation} cannot be sent"
    return PlainType(annotation)


def _without_alias(annotation: Any) -> Any:
    """Return what a name that a `type` statement declares stands for."""
    while hasattr(alias := typing.get_origin(annotation) or annotation, "__value__"):
        args = typing.get_args(annotation)
        annotation = alias.__value__[args] if args else alias.__value__
    return annotation


def _element_names(args: Sequence[Any]) -> tuple[str, ...]:
    """Return the element types that `NDArray[np.int64]` or `NDArray[np.uint8 | np.float32]` may have."""
    [element] = typing.get_args(args[1])
    names = tuple(np.dtype(kind).name for kind in typing.get_args(element) or (element,))
    assert DTYPES.keys() >= set(names), f"arrays of {' or '.join(names)} cannot be sent"
    return names


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
        return parse_json(text)
    except ValueError as error:
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
