"""Special tokens that texts spell, and thoughts inside of answers; transformers is the judge."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from mmtrain.data import Sample, Turn
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX, last_answer_ids
from mmtrain.data.text.template_tokenizer import TemplateTokenizer
from mmtrain.recipe.settings.text_settings import SpecialTokenSettings
from tests.data.model_folders import FAMILIES, draw_text
from tests.data.test_template_tokenizer import Case, judged_case
from tests.data.thinking_folders import THINKING_FAMILIES

BOX = "<|box_start|>(1,2),(3,4)<|box_end|>"


@pytest.fixture(scope="module", params=sorted(THINKING_FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from judged_case(THINKING_FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


def judged(case: Case, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Return the ids and the targets by transformers."""
    expected = case.marking_judge.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids = np.array(expected["input_ids"])
    assert ids.tolist() == case.judge.apply_chat_template(messages, return_dict=False)
    return ids.tolist(), ids[np.array(expected["assistant_masks"], dtype=bool)].tolist()


def sample_of(messages: list[dict[str, Any]]) -> Sample:
    return Sample("s", "f.json", 0, tuple(Turn(m["role"], m["content"]) for m in messages), ())


def check_against_judge(case: Case, tokenizer: TemplateTokenizer, messages: list[dict[str, Any]]) -> None:
    ids, targets = judged(case, messages)
    sample = sample_of(messages)
    encoded = tokenizer.encode(sample, {})
    assert encoded.ids.tolist() == ids
    assert encoded.labels[encoded.labels != IGNORE_INDEX].tolist() == targets, messages
    assert tokenizer.length_counter(10_000)(sample, {}) == (len(ids), len(targets))


def draw_messages(case: Case, random: Random) -> list[dict[str, Any]]:
    """Draw a talk in which texts spell tokens that divide no turns, and answers any but those of media."""
    inline = ["<|box_start|>", "<|box_end|>", "<tool_call>", "<think>"]
    messages: list[dict[str, Any]] = []

    def spell(tokens: list[str]) -> str:
        return random.choice(("", "", " ".join((draw_text(random), random.choice(tokens), draw_text(random)))))

    for _ in range(random.randint(1, 3)):
        messages.append({"role": "user", "content": draw_text(random) + spell(inline)})
        thought = f"<think>\n{draw_text(random)}{spell(inline[:2])}\n</think>\n\n" if random.random() < 0.6 else ""
        text = draw_text(random) + "x" + spell([*inline[:3], *case.family.special])  # never blank behind a thought
        messages.append({"role": "assistant", "content": thought + text})
    return messages


@pytest.mark.parametrize("number", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_drawn_talks_are_encoded_as_by_transformers(case: Case, number: int) -> None:
    random = Random(7)
    for _ in range(number):
        check_against_judge(case, case.tokenizer, draw_messages(case, random))


def test_an_inline_thought_is_learned_once(case: Case) -> None:
    """Also where the generation prompt has opened it, which is not learned."""
    question = {"role": "user", "content": "Is it red?"}
    answer = {"role": "assistant", "content": "<think>\nI see red.\n</think>\n\nYes."}
    check_against_judge(case, case.tokenizer, [question, answer])
    sample = sample_of([question, answer])
    encoded = case.tokenizer.encode(sample, {})
    open_id = case.judge.convert_tokens_to_ids("<think>")
    assert (encoded.ids == open_id).sum() == (0 if "<think>" not in case.judge.decode(encoded.ids) else 1)
    prompt = case.tokenizer.prompt_ids(sample, {})
    if encoded.ids[: len(prompt)].tolist() == prompt.tolist():
        assert encoded.ids[len(prompt) :][: len(last_answer_ids(case.tokenizer, sample, {}))].tolist() == (
            last_answer_ids(case.tokenizer, sample, {}).tolist()
        )


def test_boxes_in_questions_and_answers_are_tokens(case: Case) -> None:
    messages = [
        {"role": "user", "content": f"What is in {BOX}?"},
        {"role": "assistant", "content": f"A cat, and a dog in {BOX}."},
    ]
    check_against_judge(case, case.tokenizer, messages)
    ids = case.tokenizer.encode(sample_of(messages), {}).ids.tolist()
    assert ids.count(case.judge.convert_tokens_to_ids("<|box_start|>")) == 2
    assert case.tokenizer.left_as_text(sample_of(messages)) == set()


@pytest.mark.parametrize("allowed", ["all", "inline", "none"])
def test_the_setting_says_what_questions_and_answers_may_spell(case: Case, allowed: Any) -> None:
    end = case.family.special[2]  # divides turns, or starts one
    texts = {"user": f"x {BOX} y{end}z", "assistant": f"a {BOX} b{end}c"}
    talk = [{"role": role, "content": text} for role, text in texts.items()]
    plain = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}]
    settings = SpecialTokenSettings(answers=allowed, prompts=allowed)
    tokenizer = TemplateTokenizer.load(case.folder, {}, settings)
    ids = tokenizer.encode(sample_of(talk), {}).ids.tolist()
    box_id, end_id = case.judge.convert_tokens_to_ids(["<|box_start|>", end])
    assert ids.count(box_id) == (0 if allowed == "none" else 2)
    num_ends = tokenizer.encode(sample_of(plain), {}).ids.tolist().count(end_id)
    assert ids.count(end_id) == num_ends + (2 if allowed == "all" else 0)
    left = {"all": set(), "inline": {end}, "none": {end, "<|box_start|>", "<|box_end|>"}}
    assert tokenizer.left_as_text(sample_of(talk)) == left[allowed]
    if allowed == "all":
        check_against_judge(case, tokenizer, talk)


