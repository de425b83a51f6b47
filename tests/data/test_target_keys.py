"""Keys that say what is learned of a turn or a sample: followed, or the sample is rejected by name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmtrain.data import ChatTokenizer, Quarantined, Sample
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import find_unusable
from mmtrain.data.index.sample_table import content_json, sample_from_record, sample_record
from mmtrain.data.text.sample_tokenizer import last_answer_ids
from mmtrain.recipe.settings.data_settings import LimitSettings, SourceSettings
from tests.data.archives import parquet, png, tar
from tests.data.model_folders import FAMILIES
from tests.data.test_template_tokenizer import Case, judged_case

OFF = [
    *(("loss", False), ("train", False), ("trainable", False), ("loss_mask", 0), ("weight", 0), ("weight", 0.0)),
    *(("learnable", False), ("training", False), ("loss_weight", 0), ("loss_scale", 0.0), ("learned", 0)),
]
REJECTED = [
    *(("mask", 1), ("mask", False), ("masked", True), ("ignore", True), ("ignore_loss", True), ("no_loss", True)),
    *(("train_detail", [{"begin_offset": 0, "end_offset": 3, "train": False}]), ("weight", 0.5), ("loss", "no")),
    *(("lossMask", 0), ("loss_mask", [0, 1]), ("training_detail", [])),
]


def talk(key: str, value: Any, turn: int, layout: str = "messages") -> dict[str, Any]:
    """Return a conversation of three answers, one turn of which has a key more."""
    names = {"messages": ("role", "content", "user", "assistant"), "conversations": ("from", "value", "human", "gpt")}
    role, text, user, assistant = names[layout]
    turns: list[dict[str, Any]] = []
    for number in range(3):
        turns += [{role: user, text: f"question {number}"}, {role: assistant, text: f"answer {number}"}]
    turns[turn][key] = value
    return {layout: turns}


def write(path: Path, entry: dict[str, Any], container: str) -> Path:
    if container == "json":
        (path / "data.json").write_text(json.dumps([entry]))
        return path / "data.json"
    if container == "tar":
        return tar(path / "data.tar", {"1.json": json.dumps(entry).encode()})
    return parquet(path / "data.parquet", {key: [value] for key, value in entry.items()})


def read(path: Path, entry: dict[str, Any], container: str = "json") -> Sample | Quarantined:
    [sample] = read_samples(SourceSettings(path=write(path, entry, container)), LimitSettings())
    return sample


@pytest.mark.parametrize("container", ["json", "tar", "parquet"])
@pytest.mark.parametrize("layout", ["messages", "conversations"])
@pytest.mark.parametrize(("key", "value"), OFF)
def test_a_turn_that_is_not_to_be_learned_is_context(
    tmp_path: Path, key: str, value: Any, layout: str, container: str
) -> None:
    sample = read(tmp_path, talk(key, value, 3, layout), container)
    assert isinstance(sample, Sample), sample
    assert [turn.is_learned for turn in sample.turns] == [True, True, True, False, True, True]
    assert sample_from_record(sample_record(sample, content_json(sample))) == sample
    plain = read(tmp_path, talk(key, None, 3, layout), container)
    assert isinstance(plain, Sample)
    assert content_json(plain) != content_json(sample), "ranks and caches see the difference"


@pytest.mark.parametrize(("key", "value"), [*OFF, *REJECTED])
def test_a_key_of_a_turn_is_never_ignored(tmp_path: Path, key: str, value: Any) -> None:
    sample = read(tmp_path, talk(key, value, 3))
    if (key, value) in REJECTED:
        assert isinstance(sample, Quarantined)
        assert (sample.kind, f"`{key}`" in sample.reason) == ("target", True)
        assert "message 4 of 6" in sample.reason
    else:
        assert isinstance(sample, Sample)
    part: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": []}]}
    part["messages"][1]["content"] = [{"type": "text", "text": "a", key: value}]
    assert getattr(read(tmp_path, part), "kind", "") == "target"


def test_what_says_that_answers_alone_are_learned_changes_nothing(tmp_path: Path) -> None:
    entry = talk("train", True, 1)
    for turn, is_learned in zip(entry["messages"], [False, True] * 3, strict=True):
        turn.update(loss=is_learned, loss_mask=int(is_learned), weight=1, mask=None)
    sample = read(tmp_path, entry | {"weight": 1, "mask_history": False, "mask": "User", "train_on_inputs": False})
    assert isinstance(sample, Sample), sample
    assert all(turn.is_learned for turn in sample.turns if turn.role == "assistant")


def test_a_question_that_is_to_be_learned_is_rejected(tmp_path: Path) -> None:
    bad = read(tmp_path, talk("train", True, 2))
    assert isinstance(bad, Quarantined)
    assert "only what assistants say is learned" in bad.reason


@pytest.mark.parametrize("container", ["json", "tar", "parquet"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("loss", False), ("train", False), ("weight", 0), ("trainable", False), ("loss_mask", 0)),
        *(("weight", 0.3), ("loss_mask", [0, 1]), ("completion_mask", [0, 1]), ("mask_history", True)),
        *(("train_on_inputs", True), ("roles_to_train", ["user"]), ("labels", [1, 2]), ("mask", "Assistant")),
    ],
)
def test_a_key_of_a_sample_is_never_ignored(tmp_path: Path, key: str, value: Any, container: str) -> None:
    sample = read(tmp_path, talk("name", "x", 0) | {key: value}, container)
    if isinstance(sample, Sample):
        assert value in (0, False)
        unusable = find_unusable(sample, ())
        assert unusable is not None
        assert (unusable.kind, "train: false" in unusable.reason) == ("no_answer", True)
    else:
        assert (sample.kind, f"`{key}`" in sample.reason) == ("target", True)


def test_keys_of_other_meaning_are_no_fault(tmp_path: Path) -> None:
    entry = talk("name", "x", 0) | {"mask": "mask.png", "label": 3, "split": "train", "source": "web", "target": 1}
    assert isinstance(read(tmp_path, entry), Sample)


def test_a_pair_may_say_so_too(tmp_path: Path) -> None:
    pairs = [{"user": "a", "assistant": "b", "loss": False}, {"user": "c", "assistant": "d", "source": "web"}]
    sample = read(tmp_path, {"texts": pairs})
    assert isinstance(sample, Sample)
    assert [turn.is_learned for turn in sample.turns] == [True, False, True, True]


def test_an_image_to_draw_must_be_learned(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    entry = {"messages": [{"role": "assistant", "content": "<image>", "loss": False}], "images": ["a.png"]}
    assert getattr(read(tmp_path, entry), "kind", "") == "target"


@pytest.fixture(scope="module", params=["qwen2", "thinking", "mistral", "llava", "vicuna"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from judged_case(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


def _targets(tokenizer: Any, sample: Sample) -> list[int]:
    labels = tokenizer.encode(sample, {}).labels
    assert tokenizer.length_counter(1000)(sample, {})[1] == (labels >= 0).sum()
    return [int(label) for label in labels[labels >= 0]]


@pytest.mark.parametrize("number", [1, 3, 5])
def test_labels_leave_the_turn_out(case: Case, tokenizer_path: Path, tmp_path: Path, number: int) -> None:
    whole, sample = (read(tmp_path, talk("loss", value, number)) for value in (True, False))
    assert isinstance(whole, Sample)
    assert isinstance(sample, Sample)
    for tokenizer in (case.tokenizer, ChatTokenizer.load(tokenizer_path)):
        encoded, of_whole = tokenizer.encode(sample, {}), tokenizer.encode(whole, {})
        assert encoded.ids.tolist() == of_whole.ids.tolist()
        left = encoded.labels != -100
        assert (encoded.labels[left] == of_whole.labels[left]).all()
        text = tokenizer.decode(_targets(tokenizer, sample))
        assert [f"answer {i}" in text for i in range(3)] == [2 * i + 1 != number for i in range(3)]
        last = 3 if number == 5 else 5
        assert sample.last_answer == last
        assert f"answer {last // 2}" in tokenizer.decode(last_answer_ids(tokenizer, sample, {}))
        assert f"question {last // 2}" in tokenizer.decode(tokenizer.prompt_ids(sample, {})[-20:])
        assert np.isin(_targets(tokenizer, sample), of_whole.labels).all()
