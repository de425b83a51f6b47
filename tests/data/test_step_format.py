import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass, replace
from typing import Any, Optional, TypeVar, Union

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from typing_extensions import TypeAliasType

from mmtrain.balance import BatchMeta
from mmtrain.balance.batch_meta import ItemTable
from mmtrain.data import EncoderPayload, PayloadNeed, Quarantined, StepData, TextPayload
from mmtrain.data.loading.batch_builder import StepRequest
from mmtrain.data.loading.step_format import (
    WireError,
    format_fingerprint,
    from_json,
    pack,
    record_type,
    to_json,
    unpack,
)
from tests.data.steps import leaves, same

ints = hnp.arrays(np.int64, st.integers(0, 5))
floats = hnp.arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(1, 3)), elements={"allow_nan": False})
counts = st.lists(st.integers(0, 1 << 40), max_size=3).map(tuple)
keys = st.tuples(st.integers(0, 9), st.integers(0, 9))
texts = st.text(max_size=5)
tables = st.builds(ItemTable, *[ints] * 8)
metas = st.builds(
    BatchMeta, st.integers(0), st.integers(0), *[ints] * 5, items=st.dictionaries(texts, tables, max_size=2)
)
steps = st.builds(
    StepData,
    metas,
    encoders=st.dictionaries(
        texts,
        st.dictionaries(keys, st.builds(EncoderPayload, counts, counts, st.none() | floats), max_size=2),
        max_size=2,
    ),
    text=st.dictionaries(
        keys,
        st.builds(TextPayload, counts, st.none() | ints, st.none() | ints, st.dictionaries(texts, ints, max_size=2)),
        max_size=2,
    ),
    quarantined=st.lists(st.builds(Quarantined, texts, st.integers(), texts, texts, texts), max_size=2).map(tuple),
)


def message(value: Any) -> bytearray:
    packed = pack(value)
    encoded = bytearray(b"".join(packed.chunks))
    assert len(encoded) == packed.nbytes
    return encoded


@given(steps)
def test_a_step_comes_back_as_it_was(step: StepData) -> None:
    assert same(unpack(StepData, message(step)), step)


@given(st.builds(StepRequest, st.integers(), *[st.dictionaries(texts, st.integers())] * 2, st.just(())))
def test_a_request_comes_back_as_it_was(request: StepRequest) -> None:
    needs = (PayloadNeed("vision", 1, media=True), PayloadNeed("llm", 0, ids=True, labels=True))
    for expected in (request, replace(request, needs=needs)):
        assert from_json(StepRequest, to_json(expected)) == expected


STEP = StepData(
    BatchMeta(7, 0, *[np.arange(3)] * 5, items={"vision": ItemTable(*[np.arange(2)] * 8)}),
    {"vision": {(0, 0): EncoderPayload((1,), (2,), np.ones((2, 12), dtype=np.float32))}},
    {(0, 1): TextPayload((3,), np.arange(3), None, {"vision": np.arange(1)})},
    (Quarantined("a", 1, "b", "c", "d"),),
)


def test_arrays_are_writable_views_of_the_message() -> None:
    encoded = message(STEP)
    patches = unpack(StepData, encoded).encoders["vision"][0, 0].cells
    assert patches is not None
    patches[0, 0] = 5
    decoded_again = unpack(StepData, encoded).encoders["vision"][0, 0].cells
    assert decoded_again is not None
    assert decoded_again[0, 0] == 5
    offsets = [np.shares_memory(np.frombuffer(encoded, np.uint8), leaf) for leaf in (patches, decoded_again)]
    assert offsets == [True, True]


@given(st.integers(0, len(message(STEP)) - 1))
def test_a_truncated_message_is_rejected(length: int) -> None:
    with pytest.raises(WireError):
        unpack(StepData, message(STEP)[:length])


@given(st.integers(0, len(message(STEP)) - 1), st.integers(1, 255))
def test_a_damaged_message_is_rejected_or_has_the_declared_types(place: int, flip: int) -> None:
    damaged = message(STEP)
    damaged[place] ^= flip
    try:
        encoded = unpack(StepData, damaged)
    except WireError:
        return
    assert [path for path, _ in leaves(encoded.meta)][:3] == [".step", ".epoch", ".sample_id"]
    assert all(
        isinstance(v.cells, np.ndarray | None) for payloads in encoded.encoders.values() for v in payloads.values()
    )


