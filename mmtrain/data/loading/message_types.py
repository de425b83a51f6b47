"""Read from annotations what the fields of a message hold, in terms of our own.

Versions of Python and numpy name the same type differently: numpy 2.5 declares `NDArray` by a `type` statement, and
since Python 3.14 `int | None` is a `typing.Union`. What is sent must not depend on that, nor the fingerprint by which
two machines know that they send the same. So annotations are read here alone.
"""

import collections.abc
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "uint8": np.dtype("u1"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "int64": np.dtype("<i8"),
}
_PLAIN = (int, float, str, bool)


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
        """Return the types of the elements of a tuple with so many."""
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
    record = _read(kind)
    assert isinstance(record, RecordType), f"{kind} is no dataclass"
    return record


@cache
def _read(annotation: Any, inside: tuple[type, ...] = ()) -> MessageType:
    """Return the type that an annotation of a field of the dataclasses `inside` stands for."""
    annotation = _without_alias(annotation)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        rest = [arg for arg in args if arg is not types.NoneType]
        assert len(rest) == 1, f"{annotation}: a message does not say which type of a union it holds"
        return OptionalType(_read(rest[0], inside))
    if origin is np.ndarray:
        return ArrayType(_element_names(args))
    if origin in (dict, collections.abc.Mapping):
        return MappingType(_read(args[0], inside), _read(args[1], inside))
    if origin is tuple:
        repeats = args[-1] is Ellipsis
        return TupleType(tuple(_read(arg, inside) for arg in args if arg is not Ellipsis), repeats)
    if isinstance(annotation, type) and is_dataclass(annotation):
        assert annotation not in inside, f"{annotation} holds itself"
        hints = typing.get_type_hints(annotation)
        names = [field.name for field in fields(annotation)]
        return RecordType(annotation, tuple((name, _read(hints[name], (*inside, annotation))) for name in names))
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
