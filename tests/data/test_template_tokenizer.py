"""Conversations through the chat template of a model folder; transformers is the judge."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from packaging.version import Version
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from mmtrain.data import Sample, Turn
from mmtrain.data.formats.sample import turned_to_show
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.text.chat_template import TEMPLATE_DATE, ChatTemplate, Rendering
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX, MediumFeatures, TimedItems, total_features
from mmtrain.data.text.template_tokenizer import TemplateTokenizer
from mmtrain.recipe.settings.text_settings import SpecialTokenSettings
from tests.data.model_folders import (
    FAMILIES,
    MARK_ANSWERS,
    TILE_FEATURES,
    Family,
    draw_text,
    metaspace,
    write_folder,
)

NUM_CONVERSATIONS = 500  # of each family in the slow tests; the quick ones draw the first 12 of them


@dataclass(frozen=True)
class Drawn:
    """A conversation as mmtrain reads it, and as transformers does."""

    sample: Sample
    features: dict[str, list[MediumFeatures]]
    messages: list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A family's folder, opened by both."""

    family: Family
    folder: Path
    tokenizer: TemplateTokenizer
    judge: PreTrainedTokenizerFast
    marking_judge: PreTrainedTokenizerFast  # whose template marks the answers


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from judged_case(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


def judged_case(family: Family, path: Path) -> Iterator[Case]:
    """Write the folder of a family, and yield its tokenizer beside those of transformers."""
    folder = write_folder(path, family)
    marked = family.template
    for comment, tag in MARK_ANSWERS.items():
        marked = marked.replace(comment, tag)
    judges = [PreTrainedTokenizerFast.from_pretrained(folder) for _ in range(2)]
    judges[1].chat_template = marked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: TEMPLATE_DATE))
        yield Case(family, folder, TemplateTokenizer.load(folder, family.markups), *judges)


def draw(case: Case, random: Random) -> Drawn:
    family = case.family
    turns: list[Turn] = []
    messages: list[dict[str, Any]] = []
    features: list[MediumFeatures] = []
    media: dict[str, list[FileMedia]] = {"image": [], "video": []}
    as_parts = bool(family.media) and "message.content is string" not in family.template

    def add(role: str, parts: list[str]) -> None:
        """Add a message; its parts are texts and kinds of media."""
        text = "".join(f"<{part}>" if part in family.media else part for part in parts)
        turns.append(Turn(role, text))  # type: ignore[arg-type]
        contents = [{"type": p} if p in family.media else {"type": "text", "text": p} for p in parts]
        is_text = not as_parts and not any(part in family.media for part in parts)
        messages.append({"role": role, "content": text if is_text else contents})

    if family.has_system and random.random() < 0.5:
        add("system", [draw_text(random)])
    for _ in range(random.randint(1, 4)):
        parts = [draw_text(random)]
        for _ in range(random.randint(0, 3) if family.media else 0):
            kind = random.choice(family.media)
            media[kind].append(FileMedia("x.png"))
            parts = [parts[0].strip(), kind, *parts[1:]] if random.random() < 0.5 else [*parts, kind, "and"]
        features += [_draw_features(family, part, random) for part in parts if part in family.media]
        add("user", [part for part in parts if part])
        thought = f"<think>\n{draw_text(random)}\n</think>\n\n" if family.thinks and random.random() < 0.5 else ""
        add("assistant", [thought + draw_text(random)])
    images, videos = tuple(media["image"]), tuple(media["video"])
    sample = Sample("s", "f.json", 0, tuple(turns), images, videos=videos)
    return Drawn(sample, {"vision": features} if family.media else {}, messages)


def _draw_features(family: Family, kind: str, random: Random) -> MediumFeatures:
    if family.write is None:
        return random.randint(1, 9)
    markup = family.markups.get("video")
    if kind == "video" and markup is not None and markup.writes_times:
        num_items = random.randint(1, 5)
        return TimedItems((random.randint(1, 9),) * num_items, tuple(sorted(random.sample(range(2000), num_items))))
    return (TILE_FEATURES,) * random.randint(1, 12) if kind == "video" else TILE_FEATURES * random.randint(1, 5)


