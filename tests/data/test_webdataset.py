import base64
import json
from pathlib import Path

import pytest

from mmtrain.data import Quarantined, Sample
from mmtrain.data.formats.read_source import list_shards, read_samples
from mmtrain.data.media.media_bytes import TarMember
from mmtrain.errors import DataError
from mmtrain.recipe.settings.data_settings import LimitSettings, SourceSettings
from tests.data.archives import png, tar, wav

ANSWER = {"role": "assistant", "content": "yes"}


def _read(path: Path, limits: LimitSettings | None = None) -> list[Sample | Quarantined]:
    return list(read_samples(SourceSettings(path=path), limits or LimitSettings()))


def _json(text: object, **more: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}, ANSWER], **more}).encode()


def _names(sample: Sample | Quarantined) -> tuple[list[str], list[str]]:
    assert isinstance(sample, Sample), sample
    return [m.name for m in sample.images], [m.name for m in sample.clips]


def test_members_of_one_name_are_one_sample(tmp_path: Path) -> None:
    members = {
        "a/1.json": _json("<image>?"),
        "a/1.jpg": png(),
        "2.PNG": png(),
        "2.txt": b" a red square\n",
        "3.json": _json("<audio><image><image>", id="three"),
        "3.1.png": png(),
        "3.0.png": png(),
        "3.wav": wav(),
        "3.pkl": b"never read",
        ".DS_Store": b"",
        "4.json": _json("hi"),
    }
    first, second, third, fourth = _read(tar(tmp_path / "x.tar", members))
    assert _names(first) == (["a/1.jpg"], [])
    assert _names(second) == (["2.PNG"], [])
    assert _names(third) == (["3.1.png", "3.0.png"], ["3.wav"])  # in the order of the archive
    assert _names(fourth) == ([], [])
    assert isinstance(second, Sample)
    assert [(t.role, t.text) for t in second.turns] == [("user", "<image>"), ("assistant", "a red square")]
    assert [(s.id, s.index) for s in (first, second, third, fourth)] == [("a/1", 0), ("2", 1), ("three", 2), ("4", 3)]
    (media,) = second.images
    assert isinstance(media, TarMember)
    with media.open() as file:
        assert file.read() == members["2.PNG"]


def test_an_entry_may_hold_its_media_as_data_urls(tmp_path: Path) -> None:
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    members = {"1.json": _json("hi"), "2.json": _json([{"type": "image_url", "image_url": {"url": url}}])}
    _, sample = _read(tar(tmp_path / "x.tar", members))
    assert isinstance(sample, Sample)
    with sample.images[0].open() as file:
        assert file.read() == png()


def test_an_entry_may_name_its_media(tmp_path: Path) -> None:
    members = {
        "a/1.json": _json("<image><image>", images=["1.right.png", "left.png"]),
        "a/1.left.png": png(),
        "a/1.right.png": png(),
        "2.json": _json([{"type": "image", "image": "2.png"}]),
        "2.png": png(),
        "3.json": _json("<image>", images=["2.png"]),
    }
    first, second, third = _read(tar(tmp_path / "x.tar", members))
    assert _names(first) == (["a/1.right.png", "a/1.left.png"], [])
    assert _names(second) == (["2.png"], [])
    assert isinstance(third, Quarantined)
    assert (third.kind, third.id) == ("missing_image", "3")
    assert "no member '2.png'" in third.reason


def test_an_image_root_is_rejected_for_shards(tmp_path: Path) -> None:
    path = tar(tmp_path / "x.tar", {"1.txt": b"a"})
    with pytest.raises(DataError, match=r"x\.tar: image_root is .* remove image_root"):
        list(read_samples(SourceSettings(path=path, image_root=tmp_path), LimitSettings()))


def test_shards_are_read_in_order(tmp_path: Path) -> None:
    for i in range(3):
        tar(tmp_path / f"x-{i:02}.tar", {f"{i}.json": _json("hi"), f"{i}b.json": _json("hi")})
    samples = _read(tmp_path / "x-{00..02}.tar")
    assert [s.id for s in samples] == ["0", "0b", "1", "1b", "2", "2b"]
    assert [s.index for s in samples] == [0, 1] * 3
    assert {s.source for s in samples} == {str(tmp_path / f"x-{i:02}.tar") for i in range(3)}


@pytest.mark.parametrize(
    ("members", "kind", "reason"),
    [
        ({"1.png": b"x"}, "malformed", "neither a .json nor a .txt"),
        ({"1.json": b"{", "1.png": b"x"}, "malformed", "is not valid JSON"),
        ({"1.json": b"[" * 100_000}, "malformed", "nested too deeply"),
        ({"1.json": b"[]"}, "malformed", "found a list"),
        ({"1.txt": b"\xff\xfe"}, "malformed", "is not UTF-8 text"),
        ({"1.txt": b"a", "1.png": b"x", "1.PNG": b"y"}, "malformed", "two members called '1.PNG'"),
        ({"1.txt": b"a", "1.png": b"x" * 101}, "tar_member_size", "101 bytes, data.limits.max_member_bytes = 100"),
        ({"1.json": _json("x", images=["../2.png"])[:100]}, "missing_image", "no member '../2.png'"),
    ],
)
def test_a_bad_member_costs_only_its_sample(tmp_path: Path, members: dict[str, bytes], kind: str, reason: str) -> None:
    limits = LimitSettings(max_member_bytes=100 if kind == "tar_member_size" else 1 << 20)
    if kind == "missing_image":
        members = {"1.json": _json("x", images=["../2.png"])}
    bad, good = _read(tar(tmp_path / "x.tar", members | {"2.txt": b"fine"}), limits)
    assert isinstance(bad, Quarantined)
    assert (bad.id, bad.index, bad.kind) == ("1", 0, kind)
    assert reason in bad.reason
    assert isinstance(good, Sample)


def test_a_broken_shard_is_reported_after_its_good_samples(tmp_path: Path) -> None:
    content = tar(tmp_path / "x.tar", {"1.txt": b"a", "2.txt": b"b"}).read_bytes()
    (tmp_path / "x.tar").write_bytes(content[:1100])
    good, bad = _read(tmp_path / "x.tar")
    assert isinstance(good, Sample)
    assert isinstance(bad, Quarantined)
    assert (bad.kind, bad.id) == ("tar_broken", str(tmp_path / "x.tar"))


def test_what_macos_puts_into_an_archive_does_not_split_samples(tmp_path: Path) -> None:
    """Its tar writes the attributes of each file in front of it, as a member `._name`."""
    members = {"._.": b"attributes", "./.DS_Store": b"x", "__MACOSX/0001.png": b"x", "PaxHeaders.7/0001.png": b"x"}
    for name in ("0001", "0002"):
        for extension, content in {"json": _json("<image>"), "png": png()}.items():
            members |= {f"./._{name}.{extension}": b"attributes", f"./{name}.{extension}": content}
    samples = _read(tar(tmp_path / "a.tar", members))
    assert [_names(sample)[0] for sample in samples] == [["./0001.png"], ["./0002.png"]]
    assert [sample.index for sample in samples] == [0, 1]


def test_hidden_files_beside_shards_are_no_shards(tmp_path: Path) -> None:
    tar(tmp_path / "a.tar", {"0.txt": b"a", "0.png": png()})
    (tmp_path / "._a.tar").write_bytes(b"attributes")
    for path in (tmp_path, tmp_path / "*.tar", tmp_path / "*"):
        assert list_shards(path) == [tmp_path / "a.tar"]
