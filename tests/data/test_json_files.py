import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.data import ChatTokenizer, Quarantined, Sample, write_quarantine
from mmtrain.data.formats import allowed_folder as folder
from mmtrain.data.formats.conversation import BadSampleError
from mmtrain.data.formats.read_source import list_shards, read_samples
from mmtrain.data.formats.sample import find_unusable
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.errors import DataError
from mmtrain.recipe.data_settings import LimitSettings, SourceSettings

GOOD = {"id": 7, "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}


def _read(path: Path, root: Path | None = None) -> list[Sample | Quarantined]:
    return list(read_samples(SourceSettings(path=path, image_root=root), LimitSettings()))


def _files(*paths: Path) -> tuple[FileMedia, ...]:
    return tuple(FileMedia(str(path)) for path in paths)


def _one(tmp_path: Path, entry: object, root: Path | None = None) -> Sample | Quarantined:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([entry]))
    (result,) = _read(path, root)
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
    assert (sample.id, sample.index, sample.template) == ("a", 0, "t")
    assert find_unusable(sample, ("image", "video")) is None, "a mark in an answer is text"
    assert sample.answer == "<image> is text here"


def test_a_single_image_is_a_plain_text_and_image_root_moves_it(tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    assert _sample(tmp_path, GOOD | {"image": "1.png"}, root).images == _files(root / "1.png")
    assert _sample(tmp_path, GOOD | {"image": str(root / "1.png")}, root).images == _files(root / "1.png")
    assert _sample(tmp_path, GOOD).images == ()


OUTSIDE = ("../secret.png", "a/../../secret.png", "/etc/passwd", "..", ".", "a\0b")
URLS = ("https://example.org/1.png", "file:///etc/passwd", "FILE:/etc/passwd", "data:image/png;base64,AAAA", "s3://b/k")


@pytest.mark.parametrize(("key", "kind"), [("image", "image"), ("audios", "audio"), ("videos", "video")])
def test_media_outside_of_the_folder_are_rejected(tmp_path: Path, key: str, kind: str) -> None:
    for path, why in (*((p, "path") for p in OUTSIDE), *((p, "url") for p in URLS)):
        bad = _one(tmp_path, GOOD | {key: [path]})
        assert isinstance(bad, Quarantined), path
        assert (bad.kind, bad.id) == (f"{kind}_{why}", "7")
        assert repr(path) in bad.reason


def test_links_must_not_lead_out_unless_the_root_holds_link_and_target(tmp_path: Path) -> None:
    inside, outside = tmp_path / "set", tmp_path / "elsewhere"
    inside.mkdir()
    outside.mkdir()
    (outside / "a.png").write_text("secret")
    (inside / "folder").symlink_to(outside)
    (inside / "a.png").symlink_to(outside / "a.png")
    (inside / "own.png").symlink_to(inside / "data.json")
    for path in ("folder/a.png", "a.png"):
        bad = _one(inside, GOOD | {"image": path})
        assert isinstance(bad, Quarantined)
        assert bad.kind == "image_path"
        assert "by a symbolic link; set the source's image_root" in bad.reason
    assert _sample(inside, GOOD | {"image": "own.png"}).images == _files(inside / "own.png")
    assert _sample(inside, GOOD | {"image": "set/folder/a.png"}, tmp_path).images == _files(inside / "folder" / "a.png")
    (tmp_path / "link").symlink_to(inside)  # the folder itself may be a link
    assert isinstance(_one(tmp_path / "link", GOOD | {"image": "own.png"}), Sample)


def _talk(content: object, **media: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}], **media}


def _answer(content: object, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "assistant", "content": content, **more}]}


SYSTEM = {"messages": [{"role": "system", "content": "Be brief."}, *_answer("yes")["messages"]]}  # type: ignore[misc]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_text_beside_the_turns_becomes_the_first_turn(tmp_path: Path, role: str) -> None:
    talk = _sample(tmp_path, _talk("hi", system="Be brief."))
    assert [(t.role, t.text) for t in talk.turns] == [("system", "Be brief."), ("user", "hi"), ("assistant", "yes")]
    for system in ("Be brief.", "", None):
        turns = [{"role": role, "content": "Be brief."}, {"role": "assistant", "content": "yes"}]
        same = _sample(tmp_path, {"messages": turns, "system": system})
        assert [t.text for t in same.turns] == ["Be brief.", "yes"], "once"
    assert len(_sample(tmp_path, GOOD | {"system": ""}).turns) == 2