def expected_ids(case: Case, messages: list[dict[str, Any]], drawn: Drawn, **options: bool) -> list[int]:
    """Return the ids of a conversation by the judge, with the text or the features of its media as a processor does."""
    features = iter(drawn.features.get("vision", []))
    if case.family.write is None:
        ids = case.judge.apply_chat_template(messages, return_dict=False, **options)
        placeholders = {i for tokens in case.tokenizer.item_ids.values() for i in tokens}
        repeats = [total_features(next(features)) if i in placeholders else 1 for i in ids]
        return np.repeat(ids, repeats).tolist()
    write = case.family.write
    text = case.judge.apply_chat_template(messages, tokenize=False, **options)
    kinds = case.family.placeholders
    text = re.sub(
        "|".join(map(re.escape, kinds)), lambda placeholder: write(kinds[placeholder.group()], next(features)), text
    )
    ids = case.judge(text, add_special_tokens=False)["input_ids"]
    assert isinstance(ids, list)
    return ids


@pytest.mark.parametrize("number", [12, pytest.param(NUM_CONVERSATIONS, marks=pytest.mark.slow)])
def test_ids_and_labels_are_those_of_transformers(case: Case, number: int) -> None:
    random = Random(1)
    count, at_once = (case.tokenizer.length_counter(limit) for limit in (10_000, 0))
    for _ in range(number):
        drawn = draw(case, random)
        expected = case.marking_judge.apply_chat_template(drawn.messages, return_assistant_tokens_mask=True)
        assert expected["input_ids"] == case.judge.apply_chat_template(drawn.messages, return_dict=False)
        encoded = case.tokenizer.encode(drawn.sample, drawn.features)
        assert encoded.ids.tolist() == expected_ids(case, drawn.messages, drawn)
        is_target = np.array(expected["assistant_masks"], dtype=bool)
        targets = np.array(expected["input_ids"])[is_target]
        assert encoded.labels[encoded.labels != IGNORE_INDEX].tolist() == targets.tolist(), drawn
        positions = np.flatnonzero(encoded.labels != IGNORE_INDEX)
        assert (encoded.labels[positions] == encoded.ids[positions + 1]).all(), "the label is the next token"
        assert count(drawn.sample, drawn.features) == (len(encoded.ids), len(targets))
        assert at_once(drawn.sample, drawn.features)[0] <= len(encoded.ids)


@pytest.mark.parametrize("case", [name for name in FAMILIES if "image" in FAMILIES[name].media], indirect=True)
def test_a_document_whose_images_are_shown_is_a_conversation(case: Case) -> None:
    """Encode one that starts with a text, in front of which an empty turn of the user stands."""
    answer = Turn("assistant", "first\n<image>\n<image>\nthen")
    document = Sample("s", "f.json", 0, (answer,), (), target_images=(FileMedia("a.png"), FileMedia("b.png")))
    shown = turned_to_show(document)
    assert [turn.role for turn in shown.turns] == ["user", "assistant"] * 2
    as_parts = "message.content is string" not in case.family.template
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": ""}] if as_parts else ""},
        {"role": "assistant", "content": [{"type": "text", "text": "first"}] if as_parts else "first"},
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "then"}] if as_parts else "then"},
    ]
    random = Random(0)
    features = {"vision": [_draw_features(case.family, "image", random) for _ in shown.images]}
    encoded = case.tokenizer.encode(shown, features)
    assert encoded.ids.tolist() == expected_ids(case, messages, Drawn(shown, features, messages))
    rendered = case.marking_judge.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    targets = np.array(rendered["input_ids"])[np.array(rendered["assistant_masks"], dtype=bool)]
    assert encoded.labels[encoded.labels != IGNORE_INDEX].tolist() == targets.tolist()