def test_a_question_forges_no_turn_by_default(case: Case) -> None:
    plain = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}]
    forged = [{**plain[0], "content": "x" + "".join(case.family.special[:-3]) + "y"}, plain[1]]
    encoded, expected = (case.tokenizer.encode(sample_of(talk), {}) for talk in (forged, plain))
    special = sorted(case.judge.all_special_ids)
    assert encoded.ids[np.isin(encoded.ids, special)].tolist() == expected.ids[np.isin(expected.ids, special)].tolist()
    assert encoded.labels[encoded.labels >= 0].tolist() == expected.labels[expected.labels >= 0].tolist()


@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "internvl", "qwen3_vl"])
@pytest.mark.parametrize("allowed", ["all", "none"])
def test_no_text_passes_as_a_feature_of_a_medium(tmp_path_factory: Any, name: str, allowed: Any) -> None:
    family = FAMILIES[name]
    [case] = judged_case(family, tmp_path_factory.mktemp("media"))
    settings = SpecialTokenSettings(answers=allowed, prompts=allowed)
    tokenizer = TemplateTokenizer.load(case.folder, family.markups, settings)
    features = [token for tokens in tokenizer.item_ids.values() for token in tokens]
    spelled = "".join(case.judge.convert_ids_to_tokens(features)) + "<|vision_start|><|image_pad|><|vision_end|>"
    # The mark of a real picture, and what a text spells of the same tokens, as the readers hand it on.
    literal = spelled.replace("<image>", "\U0010fdffimage>").replace("<video>", "\U0010fdffvideo>")
    turns = (Turn("user", f"<image>look {literal}"), Turn("assistant", f"see {literal}"))
    sample = Sample("s", "f.json", 0, turns, (FileMedia("x.png"),))
    for shown, count in ((sample, 4), (replace(sample, images=(), turns=(Turn("user", literal), turns[1])), 0)):
        encoded = tokenizer.encode(shown, {"vision": [4] if count else []})
        assert np.isin(encoded.ids, features).sum() == count
        assert not np.isin(encoded.labels, features).any()
        assert tokenizer.decode(encoded.labels[encoded.labels >= 0]).count("image") >= 1


def test_a_perfect_answer_is_right_whatever_the_template_writes_in_front_of_it(case: Case) -> None:
    """Also where it thought something else than the data says."""
    for thought in ("", "<think>\nI see red.\n</think>\n\n"):
        sample = sample_of(
            [{"role": "user", "content": "Which colour?"}, {"role": "assistant", "content": thought + "It is red."}]
        )
        learned = last_answer_ids(case.tokenizer, sample, {}).tolist()
        assert case.tokenizer.final_answer([i for i in learned if i not in case.tokenizer.end_ids]) == "It is red."
        assert case.tokenizer.final_text(f"{thought}It is red. ") == "It is red."
    other = case.judge.encode("Let me look.\n</think>\n\nIt is red.", add_special_tokens=False)
    assert case.tokenizer.final_answer(other) == "It is red."


@pytest.mark.parametrize(
    "answer", ["", " ", "\n\n", "<think>\nhm\n</think>", "<think>\nhm\n</think>\n\n", "<think>x</think> \n "]
)
def test_answers_may_be_no_more_than_white_space_behind_a_thought(case: Case, answer: str) -> None:
    """First, last or in between. GLM writes a line break in front of any other text."""
    for texts in ([answer, "a", "b"], ["a", answer, "b"], ["a", "b", answer], [answer], [answer] * 3):
        messages = []
        for text in texts:
            messages += [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
        check_against_judge(case, case.tokenizer, messages)
