import base64
import json
import re
import unicodedata
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.data import ChatTokenizer, Quarantined, Sample, write_quarantine
from mmtrain.data.formats import allowed_folder as folder
from mmtrain.data.formats.bad_sample import BadSampleError
from mmtrain.data.formats.read_source import list_shards, read_samples
from mmtrain.data.formats.sample import find_unusable, written_text
from mmtrain.data.media import nearest_name
from mmtrain.data.media.images import read_image_size
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia, Media
from mmtrain.errors import DataError
from mmtrain.recipe.settings.data_settings import LimitSettings, SourceSettings
from tests.data.archives import png

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
    assert written_text(sample.answer) == "<image> is text here"


def test_a_single_image_is_a_plain_text_and_image_root_moves_it(tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    root.mkdir()
    assert _sample(tmp_path, GOOD | {"image": "1.png"}, root).images == _files(root / "1.png")
    assert _sample(tmp_path, GOOD | {"image": str(root / "1.png")}, root).images == _files(root / "1.png")
    assert _sample(tmp_path, GOOD).images == ()


OUTSIDE = ("../secret.png", "a/../../secret.png", "/etc/passwd", "..", ".", "a\0b")
URLS = ("https://example.org/1.png", "file:///etc/passwd", "FILE:/etc/passwd", "DATA:,AAAA", "s3://b/k")


@pytest.mark.parametrize(("key", "kind"), [("image", "image"), ("audios", "audio"), ("videos", "video")])
def test_media_outside_of_the_folder_are_rejected(tmp_path: Path, key: str, kind: str) -> None:
    for path, why in (*((p, "path") for p in OUTSIDE), *((p, "url") for p in URLS)):
        bad = _one(tmp_path, GOOD | {key: [path]})
        assert isinstance(bad, Quarantined), path
        assert (bad.kind, bad.id) == (f"{kind}_{why}", "7")
        assert repr(path) in bad.reason


def test_the_folder_itself_is_no_file_in_it(tmp_path: Path) -> None:
    for path in (".", str(tmp_path)):
        bad = _one(tmp_path, GOOD | {"image": path})
        assert isinstance(bad, Quarantined)
        assert (bad.kind, bad.reason) == ("image_path", f"{path!r} is the image folder itself; name a file in it")


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


@pytest.mark.parametrize("name", ["pictures/K\N{LATIN SMALL LETTER O WITH DIAERESIS}ln 1.png", "a b/100%.png"])
def test_a_file_is_found_under_other_spellings_of_its_name(tmp_path: Path, name: str) -> None:
    existing = tmp_path / unicodedata.normalize("NFD", name)
    existing.parent.mkdir()
    existing.write_bytes(png())
    for written in (name, unicodedata.normalize("NFD", name), quote(name), quote(name, safe="").replace("%2F", "/")):
        sample = _sample(tmp_path, GOOD | {"image": written})
        assert sample.images == _files(existing), written
    (tmp_path / quote(name).rpartition("/")[2]).write_bytes(png())
    assert _sample(tmp_path, GOOD | {"image": quote(name).rpartition("/")[2]}).images != _files(existing), "as written"


def test_no_spelling_leads_outside(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.png").write_bytes(png())
    (inside / "link \N{LATIN SMALL LETTER O WITH DIAERESIS}.png").symlink_to(tmp_path / "secret.png")
    for path in ("%2e%2e/secret.png", "..%2fsecret.png", "a%00b", "link%20%C3%B6.png"):
        result = _one(inside, GOOD | {"image": path})
        assert isinstance(result, Sample)
        assert result.images == _files(inside / path), "nothing is found"


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("pictures/Red.PNG", "; did you mean 'red.png' in place of 'Red.PNG'?"),
        ("pictures/red.jpg", "; did you mean 'red.png' in place of 'red.jpg'?"),
        ("pictures/reed.png", "; did you mean 'red.png' in place of 'reed.png'?"),
        ("pictures/12345.png", "no such file"),
        ("picture/sub/red.png", "; did you mean 'pictures' in place of 'picture'?"),
    ],
)
def test_a_missing_file_is_reported_with_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, suggestion: str
) -> None:
    monkeypatch.setattr(nearest_name, "_num_suggestions", 0)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(png())
    (media,) = _sample(tmp_path, GOOD | {"image": path}).images
    with pytest.raises(BadMediaError, match="no such file") as bad:
        read_image_size(media, 1000)
    assert bad.value.kind == "missing_image"
    assert str(bad.value).endswith(suggestion)
    monkeypatch.setattr(nearest_name, "_num_suggestions", 1000)
    with pytest.raises(BadMediaError, match=r"no such file$"):
        read_image_size(media, 1000)


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "pictures.png").mkdir()
    (media,) = _sample(tmp_path, GOOD | {"image": "pictures.png"}).images
    with pytest.raises(BadMediaError, match=r"pictures\.png: a folder, not a file$") as bad:
        read_image_size(media, 1000)
    assert bad.value.kind == "not_an_image"
    (tmp_path / "shards" / "x.json").mkdir(parents=True)
    for source in ("shards", "shards/*.json"):
        with pytest.raises(DataError, match=r"x\.json: a folder, where .* must name files"):
            _read(tmp_path / source)
    (tmp_path / "y.json").write_text("[]")
    with pytest.raises(DataError, match=r"image_root is .*y\.json, a file; expected the folder"):
        _read(tmp_path / "y.json", tmp_path / "y.json")