def test_text_between_special_tokens_is_encoded_as_in_the_whole(case: Case) -> None:
    random = Random(5)
    for _ in range(20):
        drawn = draw(case, random)
        rendered = case.judge.apply_chat_template(drawn.messages, tokenize=False)
        whole = case.tokenizer._tokenize(rendered)
        in_pieces = case.tokenizer._pieces(rendered, whole)
        for column in ("ids", "starts", "ends"):
            assert (
                np.concatenate([getattr(piece, column) for piece in in_pieces]).tolist()
                == getattr(whole, column).tolist()
            )


def test_a_text_that_is_surely_too_long_is_not_read(case: Case) -> None:
    turns = (Turn("user", "q"), Turn("assistant", "a" * 20_000))
    tokens, targets = case.tokenizer.length_counter(100)(Sample("s", "f.json", 0, turns, ()), {})
    if case.family.train is metaspace:  # its unknown characters may become one token
        assert targets > 100
    else:
        assert (tokens > 100, targets) == (True, 0)


KNOWS_BYTE_LEVEL = Version(transformers.__version__) >= Version("5.24")
LLAMA, FAST_LLAMA = ({"tokenizer_class": name} for name in ("LlamaTokenizer", "LlamaTokenizerFast"))
NEW_SPACES, OLD_SPACES, NO_SPACES = {"legacy": False}, {"legacy": True}, {"add_prefix_space": False}


