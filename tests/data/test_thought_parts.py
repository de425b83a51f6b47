"""Thoughts as parts of a message, as Mistral's reasoning models have them; transformers is the judge."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mmtrain.data import Sample
from mmtrain.data.formats.bad_sample import BadSampleError
from mmtrain.data.formats.conversation import build_sample
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX
from mmtrain.data.text.template_tokenizer import TemplateTokenizer
from mmtrain.recipe.settings.text_settings import ThoughtSettings
from tests.data.test_template_tokenizer import Case, judged_case
from tests.data.thinking_folders import THINKING_FAMILIES, THOUGHT_PARTS

THOUGHTS = ("Two and two.", "One\nmore [/THINK] is five.")
PLAIN = tuple(thought.replace(" [/THINK]", "") for thought in THOUGHTS)
QUESTION = [{"type": "text", "text": "How many?"}]
LAYOUTS: dict[str, Any] = {
    "a text": lambda thought: [{"type": "thinking", "thinking": thought}],
    "texts": lambda thought: [
        {"type": "thinking", "thinking": [{"type": "text", "text": half} for half in (thought[:4], thought[4:])]}
    ],
    "two parts": lambda thought: [{"type": "thinking", "thinking": half} for half in (thought[:4], thought[4:])],
}


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from judged_case(THOUGHT_PARTS, tmp_path_factory.mktemp("mistral"))


def _messages(parts: Any, thoughts: tuple[str, ...] = THOUGHTS) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Think first."}]
    for thought, answer in zip(thoughts, ("It is four.", "Five."), strict=True):
        content = [*(parts(thought) if thought else []), {"type": "text", "text": answer}]
        messages += [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": content}]
    return messages


def _sample(messages: list[dict[str, Any]]) -> Sample:
    return build_sample({"messages": messages}, "f.json", 0, lambda kind, path: path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("thoughts", [PLAIN, ("", PLAIN[1]), ("", "")])
def test_ids_and_what_is_learned_are_those_of_transformers(
    mistral: Case, layout: str, thoughts: tuple[str, ...]
) -> None:
    tokenizer, judge = mistral.tokenizer, mistral.marking_judge
    encoded = tokenizer.encode(_sample(_messages(LAYOUTS[layout], thoughts)), {})
    expected = judge.apply_chat_template(
        _messages(LAYOUTS["a text"], thoughts), return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded.ids.tolist() == expected["input_ids"]
    is_learned = np.roll(encoded.labels != IGNORE_INDEX, 1)
    assert is_learned.tolist() == [bool(mark) for mark in expected["assistant_masks"]]
    assert tokenizer.length_counter(1000)(_sample(_messages(LAYOUTS[layout], thoughts)), {}) == (
        len(encoded.ids),
        int(is_learned.sum()),
    )


def test_a_thought_cannot_end_itself_and_other_thoughts_are_not_taken_from_a_cache(mistral: Case) -> None:
    tokenizer = mistral.tokenizer
    end = tokenizer.encode(_sample(_messages(LAYOUTS["a text"])), {}).ids.tolist()
    [end_id] = [number for number, token in enumerate(THOUGHT_PARTS.special) if token == "[/THINK]"]
    assert end.count(end_id) == 2
    assert "Two" in tokenizer.decode(end)
    other = _messages(LAYOUTS["a text"], ("Three.", "Four."))
    assert "Two" not in tokenizer.decode(tokenizer.encode(_sample(other), {}).ids)


def test_thoughts_may_be_context(mistral: Case) -> None:
    tokenizer = TemplateTokenizer.load(mistral.folder)
    assert tokenizer.final_answer(tokenizer.encode(_sample(_messages(LAYOUTS["a text"])[:3]), {}).ids) == "It is four."
    quiet = load_tokenizer(mistral.folder, thoughts=ThoughtSettings(learn=False))
    encoded = quiet.encode(_sample(_messages(LAYOUTS["a text"])), {})
    assert quiet.decode(encoded.labels[encoded.labels != IGNORE_INDEX]).split() == ["It", "is", "four.", "Five."]


@pytest.mark.parametrize("name", ["qwen3_thinking", "glm"])
def test_other_templates_read_them_beside_the_text(name: str, tmp_path: Any) -> None:
    for case in judged_case(THINKING_FAMILIES[name], tmp_path):
        beside = [
            {"role": "user", "content": "How many?"},
            {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."},
        ]
        parts = [{"type": "thinking", "thinking": "Two and two."}, {"type": "text", "text": "Four."}]
        as_part = [beside[0], {"role": "assistant", "content": parts}]
        ids = [case.tokenizer.encode(_sample(each), {}).ids.tolist() for each in (beside, as_part)]
        assert ids[0] == ids[1]
        assert "Two and two." in case.tokenizer.decode(ids[0])


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (
            {"role": "user", "content": LAYOUTS["a text"]("Hm.")},
            "'thinking' in a turn of the role user, allowed: in front",
        ),
        (
            {"role": "assistant", "content": [*QUESTION, *LAYOUTS["a text"]("Hm.")]},
            "'thinking' behind other parts, allowed: in front of an assistant's answer",
        ),
        ({"role": "assistant", "content": [{"type": "thinking"}]}, "'thinking' without a text `thinking`"),
        (
            {"role": "assistant", "content": LAYOUTS["a text"]("Hm."), "reasoning_content": "Hm."},
            "a thought as a part of `content` and one beside it",
        ),
    ],
)
def test_parts_that_are_no_thought_before_an_answer_are_bad(turn: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSampleError, match=message):
        _sample([{"role": "user", "content": "How many?"}, turn])
