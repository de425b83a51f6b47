"""The streaming reader of JSON lists reads what `json.loads` reads, in any pieces."""

import io
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.data.formats import json_list
from mmtrain.data.formats.json_list import BadJsonError, NotAListError, read_json_list

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=8,
)


def read(content: bytes) -> list[Any]:
    return [element.value for element in read_json_list(io.BytesIO(content))]


@given(st.lists(VALUES, max_size=4), st.integers(1, 40), st.booleans(), st.sampled_from([None, 1]))
def test_any_list_is_read_in_pieces_of_any_size(
    values: list[Any], piece_bytes: int, ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(values, ensure_ascii=ascii_only, indent=indent)
    try:
        content = text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        content = json.dumps(values, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_list, "_PIECE_BYTES", piece_bytes)
        assert read(content) == values
        assert read(b"\xef\xbb\xbf" + content + b" \n") == values


@given(st.binary(max_size=12) | st.text('[]{}",:1e-truefals\\u0 \n', max_size=12).map(str.encode), st.integers(1, 40))
def test_any_text_is_read_or_rejected_as_the_standard_library_does(content: bytes, piece_bytes: int) -> None:
    try:
        expected = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        expected = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_list, "_PIECE_BYTES", piece_bytes)
        try:
            values = read(content)
        except BadJsonError:
            values = None
    assert values == (expected if isinstance(expected, list) else None)


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ('[\n"ä",\n{"a": "b\nc"}]', 3, "Invalid control character at"),
        ("[1,\n2\n3]", 3, "Expecting ',' delimiter"),
        ("[1]\n\nx", 3, "Extra data"),
        ('[\n"abc', 2, "Unterminated string"),
        ("", 1, "Expecting value"),
        ("[" * 100_000, 1, "nested too deeply"),
    ],
)
def test_a_fault_is_found_with_its_line(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int, content: str, line: int, reason: str
) -> None:
    if piece_bytes == 1 and len(content) > 1000:
        pytest.skip("it would be parsed once for each of its bytes")
    monkeypatch.setattr(json_list, "_PIECE_BYTES", piece_bytes)
    with pytest.raises(BadJsonError, match=reason) as bad:
        read(content.encode())
    assert bad.value.line == line


def test_bytes_that_are_no_text_are_found_with_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_list, "_PIECE_BYTES", 4)
    with pytest.raises(BadJsonError, match="invalid start byte at byte 9"):
        read('[1,\n"ää'.encode()[:9] + b"\xff")
    with pytest.raises(NotAListError, match="an object"):
        read(b' {"a"')


def test_an_endless_text_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_list, "MAX_ENTRY_BYTES", 100)
    monkeypatch.setattr(json_list, "_PIECE_BYTES", 10)
    file = io.BytesIO(b'["' + b"x" * 10_000)
    with pytest.raises(BadJsonError, match="a sample of more than 100 bytes"):
        list(read_json_list(file))
    assert file.tell() < 1000, "the rest is not read"


def test_a_character_beyond_latin_1_does_not_cost_memory() -> None:
    entry = json.dumps({"id": "x", "text": "word " * 200})
    content = ("[" + f"{entry},\n" * 8000 + '"\N{GRINNING FACE}"]').encode()
    file = io.BytesIO(content)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_json_list(file)) == 8001
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1.5 * len(content)