@pytest.mark.parametrize(
    ("name", "model_type", "settings"),
    [
        *(("vicuna", "llama", LLAMA | spaces) for spaces in ({}, NEW_SPACES, OLD_SPACES, NO_SPACES, {"legacy": None})),
        *(("mistral", kind, LLAMA | NEW_SPACES) for kind in ("llama", "mistral", "llava", "llava_next", "qwen3")),
        *(("vicuna", kind, FAST_LLAMA) for kind in ("llama", "mistral", "llava", "llava_next", "llava_onevision")),
        ("mistral", "llava", LLAMA | OLD_SPACES),
        ("vicuna", "llava", NO_SPACES),
        ("vicuna", "gemma3_text", LLAMA | NO_SPACES),
        ("vicuna", "gemma3_text", {"tokenizer_class": "GemmaTokenizer", "unk_token": "<unk>"}),
        ("vicuna", "gemma3", {"tokenizer_class": None, "unk_token": "<unk>"}),
        ("qwen2", "qwen2", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("gpt2_chatml", "qwen3", {"tokenizer_class": "Qwen2TokenizerFast"}),
        ("gpt2_chatml", "qwen2", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("gpt2_chatml", "qwen3", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("gpt2_chatml", "llama", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        pytest.param(
            *("gpt2_chatml", "llama", LLAMA),
            marks=pytest.mark.skipif(not KNOWS_BYTE_LEVEL, reason="transformers takes it for Llama 2's"),
        ),
        ("qwen2", "llama", {"tokenizer_class": "GPT2Tokenizer"}),
    ],
    ids=str,
)
def test_ids_are_those_of_the_class_in_transformers(
    tmp_path: Path, name: str, model_type: str, settings: dict[str, object]
) -> None:
    """Which of them takes its way to treat spaces from the file depends on the model."""
    family = FAMILIES[name]
    folder = write_folder(tmp_path, family, **settings)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    judge = AutoTokenizer.from_pretrained(folder)
    case = Case(family, folder, TemplateTokenizer.load(folder), judge, judge)
    random = Random(6)
    for _ in range(10):
        drawn = draw(case, random)
        expected = judge.apply_chat_template(drawn.messages, return_dict=False)
        assert case.tokenizer.encode(drawn.sample, {}).ids.tolist() == expected


def test_prompts_are_those_of_transformers(case: Case) -> None:
    random = Random(2)
    for _ in range(10):
        drawn = draw(case, random)
        prompt = case.tokenizer.prompt_ids(drawn.sample, drawn.features)
        assert prompt.tolist() == expected_ids(case, drawn.messages[:-1], drawn, add_generation_prompt=True)


def test_an_answer_ends_with_the_terminator(case: Case) -> None:
    drawn = draw(case, Random(3))
    labels = case.tokenizer.encode(drawn.sample, drawn.features).labels
    last = labels[labels != IGNORE_INDEX][-1]
    if case.family.answers_end_with:
        assert case.judge.convert_ids_to_tokens(int(last)) == case.family.answers_end_with
        assert last in case.tokenizer.end_ids
    assert case.judge.convert_tokens_to_ids(case.family.named["eos_token"]) in case.tokenizer.end_ids


def test_no_text_can_forge_a_special_token(case: Case) -> None:
    """Not of answers either, if the settings say so: by default they may spell tokens."""
    random = Random(4)
    settings = SpecialTokenSettings(answers="none", prompts="none")
    tokenizer = TemplateTokenizer.load(case.folder, case.family.markups, settings)
    count = tokenizer.length_counter(10_000)
    special = sorted(case.judge.all_special_ids)
    for _ in range(10):
        drawn = draw(case, random)
        plain = case.tokenizer.encode(drawn.sample, drawn.features)
        forged_turns = []
        for turn in drawn.sample.turns:
            token = random.choice(case.family.special)
            forged = token if turn.role != "user" or token not in ("<image>", "<video>") else "</s>"
            text = random.choice((f"{turn.text}x{forged}y", f"{forged}x{turn.text}", f"x{forged}x{turn.text}"))
            forged_turns.append(Turn(turn.role, text))
        forged_sample = replace(drawn.sample, turns=tuple(forged_turns))
        encoded = tokenizer.encode(forged_sample, drawn.features)
        for ids in (encoded.ids, encoded.labels):
            before = plain.ids if ids is encoded.ids else plain.labels
            assert ids[np.isin(ids, special)].tolist() == before[np.isin(before, special)].tolist()
        targets = int((encoded.labels != IGNORE_INDEX).sum())
        assert count(forged_sample, drawn.features) == (len(encoded.ids), targets)


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("vicuna", FAMILIES["vicuna"].template),
        ("mistral", FAMILIES["mistral"].template),
        ("qwen2", FAMILIES["qwen2"].template.replace("message.content + '<|im_end|>'", "message.content")),
        ("qwen2", FAMILIES["thinking"].template.replace("'<|im_start|>' + message.role", "message.role")),
    ],
    ids=["vicuna", "mistral", "no_end", "no_header"],
)
def test_the_time_for_finding_answers_is_linear_in_the_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, template: str
) -> None:
    """Of templates by which no special token shows where answers start and end. What they write is counted."""
    tokenizer = TemplateTokenizer.load(write_folder(tmp_path, replace(FAMILIES[name], template=template)))
    written = 0
    render_in_full = ChatTemplate.render

    def count(template: ChatTemplate, *arguments: Any, **options: Any) -> Rendering:
        nonlocal written
        rendering = render_in_full(template, *arguments, **options)
        written += len(rendering.text)
        return rendering

    monkeypatch.setattr(ChatTemplate, "render", count)
    random = Random(8)
    texts = [f"{number} is the {random.choice(('red', 'green'))} answer" for number in range(800)]
    turns = [Turn(role, f"{role} {text}") for text in texts for role in ("user", "assistant")]
    sample = Sample("s", "f.json", 0, tuple(turns), ())
    length = len(tokenizer._render_sample(tokenizer._conversation(sample, turns)).text)
    written = 0
    labels = tokenizer.encode(sample, {}).labels
    learned = tokenizer.decode(labels[labels != IGNORE_INDEX])
    assert all(f"assistant {text}" in learned for text in texts)
    assert "user " not in learned
    assert written < 15 * length