def test_media_without_a_mark_are_rejected_or_put_in_front(tmp_path: Path) -> None:
    turns = [{"from": role, "value": "x"} for role in ("system", "human", "gpt")]
    entry = {"conversations": turns, "image": ["a.png", "b.png"], "video": "c.mp4"}
    some = {"conversations": [{"from": "human", "value": "<image>"}, turns[2]], "image": ["a.png", "b.png"]}
    path = tmp_path / "data.json"
    path.write_text(json.dumps([entry, some, GOOD]))
    rejected = _read(path)[0]
    assert isinstance(rejected, Sample)
    unusable = find_unusable(rejected, ("image", "video"))
    assert unusable is not None
    assert unusable.kind == "image_count"
    assert "unmarked_media: front" in unusable.reason
    source = SourceSettings(path=path, unmarked_media="front")
    first, second, third = (s for s in read_samples(source, LimitSettings()) if isinstance(s, Sample))
    assert [turn.text for turn in first.turns] == ["x", "<image><image><video>\nx", "x"]
    assert find_unusable(first, ("image", "video")) is None
    unusable = find_unusable(second, ("image", "video"))
    assert unusable is not None
    assert "unmarked_media" not in unusable.reason, "it has a mark, and the setting would not help"
    assert third == _read(path)[2]


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


def test_a_part_may_name_its_file_by_path_or_url(tmp_path: Path) -> None:
    parts = [{"type": "image", "path": "a.png"}, {"type": "image", "url": "b.png"}, {"type": "image", "image": "c.png"}]
    parts.append({"type": "image", "image": {"path": "d.png"}})
    sample = _sample(tmp_path, _talk(parts))
    assert sample.images == _files(*(tmp_path / f"{name}.png" for name in "abcd"))
    assert sample.turns[0].text == 4 * "<image>"


def test_roles_may_be_written_in_other_cases(tmp_path: Path) -> None:
    turns = [{"from": role, "value": "x"} for role in ("System", "HUMAN", "GPT", " User ", "Assistant")]
    sample = _sample(tmp_path, {"conversations": turns})
    assert [turn.role for turn in sample.turns] == ["system", "user", "assistant", "user", "assistant"]


def _data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _opened(media: Media) -> bytes:
    with media.open() as file:
        return file.read()


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
@pytest.mark.parametrize("slash", ["/", "\\/", "\\u002f"])
def test_data_urls_are_read_from_where_they_are(tmp_path: Path, name: str, slash: str) -> None:
    contents = [bytes(range(n, n + 200)) for n in range(4)]
    assert all(b"/" in base64.b64encode(content) for content in contents)
    url = {"type": "image_url", "image_url": {"url": _data_url(contents[0])}}
    entries = [
        GOOD,
        _talk(
            [url, {"type": "text", "text": 'a "data:image/png;base64,AAAA" in a text \\'}, url], id="\N{GRINNING FACE}"
        ),
        _talk("<image><image><audio>", images=[_data_url(contents[1]), "a.png"], audio=_data_url(contents[2], "")),
        _talk([{"type": "video", "video": _data_url(contents[3], "Video/MP4")}]),
    ]
    lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
    lines = [line.replace("/", slash) for line in lines]
    (tmp_path / name).write_text("\n".join(lines) if name == "data.jsonl" else f"[{', '.join(lines)}]")
    _, first, second, third = _read(tmp_path / name)
    assert isinstance(first, Sample)
    assert isinstance(second, Sample)
    assert isinstance(third, Sample)
    assert [_opened(image) for image in first.images] == [contents[0]] * 2
    assert _opened(second.images[0]) == contents[1]
    assert second.images[1:] == _files(tmp_path / "a.png")
    assert [_opened(clip) for clip in second.clips] == [contents[2]]
    assert [_opened(video) for video in third.videos] == [contents[3]]
    assert first.turns[0].text == '<image>a "data:image/png;base64,AAAA" in a text \\<image>'


def test_base64_may_be_wrapped_and_lack_its_padding(tmp_path: Path) -> None:
    for written in ("aGVs\nbG8h\r\nISE=", "aGVsbG8hISE", "aGVsbG8hISE%3D"):
        sample = _sample(tmp_path, _talk("<image>", image=f"data:image/png;base64,{written}"))
        assert _opened(sample.images[0]) == b"hello!!!"
    damaged = _sample(tmp_path, _talk("<image>", image="data:image/png;base64,$$$$")).images[0]
    with pytest.raises(OSError, match="a data URL whose base64 cannot be read"):
        damaged.open()


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
        (_talk([{"type": "image_url", "image_url": {"url": "data:image/png,AA"}}]), "image_url", "without base64"),
        (
            _talk("<image>", image="data:audio/wav;base64,AA"),
            "image_url",
            "is a data URL of audio/wav, expected data:i",
        ),
        (_talk([{"type": "input_audio", "input_audio": {"data": "AA"}}]), "audio_url", "write it to a file"),
        (_talk([{"type": "tool"}]), "malformed", "a part of type 'tool', expected one of text, image"),
        (_talk("x", image="a.png", images=["b.png"]), "malformed", "both `image` and `images`"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "malformed", "'robot', expected one of assistant, bard"),
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
        (_answer("yes", weight=0.5), "target", "has `weight` 0.5, allowed: true or false, 1 or 0"),
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
    for pattern, message in (("z*.json", "no file matches"), ("none", "none: no such file or folder")):
        with pytest.raises(DataError, match=message):
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
        ({"id": "x"}, "found the keys `id`, allowed: `conversations` or `messages`"),
        ({"conversations": None}, "`conversations` is missing"),
        ({"conversations": []}, "`conversations` is an empty list"),
        ({"conversations": [{"from": "human"}]}, "`conversations`: message 1 of 1 has no text `value`"),
        (
            {"conversations": [{"from": "robot", "value": ""}]},
            "'robot', expected one of assistant, bard, bing, bot, chatgpt, developer, function",
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
