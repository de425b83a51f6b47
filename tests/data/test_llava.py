import json
from pathlib import Path

import pytest

from mmtrain.data import Quarantined, Sample, write_quarantine
from mmtrain.data.llava import read
from mmtrain.data.media import FileMedia
from mmtrain.errors import DataError

GOOD = {"id": 7, "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}


def _files(*paths: Path) -> tuple[FileMedia, ...]:
    return tuple(FileMedia(str(path)) for path in paths)


def _one(tmp_path: Path, entry: object, root: Path | None = None) -> Sample | Quarantined:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([entry]))
    (result,) = read(path, root)
    return result


def _sample(tmp_path: Path, entry: object, root: Path | None = None) -> Sample:
    sample = _one(tmp_path, entry, root)
    assert isinstance(sample, Sample)
    return sample


def test_a_sample_keeps_turns_images_and_template(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "<image> and <image>?"},
        {"from": "gpt", "value": "<image> is text here"},
    ]
    entry = {"id": "a", "image": ["x/1.png", "2.png"], "conversations": turns, "template": "t", "extra": 1}
    sample = _sample(tmp_path, entry)
    assert [t.role for t in sample.turns] == ["system", "user", "assistant"]
    assert sample.images == _files(tmp_path / "x" / "1.png", tmp_path / "2.png")
    assert (sample.id, sample.index, sample.num_marks(), sample.template) == ("a", 0, 2, "t")
    assert sample.answer == "<image> is text here"


def test_one_image_may_be_a_plain_text_and_roots_may_be_elsewhere(tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    assert _sample(tmp_path, GOOD | {"image": "1.png"}, root).images == _files(root / "1.png")
    assert _sample(tmp_path, GOOD | {"image": str(root / "1.png")}, root).images == _files(root / "1.png")
    assert _sample(tmp_path, GOOD).images == ()


@pytest.mark.parametrize(
    "image", ["../secret.png", "a/../../secret.png", "/etc/passwd", "https://example.org/1.png", "file:///etc/passwd"]
)
def test_images_outside_of_the_folder_are_refused(tmp_path: Path, image: str) -> None:
    bad = _one(tmp_path, GOOD | {"image": image})
    assert isinstance(bad, Quarantined)
    assert (bad.kind, bad.id) == ("image_path", "7")
    assert image in bad.reason


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("text", "found a text"),
        ({"id": "x"}, "`conversations` is missing"),
        ({"conversations": []}, "`conversations` is a list"),
        ({"conversations": [{"from": "human"}]}, "`conversations[0]` has no text `value`"),
        ({"conversations": [{"from": "robot", "value": ""}]}, "'robot', expected one of gpt, human, system"),
        ({"conversations": [{"from": "human", "value": "\ud800"}]}, "not valid Unicode"),
        (GOOD | {"image": 3}, "`image` is a int"),
        (GOOD | {"image": [""]}, "`image` is a list"),
    ],
)
def test_a_malformed_sample_is_set_aside_with_the_reason(tmp_path: Path, entry: object, reason: str) -> None:
    bad = _one(tmp_path, entry)
    assert isinstance(bad, Quarantined)
    assert bad.kind == "malformed"
    assert reason in bad.reason


def test_json_lines_are_read_line_by_line_and_a_broken_line_is_one_bad_sample(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    unusual = json.dumps(GOOD | {"id": "b\u2028c"}, ensure_ascii=False)  # a line separator, but not of JSON lines
    path.write_text(f"{json.dumps(GOOD)}\n\n{{broken\n{unusual}\n")
    first, bad, last = read(path)
    assert isinstance(first, Sample)
    assert isinstance(bad, Quarantined)
    assert "line 3 is not valid JSON" in bad.reason
    assert isinstance(last, Sample)
    assert (last.id, last.index) == ("b\u2028c", 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[\n{"id": 1},\n]', r"data\.json:3: not valid JSON"),
        (b'{"id": 1}', r"data\.json:1: found an object at the top, expected a list"),
        (b"\xff\xfe", r"data\.json: cannot be read as UTF-8"),
        (b"[" * 100_000, r"data\.json:1: not valid JSON: nested too deeply"),
    ],
)
def test_an_unreadable_file_is_refused_with_its_place(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "data.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read(tmp_path / "data.json"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json: no such file"):
        list(read(tmp_path / "none.json"))


def test_quarantine_is_written_one_object_a_line(tmp_path: Path) -> None:
    entries = [Quarantined("f.json", 3, "ä\n", "truncated", "why"), Quarantined("f.json", 4, "\ud800", "x", "y")]
    write_quarantine(tmp_path / "q.jsonl", entries)
    lines = (tmp_path / "q.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["ä\n", "\ud800"]
    assert json.loads(lines[0]) == {"source": "f.json", "index": 3, "id": "ä\n", "kind": "truncated", "reason": "why"}