def raw_message(header: Any, behind: bytes = b"", total: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if isinstance(header, dict) and header["arrays"]:
        behind = bytes(-(struct.calcsize("<4sIQQ") + len(text)) % 64) + behind
    size = struct.calcsize("<4sIQQ") + len(text) + len(behind)
    return struct.pack("<4sIQQ", b"MMTW", 1, len(text), total or size) + text + behind


@dataclass(frozen=True)
class Small:
    array: npt.NDArray[np.int64]
    pair: tuple[int, str]


GOOD: dict[str, Any] = {"value": {"array": 0, "pair": [1, "x"]}, "arrays": [["int64", 0]]}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"", "less than the start"),
        (b"\x80\x04" + bytes(40), "starts with"),
        (raw_message(GOOD, total=1 << 60), "claims"),
        (raw_message(b"{"), "not valid JSON"),
        (raw_message(b"[" * 100_000), "not valid JSON"),
        (raw_message([]), "not an object of `value`"),
        (raw_message(GOOD | {"arrays": [["int64", 1 << 61]]}), "does not fit"),
        (raw_message(GOOD | {"arrays": [["int64", 1 << 40, 1 << 40]]}), "does not fit"),
        (raw_message(GOOD | {"arrays": [["int64", -1]]}), "not the type and shape"),
        (raw_message(GOOD | {"arrays": [["int64", *[1] * 9]]}), "not the type and shape"),
        (raw_message(GOOD | {"arrays": [["object", 1]]}), "not the type and shape"),
        (raw_message(GOOD | {"arrays": [["float32", 0]]}), "expected int64"),
        (raw_message(GOOD | {"arrays": []}), "not the number of an array"),
        (raw_message(GOOD, bytes(1000)), "follow the last array"),
        (raw_message(GOOD | {"value": {"array": True, "pair": [1, "x"]}}), "not the number of an array"),
        (raw_message(GOOD | {"value": {"array": 0, "pair": [1]}}), "expected a list of 2"),
        (raw_message(GOOD | {"value": {"array": 0, "pair": [True, "x"]}}), "expected int"),
        (raw_message(GOOD | {"value": {"array": 0}}), "expected an object with array, pair"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_messages_are_rejected(text: bytes, error: str) -> None:
    with pytest.raises(WireError, match=error):
        unpack(Small, text)


def test_the_fingerprint_depends_on_every_field() -> None:
    @dataclass(frozen=True)
    class Other:
        array: npt.NDArray[np.float32]
        pair: tuple[int, str]

    assert format_fingerprint(Small) == format_fingerprint(Small)
    assert format_fingerprint(Small) != format_fingerprint(Other)
    assert format_fingerprint(StepData) != format_fingerprint(StepRequest)


Scalar = TypeVar("Scalar", bound=np.generic)
# As numpy 2.5 declares it on Python 3.12 and later; older ones let an alias stand for its value.
NumpysAlias = TypeAliasType("NumpysAlias", np.ndarray[Any, np.dtype[Scalar]], type_params=(Scalar,))  # type: ignore[misc]
Count = TypeAliasType("Count", int)


@pytest.mark.parametrize(
    ("spellings", "described"),
    [
        ((npt.NDArray[np.int64], np.ndarray[Any, np.dtype[np.int64]], NumpysAlias[np.int64]), "array of int64"),
        ((npt.NDArray[np.uint8 | np.float32], NumpysAlias[np.uint8 | np.float32]), "array of uint8 or float32"),
        # Python 3.14 makes one type of what are two before.
        ((int | None, None | int, Optional[int], Union[int, None]), "optional int"),  # noqa: UP007, UP045
        ((NumpysAlias[np.int64] | None, Optional[npt.NDArray[np.int64]]), "optional array of int64"),  # noqa: UP045
        ((dict[str, int], Mapping[str, int], Mapping[str, Count]), "mapping[str, int]"),
        ((tuple[int, ...], tuple[Count, ...]), "tuple[int, ...]"),
        ((tuple[float, bool],), "tuple[float, bool]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_type_is_the_same_however_versions_of_python_and_numpy_spell_it(
    spellings: tuple[Any, ...], described: str
) -> None:
    records = [make_dataclass("Record", [("field", spelling)], frozen=True) for spelling in spellings]
    assert {str(record_type(record)) for record in records} == {f"Record(field: {described})"}
    assert len({format_fingerprint(record) for record in records}) == 1


def test_fields_of_an_alias_are_sent() -> None:
    record = make_dataclass("Record", [("field", NumpysAlias[np.int64]), ("more", Optional[Count])], frozen=True)  # noqa: UP045
    decoded: Any = unpack(record, message(record(np.arange(3), None)))
    np.testing.assert_array_equal(decoded.field, np.arange(3))
    assert decoded.more is None


def test_the_fingerprint_is_the_same_in_every_environment() -> None:
    assert format_fingerprint(Small) == "6a6edd84aee368560116d2031c1d6781d53da3de7e0223bb104ac254c233d937"
