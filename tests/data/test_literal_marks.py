"""Marks of media, and texts that spell one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmtrain.data import ChatTokenizer, Quarantined, Sample
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import find_unusable, written_text
from mmtrain.data.index.data_check import check_sources
from mmtrain.data.index.sample_table import content_json, sample_from_record, sample_record
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX
from mmtrain.recipe.settings.data_settings import LimitSettings, SourceSettings
from tests.data.archives import parquet, png, tar
from tests.data.model_folders import FAMILIES
from tests.data.test_template_tokenizer import Case, judged_case

TEXT = "What does <image> mean, and <video> and <audio>?"
ANSWER = {"role": "assistant", "content": "A place of <image>."}


def image_part(**content: Any) -> dict[str, Any]:
    return {"type": "image", **content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def pair(question: str) -> dict[str, str]:
    return {"user": question, "assistant": "a"}


def read(path: Path, entry: dict[str, Any]) -> Sample:
    for name in ("a.png", "b.png", "c.png"):
        (path / name).write_bytes(png())
    (path / "data.json").write_text(json.dumps([entry]))
    [sample] = read_samples(SourceSettings(path=path / "data.json"), LimitSettings())
    assert isinstance(sample, Sample), sample
    return sample


def asked(*content: Any, answer: Any = ANSWER, **entry: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": part} for part in content]
    between = [{"role": "assistant", "content": "yes"}] * (len(turns) - 1)
    messages = [turn for pair in zip(turns, [*between, answer], strict=True) for turn in pair]
    return {"messages": messages, **entry}


def names(sample: Sample) -> list[str]:
    return [Path(str(image)).name for image in sample.images]


A, B, C = (image_part(image=f"{name}.png") for name in "abc")
LISTED = image_part()


@pytest.mark.parametrize(
    ("entry", "texts", "images"),
    [
        (asked(TEXT), [TEXT], []),
        (asked(TEXT, image=None, images=[]), [TEXT], []),
        (asked(TEXT, images=None), [TEXT], []),
        (asked([text_part(TEXT)]), [TEXT], []),
        (asked([A, text_part(TEXT)]), [TEXT], ["a.png"]),
        (asked([text_part(TEXT), LISTED], images=["a.png"]), [TEXT], ["a.png"]),
        (asked([A], TEXT), ["", TEXT], ["a.png"]),
        (asked([image_part(path="a.png", bytes=None), text_part(TEXT)]), [TEXT], ["a.png"]),
        (asked([image_part(image={"path": "a.png", "bytes": None}), text_part(TEXT)]), [TEXT], ["a.png"]),
        (asked([image_part(image_url={"url": "a.png"}), text_part(TEXT)]), [TEXT], ["a.png"]),
        (asked("<image>one", images=[{"path": "a.png", "bytes": None}]), ["one"], ["a.png"]),
        (asked("<image>one", image={"path": "a.png"}), ["one"], ["a.png"]),
        # Those of the list stand at the marks, wherever those among the parts are.
        (asked([A, text_part("x")], "<image>y", images=["b.png"]), ["x", "y"], ["a.png", "b.png"]),
        (asked("<image>y", [A, LISTED], images=["b.png", "c.png"]), ["y", ""], ["b.png", "a.png", "c.png"]),
        ({"texts": [pair(f"{TEXT} <image>")], "images": ["a.png"]}, [f"\n{TEXT} <image>"], ["a.png"]),
        ({"texts": [pair("<image>x")], "images": ["a.png"]}, ["x"], ["a.png"]),
    ],
)  # fmt: skip
def test_marks_are_told_from_texts_by_structure(
    tmp_path: Path, entry: dict[str, Any], texts: list[str], images: list[str]
) -> None:
    sample = read(tmp_path, entry)
    assert find_unusable(sample, ("image", "video", "audio")) is None
    assert [written_text(t.text.replace("<image>", "")) for t in sample.turns if t.role == "user"] == texts
    assert names(sample) == images
    assert written_text(sample.answer) in ("A place of <image>.", "a")
    assert sample_from_record(sample_record(sample, content_json(sample))) == sample


@pytest.mark.parametrize("role", ["system", "tool", "assistant"])
def test_other_turns_may_spell_marks_too(tmp_path: Path, role: str) -> None:
    entry: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": "<image>look"}, {"role": "assistant", "content": "seen"},
            {"role": role, "content": [text_part(TEXT)]}, {"role": "user", "content": "ok?"}, ANSWER,
        ],
        "images": ["a.png"],
    }  # fmt: skip
    if role == "tool":  # in whose turns pictures may be shown, so that only parts tell them from texts
        entry["messages"][0] = {"role": "user", "content": [A]}
        del entry["images"]
    sample = read(tmp_path, entry)
    assert find_unusable(sample, ("image", "video", "audio")) is None
    assert (names(sample), sample.target_images) == (["a.png"], ())
    assert written_text(sample.turns[2].text) == TEXT


def test_an_image_to_draw_stands_beside_a_mark_that_is_text(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": [text_part("Instead of <image>: "), A]}
    sample = read(tmp_path, asked(TEXT, answer=answer))
    assert (len(sample.images), len(sample.target_images)) == (0, 1)
    assert sample.answer.endswith("<image>")
    assert written_text(sample.answer) == "Instead of <image>: <image>"


def test_texts_of_documents_may_spell_marks(tmp_path: Path) -> None:
    sample = read(tmp_path, {"texts": ["An <image>:", None, "end"], "images": [None, "a.png", None]})
    assert len(sample.target_images) == 1
    assert written_text(sample.answer) == "An <image>:\n<image>\nend"


@pytest.mark.parametrize("marks", ["<image><image>", "no mark"])
def test_too_many_or_too_few_marks_are_still_miscounted(tmp_path: Path, marks: str) -> None:
    entry = asked(marks, answer={"role": "assistant", "content": "a"}, images=["a.png"])
    unusable = find_unusable(read(tmp_path, entry), ())
    assert unusable is not None
    assert unusable.kind == "image_count"


def test_a_text_with_our_own_character_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps([asked("\U0010fdffimage> x")]))
    [bad] = read_samples(SourceSettings(path=tmp_path / "data.json"), LimitSettings())
    assert isinstance(bad, Quarantined)
    assert "U+10FDFF" in bad.reason


@pytest.mark.parametrize("key", ["base64", "data", "source", "bytes"])
def test_a_part_that_holds_its_medium_otherwise_is_named(tmp_path: Path, key: str) -> None:
    (tmp_path / "data.json").write_text(json.dumps([asked([image_part(**{key: "iVBORw0K"}), text_part("x")])]))
    [bad] = read_samples(SourceSettings(path=tmp_path / "data.json"), LimitSettings())
    assert isinstance(bad, Quarantined)
    assert (bad.kind, f"`{key}`" in bad.reason) == ("image_url", True)


def test_structs_of_parquet_files_hold_bytes_in_parts(tmp_path: Path) -> None:
    images = [png("red"), png("blue")]
    parts: list[dict[str, Any]] = [
        {"type": "image", "text": None, "image": {"bytes": images[0], "path": "gone.png"}},
        {"type": "text", "text": TEXT, "image": {"bytes": None, "path": None}},
        {"type": "image", "text": None, "image": {"bytes": images[1], "path": None}},
    ]
    content = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{**parts[1], "text": "so"}]}]
    parquet(tmp_path / "a.parquet", {"messages": [content]})
    [sample] = read_samples(SourceSettings(path=tmp_path / "a.parquet"), LimitSettings())
    assert isinstance(sample, Sample), sample
    assert find_unusable(sample, ("image",)) is None
    assert [image.open().read() for image in sample.images] == images
    assert sample_from_record(sample_record(sample, content_json(sample))) == sample
    limited = read_samples(SourceSettings(path=tmp_path / "a.parquet"), LimitSettings(max_member_bytes=20))
    assert [entry.kind for entry in limited if isinstance(entry, Quarantined)] == ["parquet_cell_size"]


def test_a_shard_with_a_text_that_spells_a_mark(tmp_path: Path) -> None:
    entry = json.dumps(asked(TEXT)).encode()
    tar(tmp_path / "s.tar", {"1.json": entry, "2.json": entry, "2.png": png()})
    plain, miscounted = read_samples(SourceSettings(path=tmp_path / "s.tar"), LimitSettings())
    assert isinstance(plain, Sample)
    assert isinstance(miscounted, Sample)
    assert find_unusable(plain, ("image",)) is None
    assert miscounted.images
    assert find_unusable(miscounted, ("image",)) is None, "one mark, one picture"


def test_the_check_says_how_many_there_are(tmp_path: Path) -> None:
    read(tmp_path, asked(TEXT))
    said: list[str] = []
    assert check_sources([SourceSettings(path=tmp_path / "data.json")], notify=said.append).passed
    assert any("stay text: <audio> in 1 sample, <image> in 1 sample, <video> in 1 sample" in line for line in said)


@pytest.fixture(scope="module", params=["qwen2_vl", "llava", "internvl", "qwen2"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from judged_case(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


def test_literal_marks_are_encoded_as_transformers_encodes_the_text(case: Case, tmp_path: Path) -> None:
    """Where the mark is a token of the tokenizer, transformers would take it for a medium: there it is text."""
    sample = read(tmp_path, asked(TEXT))
    as_parts = bool(case.family.media) and "message.content is string" not in case.family.template
    messages: list[dict[str, Any]] = [{"role": turn.role, "content": written_text(turn.text)} for turn in sample.turns]
    if as_parts:
        messages = [{**message, "content": [text_part(message["content"])]} for message in messages]
    encoded = case.tokenizer.encode(sample, {})
    features = [token for tokens in case.tokenizer.item_ids.values() for token in tokens]
    assert not np.isin(encoded.ids, features).any()
    assert case.tokenizer.decode(encoded.ids).count("<image>") == 2
    targets = encoded.labels[encoded.labels != IGNORE_INDEX]
    assert "A place of <image>." in case.tokenizer.decode(targets)
    assert case.tokenizer.length_counter(1000)(sample, {}) == (len(encoded.ids), len(targets))
    if not {"<image>", "<video>"} & {*case.family.special}:
        assert encoded.ids.tolist() == case.judge.apply_chat_template(messages, return_dict=False)


def test_own_format_writes_them_as_text(tokenizer_path: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(tokenizer_path)
    sample = read(tmp_path, asked([A, text_part(TEXT)]))
    encoded = tokenizer.encode(sample, {"vision": [3]})
    assert tokenizer.decode(encoded.ids).startswith(TEXT)
    assert np.isin(encoded.ids, tokenizer.item_ids["vision"]).sum() == 3
    assert tokenizer.length_counter(1000)(sample, {"vision": [3]})[0] == len(encoded.ids)