@pytest.mark.parametrize("tool", ["tool", "function", "observation", "function_response"])
def test_tool_output_is_context_and_tool_calls_are_learned(tmp_path: Path, tokenizer_path: Path, tool: str) -> None:
    turns = [
        {"from": "human", "value": "What is 1 + 2?"},
        {"from": "function_call", "value": "add"},
        {"from": tool, "value": "3"},
        {"from": "gpt", "value": "It is 3"},
    ]
    sample = _sample(tmp_path, {"conversations": turns, "tools": "[]"})
    assert [t.role for t in sample.turns] == ["user", "assistant", "tool", "assistant"]
    tokenizer = ChatTokenizer.load(tokenizer_path)
    labels = tokenizer.encode(sample, {}).labels
    learned = tokenizer.decode(labels[labels >= 0])
    assert learned == "addIt is 3"


def test_an_image_from_a_tool_is_like_any_other(tmp_path: Path) -> None:
    shown = {"role": "tool", "tool_call_id": "1", "content": [{"type": "image", "image": "screen.png"}]}
    sample = _sample(tmp_path, {"messages": [shown, {"role": "assistant", "content": "ok", "tool_calls": None}]})
    assert sample.images == _files(tmp_path / "screen.png")
    assert find_unusable(sample, ("image", "video")) is None


def test_messages_with_lists_of_media(tmp_path: Path) -> None:
    media = {"images": ["a.png", "b.png"], "audios": ["c.mp3"], "videos": "d.mp4"}
    sample = _sample(tmp_path, _talk("<image><video>what?<audio><image>", **media))
    assert [t.role for t in sample.turns] == ["user", "assistant"]
    assert sample.images == _files(tmp_path / "a.png", tmp_path / "b.png")
    assert sample.clips == _files(tmp_path / "c.mp3")
    (video,) = _files(tmp_path / "d.mp4")
    first, second = sample.images
    assert sample.media_of(("image", "video")) == (("image", first), ("video", video), ("image", second))


def test_messages_of_parts(tmp_path: Path) -> None:
    parts = [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": "b.png"}},
        {"type": "audio", "audio": "c.wav"},
        {"type": "video", "video": "d.mp4"},
    ]
    sample = _sample(tmp_path, _talk(parts))
    assert sample.turns[0].text == "<image>and<image><audio><video>"
    assert sample.images == _files(tmp_path / "a.png", tmp_path / "b.png")
    assert (sample.clips, sample.videos) == (_files(tmp_path / "c.wav"), _files(tmp_path / "d.mp4"))
    listed = _sample(tmp_path, _talk([{"type": "image"}, {"type": "text", "text": "?"}], images=["a.png"]))
    assert (listed.turns[0].text, listed.images) == ("<image>?", _files(tmp_path / "a.png"))


@pytest.mark.parametrize(
    ("entry", "kind", "reason"),
    [
        (_talk([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]), "image_url", "is a URL"),
        (_talk([{"type": "input_audio", "input_audio": {"data": "AA"}}]), "audio_url", "write it to a file"),
        (_talk([{"type": "tool"}]), "malformed", "a part of type 'tool', expected one of text, image"),
        (_talk("x", image="a.png", images=["b.png"]), "malformed", "both `image` and `images`"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "malformed", "'bot', expected one of assistant, developer"),
        (_talk("x", system=["Be brief."]), "malformed", "`system` is a list, expected a text"),
        (_talk("x", system="\udc00"), "malformed", "`system` is a text that is not valid Unicode"),
        ({**SYSTEM, "system": "Be long."}, "malformed", "both a `system` text and a system turn"),
        (_talk("x", tools={"type": "function"}), "tools", "it has `tools` that are not a list of objects"),
        (_talk("x", functions='[{"name": "f"]'), "tools", "it has `functions` that are not valid JSON: "),
        (_talk("x", tools=[{"name": "\ud800"}]), "tools", "it has tools or calls that are not valid JSON: "),
        (_answer(None, tool_calls=[{"id": "1"}]), "tools", "message 1 of 1 calls a tool without a `name`"),
        (_answer(None, tool_calls=["f"]), "tools", "message 1 of 1 has `tool_calls` that are not a list of objects"),
        (
            _answer("f", function_call={"name": "f", "arguments": "[1]"}),
            "tools",
            "calls f with `arguments` that are not",
        ),
        (_answer("yes", weight=0), "malformed", "has `weight` 0"),
    ],
)
def test_messages_that_are_rejected(tmp_path: Path, entry: object, kind: str, reason: str) -> None:
    bad = _one(tmp_path, entry)
    assert isinstance(bad, Quarantined)
    assert bad.kind == kind
    assert reason in bad.reason


