"""Layouts of other trainers give the ids and labels of the same samples written as messages."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from mmtrain.data import DataIndex, Quarantined, Sample, build_index
from mmtrain.data.formats.layout_table import LAYOUT_KEYS, MEDIA_KIND_BY_KEY
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.text.load_tokenizer import load_recipe_tokenizer
from mmtrain.errors import DataError
from mmtrain.recipe.settings.data_settings import LimitSettings, SourceSettings
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.recipe.settings.source_columns import ENTRY_KEYS, MEDIA_ENTRY_KEYS
from tests.data.archives import png, tar

Entry = dict[str, Any]


def user(text: str) -> Entry:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Entry:
    return {"role": "assistant", "content": text, **more}


ASKED, ANSWER = "<image>What colour is it?", "red"
TALK = [user("hi"), assistant("yes"), user(ASKED), assistant(ANSWER)]
ASKED_TALK = [user(ASKED), assistant(ANSWER)]
IMAGE = {"images": ["a.png"]}
# Name -> an entry, and the same sample as messages.
LAYOUTS: dict[str, tuple[Entry, list[Entry]]] = {
    "prompt and completion": ({"prompt": ASKED, "completion": ANSWER, **IMAGE}, ASKED_TALK),
    "lists of turns": (
        {"prompt": TALK[:3], "completion": TALK[3:], **IMAGE},
        [user("hi"), assistant("yes", train=False), *TALK[2:]],
    ),
    "one turn each": ({"prompt": TALK[2], "completion": TALK[3], **IMAGE}, ASKED_TALK),
    "query and response": (
        {"system": "Be brief.", "query": ASKED, "response": ANSWER, "history": [["hi", "yes"]], **IMAGE},
        [{"role": "system", "content": "Be brief."}, *TALK],
    ),
    "without history": ({"query": ASKED, "response": ANSWER, "history": None, **IMAGE}, ASKED_TALK),
    "alpaca": (
        {"instruction": "What colour is it?", "input": "the circle", "output": ANSWER, "text": "### all of it"},
        [user("What colour is it?\nthe circle"), assistant(ANSWER)],
    ),
    "alpaca without input": ({"instruction": ASKED, "input": "", "output": ANSWER, **IMAGE}, ASKED_TALK),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": ASKED}, {"from": "chatgpt", "text": ANSWER}], **IMAGE},
        ASKED_TALK,
    ),
    "mixed keys": (
        {"conversations": [{"role": "user", "value": ASKED}, {"from": "bot", "content": ANSWER}], **IMAGE},
        ASKED_TALK,
    ),
    "pairs": (
        {"conversation": [{"human": "hi", "assistant": "yes"}, {"human": ASKED, "assistant": ANSWER}], **IMAGE},
        TALK,
    ),
    "turns under another key": ({"conversation": TALK, **IMAGE}, TALK),
    "text": ({"text": "A circle is red."}, [user(""), assistant("A circle is red.")]),
    "caption": ({"caption": "a red circle", "image": "a.png"}, [user("<image>"), assistant("a red circle")]),
}


def as_messages(name: str) -> Entry:
    entry, messages = LAYOUTS[name]
    return {"messages": messages, **({"images": ["a.png"]} if "image" in entry or "images" in entry else {})}


def read(path: Path, **settings: Any) -> list[Sample | Quarantined]:
    return list(read_samples(SourceSettings(path=path, **settings), LimitSettings()))


def written(path: Path, entries: Sequence[Entry]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(entries))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    elif path.suffix == ".tar":
        members = {}
        for number, entry in enumerate(entries):
            members[f"{number}.json"] = json.dumps(
                entry | ({"images": ["png"]} if entry.get("images") else {})
            ).encode()
            members[f"{number}.png"] = png()
        tar(path, members)
    else:
        pyarrow.parquet.write_table(pa.Table.from_pylist(list(entries)), path)
    return path


def encoded(recipe: Recipe) -> tuple[DataIndex, list[tuple[list[int], list[int]]]]:
    index, tokenizer = build_index(recipe), load_recipe_tokenizer(recipe)
    samples = [tokenizer.encode(sample, index.media_features(i)) for i, sample in enumerate(index.samples)]
    return index, [(sample.ids.tolist(), sample.labels.tolist()) for sample in samples]


def test_every_layout_gives_the_ids_and_labels_of_messages(
    recipe: Callable[..., Recipe], picture: Callable[..., Path]
) -> None:
    picture("a.png")
    made, expected = encoded(recipe([as_messages(name) for name in LAYOUTS]))
    index, found = encoded(recipe([LAYOUTS[name][0] for name in LAYOUTS]))
    assert index.quarantined == made.quarantined == ()
    assert found == expected
    assert all(any(label >= 0 for label in labels) for _, labels in found)
    assert index.fingerprint == made.fingerprint, "runs on both are the same, and continue each other"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".tar"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_file_format_has_every_layout(tmp_path: Path, name: str, suffix: str) -> None:
    if suffix == ".tar" and name in ("text", "alpaca", "caption"):
        pytest.skip("every sample of this shard has a picture")
    (found,) = read(written(tmp_path / f"x{suffix}", [LAYOUTS[name][0]]))
    (expected,) = read(written(tmp_path / f"y{suffix}", [as_messages(name)]))
    assert isinstance(found, Sample)
    assert isinstance(expected, Sample)
    assert found.turns == expected.turns
    assert len(found.images) == len(expected.images)


def test_lists_in_parquet_files_may_be_json(tmp_path: Path) -> None:
    entry, _ = LAYOUTS["query and response"]
    path = written(tmp_path / "x.parquet", [entry | {"history": json.dumps(entry["history"])}])
    assert read(path)[0].turns == read(written(tmp_path / "x.json", [entry]))[0].turns  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"query": "a", "response": ["b"]}, "`response` is a list, expected a text"),
        ({"query": "a", "response": "b", "history": "c"}, "`history` is a text, expected a list of"),
        ({"query": "a", "response": "b", "history": [["c"]]}, "`history`: entry 1 of 1 is no [question, answer]"),
        ({"instruction": "a", "input": 3, "output": "b"}, "`input` is a int, expected a text"),
        ({"prompt": [], "completion": "b"}, "`prompt` is an empty list, expected a text or a list of turns"),
        ({"prompt": "a", "completion": 1}, "`completion` is a int, expected a text or a list of turns"),
        ({"text": ["a"]}, "`text` is a list, expected a text"),
        ({"conversation": [{"human": "a", "assistant": 1}]}, "`conversation`: pair 1 of 1 has no text `assistant`"),
        # What is of no layout: its keys, what is allowed, and the nearest.
        ({"id": 1}, "found the keys `id`, allowed: `conversations` or `messages` or `conversation` (a list of turns);"),
        ({"prompt": "a"}, "The nearest is `prompt` with `completion`, without `completion`"),
        ({"mesages": []}, "The nearest is `messages`: set columns: {messages: mesages} in its source"),
        ({"data": {"messages": []}}, "The nearest is `messages`: set columns: {messages: data.messages} in"),
        ({"question": "a", "answer": "b"}, "`query` with `response`: set columns: {query: question, response: answer}"),
        ({"content": "a"}, "The nearest is `text`: set columns: {text: content} in its source"),
    ],
)
def test_what_is_malformed_is_told_with_the_nearest_layout(tmp_path: Path, entry: Entry, reason: str) -> None:
    (bad,) = read(written(tmp_path / "x.json", [entry]))
    assert isinstance(bad, Quarantined)
    assert bad.kind == "malformed"
    assert reason in bad.reason


def test_following_the_suggestion_mends_the_data(tmp_path: Path) -> None:
    path = written(tmp_path / "x.json", [{"question": "a", "answer": "b"}])
    (sample,) = read(path, columns={"query": "question", "response": "answer"})
    (expected,) = read(written(tmp_path / "y.json", [{"messages": [user("a"), assistant("b")]}]))
    assert isinstance(sample, Sample)
    assert replace(sample, source="") == replace(expected, source="")


PREFERENCES: list[tuple[Entry, dict[str, str] | None]] = [
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"completion": "chosen"}),
    ({"question": "a", "chosen": "b", "rejected": "c"}, {"query": "question", "response": "chosen"}),
    ({"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}, {"messages": "chosen"}),
    ({"query": "a", "response": "b", "rejected_response": "c"}, {"response": "response"}),
    ({"messages": [user("a"), assistant("b")], "rejected_response": "c"}, {"messages": "messages"}),
    ({"prompt": "a", "completion": "b", "label": False}, None),
]


@pytest.mark.parametrize(("entry", "columns"), PREFERENCES)
@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_preference_data_are_refused_unless_the_source_chooses(
    tmp_path: Path, entry: Entry, columns: dict[str, str] | None, suffix: str
) -> None:
    path = written(tmp_path / f"x{suffix}", [entry])
    try:
        (bad,) = read(path)
    except DataError as error:  # a Parquet file without any other layout
        reason = str(error)
    else:
        assert isinstance(bad, Quarantined)
        assert bad.kind == "preference"
        reason = bad.reason
    assert "it is preference data (" in reason
    assert "mmtrain learns answers, not preferences; " in reason
    if columns is None:
        assert "keep the samples with `label` true" in reason
        return
    written_columns = ", ".join(f"{key}: {value}" for key, value in columns.items())
    assert f"set columns: {{{written_columns}}} in its source" in reason
    (sample,) = read(path, columns=columns)
    assert isinstance(sample, Sample)
    assert [(turn.role, turn.text) for turn in sample.turns] == [("user", "a"), ("assistant", "b")]


def test_a_run_on_preferences_alone_is_refused_with_one_sentence(recipe: Callable[..., Recipe]) -> None:
    entries = [entry for entry, _ in PREFERENCES]
    with pytest.raises(DataError, match=r"^data\.sources: none of 6 samples can be learned; of the first: it is pref"):
        build_index(recipe(entries, max_bad_rate=0.5))


NESTED = {"data": {"turns": ASKED_TALK}, "pictures": ["a.png"], "messages": "of another kind", "meta": {"key": "n1"}}


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet", ".tar"])
def test_columns_say_where_our_keys_are(tmp_path: Path, suffix: str) -> None:
    columns = {"messages": "data.turns", "images": "pictures", "id": "meta.key"}
    entry = NESTED | ({"pictures": ["png"]} if suffix == ".tar" else {})
    if suffix == ".tar":
        tar(tmp_path / "x.tar", {"0.json": json.dumps(entry).encode(), "0.png": png()})
        path = tmp_path / "x.tar"
    else:
        path = written(tmp_path / f"x{suffix}", [entry])
    (found,) = read(path, columns=columns)
    (expected,) = read(written(tmp_path / f"y{suffix}", [{"messages": ASKED_TALK, **IMAGE, "id": "n1"}]))
    assert isinstance(found, Sample)
    assert isinstance(expected, Sample)
    assert (found.id, found.turns) == (expected.id, expected.turns)
    assert len(found.images) == 1


def test_media_inside_of_renamed_columns_of_parquet_files_are_read(tmp_path: Path) -> None:
    part = {"type": "image", "image": {"bytes": png("blue")}}
    turns = [{"role": "user", "content": [part]}]
    rows = [{"talk": {"said": turns}, "reply": "blue", "shots": [png("red"), png()]}]
    path = written(tmp_path / "x.parquet", rows)
    (sample,) = read(path, columns={"prompt": "talk.said", "completion": "reply"})
    assert isinstance(sample, Sample)
    with sample.images[0].open() as file:
        assert file.read() == png("blue")
    path = written(tmp_path / "y.parquet", [{"caption": "a", "shots": [png("red"), png()]}])
    (sample,) = read(path, columns={"images": "shots"})
    assert isinstance(sample, Sample)
    assert sample.turns[0].text == "<image><image>"
    with sample.images[1].open() as file:
        assert file.read() == png()


def test_a_column_that_no_sample_has_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "x.json", [NESTED, {"data": {"turns": ASKED_TALK}}])
    assert len(read(path, columns={"messages": "data.turns", "images": "pictures"})) == 2, "some have no pictures"
    match = r"columns\.images is picturs, which no sample has; the first has data, .*; did you mean pictures\?"
    with pytest.raises(DataError, match=match):
        read(path, columns={"messages": "data.turns", "images": "picturs"})
    path = written(tmp_path / "x.parquet", [{"text": "a", "of": {"shots": [b"x"]}}])
    with pytest.raises(DataError, match=r"columns\.images is of\.shots; allowed in Parquet files: a column, for media"):
        read(path, columns={"images": "of.shots"})


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        (
            {"turns": "messages"},
            r"found the key 'turns' \(the key is mmtrain's, the value that of the data\); allowed:",
        ),
        ({"image_s": "x"}, "did you mean images?"),
        ({"images": "x..y"}, r"images: found 'x\.\.y', allowed: the key in the data, or a path to it"),
    ],
)
def test_columns_that_cannot_be_meant_are_rejected(columns: dict[str, str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SourceSettings(path=Path("x.json"), columns=columns)


def test_settings_and_readers_know_the_same_keys() -> None:
    assert set(LAYOUT_KEYS) <= set(ENTRY_KEYS)
    assert set(MEDIA_KIND_BY_KEY) == set(MEDIA_ENTRY_KEYS)
