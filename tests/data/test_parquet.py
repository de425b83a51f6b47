import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from mmtrain.data import Quarantined, Sample
from mmtrain.data.formats import parquet as parquet_module
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.index.sample_table import content_json, sample_from_record, sample_record
from mmtrain.data.media import parquet_cells as cells_module
from mmtrain.data.media.media_bytes import FileMedia, ParquetCell
from mmtrain.errors import DataError
from mmtrain.recipe.settings.data_settings import LimitSettings, SourceSettings
from tests.data.archives import parquet

HF_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def _talk(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]


def _read(path: Path, limits: LimitSettings | None = None) -> list[Sample | Quarantined]:
    return list(read_samples(SourceSettings(path=path), limits or LimitSettings()))


def _bytes(sample: Sample | Quarantined, key: str = "images") -> list[bytes]:
    assert isinstance(sample, Sample), sample
    contents = []
    for media in getattr(sample, key):
        assert isinstance(media, ParquetCell)
        with media.open() as file:
            contents.append(file.read())
    return contents


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False, "compression": "zstd"}])
def test_every_cell_opens_to_its_bytes(tmp_path: Path, options: dict[str, Any]) -> None:
    images = [[b"a", b"bb"], [], None, [b"ccc"], [b"dddd"]]
    structs = [
        [{"bytes": i, "path": "x.png"} for i in row_images] if row_images is not None else None for row_images in images
    ]
    columns = {
        "messages": [_talk("hi")] * 5,
        "images": pa.array(structs, pa.list_(HF_IMAGE)),
        "audio": pa.array([b"1", b"22", None, b"4", b"5"]).dictionary_encode(),
        "ignored": list(range(5)),
        "id": ["p", "q", "r", "s", None],
    }
    samples = _read(parquet(tmp_path / "x.parquet", columns, **options))
    assert [_bytes(s) for s in samples] == [row_images or [] for row_images in images]
    assert [_bytes(s, "clips") for s in samples] == [[b"1"], [b"22"], [], [b"4"], [b"5"]]
    assert [(s.id, s.index) for s in samples] == [("p", 0), ("q", 1), ("r", 2), ("s", 3), ("4", 4)]


@pytest.mark.parametrize("struct", [False, True])
def test_columns_full_of_bytes_are_not_read_for_indexing(
    tmp_path: Path, struct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [b"a", b"bb", b"ccc", None, b"dddd", b"e" * 200]
    values = [{"bytes": i, "path": None} for i in images] if struct else images
    columns = {
        "audio": pa.array([b"1"] * 6),
        "caption": list("abcdef"),
        "image": pa.array(values, HF_IMAGE if struct else pa.binary()),
    }
    path = parquet(tmp_path / "x.parquet", columns)
    media_in_value = parquet_module._media_in_value
    read_values: list[Any] = []

    def watched(source: Any, value: Any, *args: Any) -> Any:
        read_values.append(value)
        return media_in_value(source, value, *args)

    monkeypatch.setattr(parquet_module, "_media_in_value", watched)
    samples = _read(path, LimitSettings(max_member_bytes=150))
    assert len(read_values) == 4, "the rows of a group with a gap, and of one that may hold too large a cell"
    kinds = [s.kind if isinstance(s, Quarantined) else _bytes(s) for s in samples]
    gap = "missing_image" if struct else []
    assert kinds == [[b"a"], [b"bb"], [b"ccc"], gap, [b"dddd"], "parquet_cell_size"]
    assert isinstance(samples[0], Sample)
    assert samples[0].turns[0].text == "<audio><image>", "in the order of the columns"


def test_conversations_may_be_json_and_media_paths(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "yes"}]
    struct = pa.array([{"bytes": None, "path": "b.png"}, {"bytes": b"x", "path": None}], HF_IMAGE)
    columns = {"conversations": [json.dumps(talk)] * 2, "images": [["a.png"], ["c/d.png"]]}
    first, second = _read(parquet(tmp_path / "x.parquet", columns))
    assert isinstance(first, Sample)
    assert isinstance(second, Sample)
    assert first.images == (FileMedia(str(tmp_path / "a.png")),)
    assert second.images == (FileMedia(str(tmp_path / "c" / "d.png")),)
    first, second = _read(parquet(tmp_path / "y.parquet", {"caption": ["one", "two"], "image": struct}))
    assert isinstance(first, Sample)
    assert first.images == (FileMedia(str(tmp_path / "b.png")),)
    assert [t.text for t in first.turns] == ["<image>", "one"]
    assert _bytes(second) == [b"x"]