def test_a_set_format_requires_its_own_key(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([_talk("hi"), GOOD]))
    assert all(isinstance(s, Sample) for s in _read(path))
    kinds = {}
    for form in ("llava", "messages"):
        samples = read_samples(SourceSettings(path=path, format=form), LimitSettings())
        kinds[form] = [s.kind if isinstance(s, Quarantined) else "good" for s in samples]
    assert kinds == {"llava": ["malformed", "good"], "messages": ["good", "malformed"]}


@pytest.mark.parametrize("bomb", [b"[" * 100_000, b'{"id": ' + b"9" * 5000 + b"}", b'{"a":' * 100_000, b"\xff{}"])
def test_deeply_nested_json_costs_only_its_line(tmp_path: Path, bomb: bytes) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + bomb + b"\n" + json.dumps(GOOD).encode())
    first, bad, last = _read(path)
    assert isinstance(first, Sample)
    assert isinstance(last, Sample)
    assert isinstance(bad, Quarantined)
    assert (bad.kind, bad.index) == ("malformed", 1)
    assert "line 2 is not valid JSON" in bad.reason


def test_sources_may_be_folders_braces_and_wildcards(tmp_path: Path) -> None:
    for name in ("x-08.json", "x-09.json", "x-10.json", "y.jsonl"):
        (tmp_path / name).write_text("[]")
    names = {
        "x-{08..10}.json": ["x-08.json", "x-09.json", "x-10.json"],
        "{y.jsonl,x-08.json}": ["y.jsonl", "x-08.json"],
        "x-0?.json": ["x-08.json", "x-09.json"],
        "*.json": ["x-08.json", "x-09.json", "x-10.json"],
        ".": ["x-08.json", "x-09.json", "x-10.json", "y.jsonl"],
    }
    for pattern, expected in names.items():
        assert [file.name for file in list_shards(tmp_path / pattern)] == expected, pattern
    for pattern in ("z*.json", "none"):
        with pytest.raises(DataError, match=r"no file matches|no such file|cannot be guessed"):
            _read(tmp_path / pattern)


@pytest.mark.parametrize(
    ("name", "message"),
    [("data.tar.gz", "cannot be read at random positions; unpack it"), ("data.txt", r"found \.txt, expected")],
)
def test_an_unknown_format_is_reported(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(DataError, match=message):
        _read(tmp_path / name)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("text", "found a text"),
        ({"id": "x"}, "`conversations` is missing"),
        ({"conversations": []}, "`conversations` is an empty list"),
        ({"conversations": [{"from": "human"}]}, "`conversations`: message 1 of 1 has no text `value`"),
        (
            {"conversations": [{"from": "robot", "value": ""}]},
            "'robot', expected one of assistant, developer, function",
        ),
        ({"conversations": [{"from": "human", "value": "\ud800"}]}, "not valid Unicode"),
        (GOOD | {"image": 3}, "`image` is or holds a int"),
        (GOOD | {"image": [""]}, "`image` is or holds an empty path"),
    ],
)
def test_a_malformed_sample_is_quarantined_with_the_reason(tmp_path: Path, entry: object, reason: str) -> None:
    bad = _one(tmp_path, entry)
    assert isinstance(bad, Quarantined)
    assert bad.kind == "malformed"
    assert reason in bad.reason


def test_json_lines_are_read_line_by_line_and_a_broken_line_is_one_bad_sample(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    unusual = json.dumps(GOOD | {"id": "b\u2028c"}, ensure_ascii=False)  # a line separator, but not of JSON lines
    path.write_text(f"{json.dumps(GOOD)}\n\n{{broken\n{unusual}\n")
    first, bad, last = _read(path)
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
def test_an_unreadable_file_is_rejected_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "data.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        _read(tmp_path / "data.json")


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json: no such file"):
        _read(tmp_path / "none.json")


def test_quarantine_has_one_object_per_line(tmp_path: Path) -> None:
    entries = [Quarantined("f.json", 3, "ä\n", "truncated", "why"), Quarantined("f.json", 4, "\ud800", "x", "y")]
    write_quarantine(tmp_path / "q.jsonl", entries)
    lines = (tmp_path / "q.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["ä\n", "\ud800"]
    assert json.loads(lines[0]) == {"source": "f.json", "index": 3, "id": "ä\n", "kind": "truncated", "reason": "why"}


@given(st.text("ab./:\\ \0\n~", max_size=12))
def test_the_shortcut_for_plain_paths_changes_nothing(path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        quick = _looked_up(path)
        patch.setattr(folder, "_PLAIN_PATH", re.compile(r"(?!)"))
        assert quick == _looked_up(path)


def _looked_up(path: str) -> object:
    try:
        return folder.AllowedFolder(Path("/nowhere/at all")).file("image", path)
    except BadSampleError as bad:
        return bad.kind, bad.reason