@pytest.mark.parametrize(
    ("columns", "kind", "reason"),
    [
        ({"image": [b"x" * 11]}, "parquet_cell_size", "11 bytes, data.limits.max_member_bytes = 10"),
        ({"image": ["../up.png"]}, "image_path", "lies outside"),
        ({"image": ["http://x/y.png"]}, "image_url", "is a URL"),
        ({"video": [7]}, "malformed", "is int64, expected bytes, a path or both"),
        ({"image": pa.array([{"bytes": None, "path": None}], HF_IMAGE)}, "missing_image", "is empty"),
        ({"messages": ["[" * 100_000]}, "malformed", "nested too deeply"),
        (
            {"messages": pa.array([None], pa.string())},
            "malformed",
            "found the keys (none), allowed: `conversations` or",
        ),
    ],
)
def test_bad_rows_are_quarantined(tmp_path: Path, columns: dict[str, Any], kind: str, reason: str) -> None:
    columns = {"messages": [_talk("hi")]} | columns
    (bad,) = _read(parquet(tmp_path / "x.parquet", columns), LimitSettings(max_member_bytes=10))
    assert isinstance(bad, Quarantined)
    assert (bad.kind, bad.index) == (kind, 0)
    assert reason in bad.reason


@pytest.mark.parametrize("statistics", [False, True])
def test_rows_above_the_limit_and_damaged_row_groups_are_quarantined(tmp_path: Path, statistics: bool) -> None:
    rng = np.random.default_rng(0)
    images = [rng.bytes(5000) for _ in range(6)]
    columns = {"caption": list("abcdef"), "image": images}
    path = parquet(tmp_path / "x.parquet", columns, use_dictionary=False, write_statistics=statistics)
    *good, bad = _read(path, LimitSettings(max_members=4))
    assert len(good) == 4
    assert isinstance(bad, Quarantined)
    assert (bad.kind, bad.index) == ("parquet_too_many", 4)
    content = bytearray(path.read_bytes())
    page_start = content.index(images[2])
    content[page_start - 40 : page_start] = bytes(40)  # the header of a page in the second row group
    path.write_bytes(content)
    samples = _read(path)
    if statistics:  # with statistics the column is known to be full, and is not read for indexing
        assert _bytes(samples[4]) == [images[4]]
        with pytest.raises(OSError, match="deserialize"):
            _bytes(samples[3])
        return
    assert [s.id for s in samples if isinstance(s, Sample)] == ["0", "1", "4", "5"]
    (bad,) = [s for s in samples if isinstance(s, Quarantined)]
    assert (bad.kind, bad.index) == ("parquet_broken", 2)
    assert "row group 1: its rows from 0 on cannot be read" in bad.reason


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"PAR1" + b"\0" * 100 + b"PAR1", "a damaged one"), (b"", "not a Parquet file"), (None, "no such file")],
)
def test_a_file_of_another_format_is_rejected(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(DataError, match=message):
        _read(tmp_path / "x.parquet")


def test_a_file_without_text_is_rejected_with_its_columns(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"found the keys `image`, `label`, allowed: `conversations` or"):
        _read(parquet(tmp_path / "x.parquet", {"image": [b"x"], "label": [1]}))


def batch_bytes(path: Path) -> list[int]:
    """Return the sizes of what reading decodes at a time."""
    with pyarrow.parquet.ParquetFile(path) as file:
        return [batch.nbytes for batch in file.iter_batches(batch_size=cells_module.PARQUET_BATCH_ROWS)]


def test_a_dictionary_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dictionary holds one large value, which every row repeats."""
    columns = {"caption": ["x"] * 1000, "image": pa.array([b"x" * 100_000] * 1000)}
    path = parquet(tmp_path / "x.parquet", columns, row_group_size=1000)
    assert path.stat().st_size < 1_000_000
    largest = max(batch_bytes(path))
    assert largest < 2 * 100_000, "rows are decoded one at a time"
    monkeypatch.setattr(cells_module, "MAX_PARQUET_COLUMN_BYTES", 10_000_000)
    with pytest.raises(OSError, match="is above 10000000 bytes"):
        ParquetCell(str(path), 0, 999, "image", None).open()


def test_columns_called_like_suffixes_hold_media_if_they_hold_bytes(tmp_path: Path) -> None:
    columns = {
        "jpg": [b"a", b"b"],
        "PNG": pa.array([{"bytes": b"c", "path": "x.png"}, None], HF_IMAGE),
        "mp4": [1, 2],
        "text": ["one", "two"],
    }
    first, second = _read(parquet(tmp_path / "x.parquet", columns))
    assert (_bytes(first), _bytes(second)) == ([b"a", b"c"], [b"b"])
    assert isinstance(first, Sample)
    assert [t.text for t in first.turns] == ["<image><image>", "one"]
    assert first.videos == ()


def test_pairs_of_texts_have_their_images_in_front(tmp_path: Path) -> None:
    pairs = [{"user": "What colour?", "assistant": "red"}, {"user": "And now?", "assistant": "blue"}]
    marked = [{"user": "See <image><image>", "assistant": "yes"}]
    images = [[{"bytes": b"a", "path": None}, {"bytes": b"b", "path": None}]] * 2 + [None]
    columns = {"images": pa.array(images, pa.list_(HF_IMAGE)), "texts": [pairs, marked, pairs], "source": ["s"] * 3}
    first, second, third = _read(parquet(tmp_path / "x.parquet", columns))
    assert _bytes(first) == _bytes(second) == [b"a", b"b"]
    assert isinstance(first, Sample)
    assert isinstance(second, Sample)
    assert isinstance(third, Sample)
    expected = [("user", "<image><image>\nWhat colour?"), ("assistant", "red"), ("user", "And now?")]
    assert [(t.role, t.text) for t in first.turns][:3] == expected
    assert second.turns[0].text == marked[0]["user"]
    assert third.turns[0].text == "What colour?"


def test_documents_have_gaps_where_their_other_column_has_a_value(tmp_path: Path) -> None:
    """Read nulls of images, and structs without bytes and path, as places of texts; elsewhere they are faults."""
    empty = {"bytes": None, "path": None}
    images = [[None, {"bytes": b"a", "path": None}, empty, {"bytes": b"b", "path": None}], [None]]
    texts = pa.array([["one", None, "two", None], None], pa.list_(pa.string()))
    columns = {"images": pa.array(images, pa.list_(HF_IMAGE)), "texts": texts, "caption": [None, "x"]}
    document, bad = _read(parquet(tmp_path / "x.parquet", columns))
    assert isinstance(document, Sample)
    assert [(t.role, t.text) for t in document.turns] == [("assistant", "one\n<image>\ntwo\n<image>")]
    assert _bytes(document, "target_images") == [b"a", b"b"]
    assert isinstance(bad, Quarantined)
    assert bad.kind == "missing_image"
    as_json = {"images": columns["images"].slice(0, 1), "texts": [json.dumps(texts[0].as_py())]}
    assert _bytes(_read(parquet(tmp_path / "y.parquet", as_json))[0], "target_images") == [b"a", b"b"]


@pytest.mark.parametrize("texts", [[], [{"user": "x"}], "[1]"])
def test_pairs_that_are_rejected(tmp_path: Path, texts: object) -> None:
    column = pa.array([texts], pa.list_(pa.struct([("user", pa.string())]))) if texts == [] else [texts]
    (bad,) = _read(parquet(tmp_path / "x.parquet", {"texts": column}))
    assert isinstance(bad, Quarantined)
    assert bad.kind == "malformed"
    assert "`texts`" in bad.reason


def test_cells_may_hold_data_urls(tmp_path: Path) -> None:
    urls = ["data:image/png;base64,aGVsbG8=", "data:audio/wav;base64,aGVsbG8="]
    struct = pa.array([{"bytes": None, "path": url} for url in urls], HF_IMAGE)
    for number, column in enumerate((urls, [[url] for url in urls], struct)):
        columns = {"caption": ["a", "b"], "image": column}
        good, bad = _read(parquet(tmp_path / f"{number}.parquet", columns))
        assert _bytes(good) == [b"hello"]
        assert isinstance(bad, Quarantined)
        assert (bad.kind, "audio/wav" in bad.reason) == ("image_url", True)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_conversation_may_hold_data_urls(tmp_path: Path, as_json: bool) -> None:
    urls = ["data:image/png;base64,YQ==", "data:image/png;base64,YmI="]
    parts = [{"type": "image", "url": url, "text": None} for url in urls]
    parts.insert(1, {"type": "text", "url": None, "text": "and"})
    answer = [{"type": "text", "url": None, "text": "yes"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    other = [{"role": "user", "content": answer}, {"role": "assistant", "content": answer}]
    conversations = [json.dumps(talks) for talks in (other, talk)] if as_json else [other, talk]
    _, sample = _read(parquet(tmp_path / "x.parquet", {"messages": conversations}))
    assert _bytes(sample) == [b"a", b"bb"]
    assert isinstance(sample, Sample)
    assert sample.turns[0].text == "<image>and<image>"
    again = sample_from_record(sample_record(sample, content_json(sample)))
    assert again == sample
