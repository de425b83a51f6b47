from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from mmtrain.data import ChatTokenizer, Sample, Turn
from mmtrain.data.formats.conversation import build_sample
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.synthetic.demo import train_tokenizer
from mmtrain.data.text.chat_tokenizer import IMAGE_TOKEN, SPECIAL_TOKENS
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX
from mmtrain.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: Path) -> ChatTokenizer:
    return ChatTokenizer.load(tokenizer_path)


def sample(*turns: tuple[str, str]) -> Sample:
    return Sample("s", "f.json", 0, tuple(Turn(role, text) for role, text in turns), ())  # type: ignore[arg-type]


def show(tokenizer: ChatTokenizer, ids: np.ndarray) -> str:
    names = {tokenizer._tokenizer.token_to_id(t): t for t in SPECIAL_TOKENS}
    return "".join(names.get(int(i)) or tokenizer.decode([i]) for i in ids)


def test_the_chat_format_and_the_positions_of_labels(tokenizer: ChatTokenizer) -> None:
    s = sample(
        ("system", "sys"), ("user", "a<image>b<image>"), ("assistant", "red"), ("user", "more"), ("assistant", "3")
    )
    encoded = tokenizer.encode(s, {"vision": [2, 1]})
    assert show(tokenizer, encoded.ids) == (
        "<|system|>sys<|end|><|user|>a<|image|><|image|>b<|image|><|end|><|assistant|>red<|end|>"
        "<|user|>more<|end|><|assistant|>3<|end|>"
    )
    predicted = encoded.labels[encoded.labels != IGNORE_INDEX]
    assert show(tokenizer, predicted) == "red<|end|>3<|end|>"
    positions = np.flatnonzero(encoded.labels != IGNORE_INDEX)
    assert (encoded.labels[positions] == encoded.ids[positions + 1]).all(), "the label is the next token"
    assert show(tokenizer, encoded.ids[positions[:1]]) == "<|assistant|>", "the first answer token is predicted there"
    assert encoded.labels[-1] == IGNORE_INDEX, "nothing follows the last token, not even the next sample"


@given(st.lists(st.sampled_from(["x", " 1 + 2", "<image>", "<audio>", "<|end|>", "é\n"]), max_size=6), st.booleans())
def test_the_length_counter_agrees_with_encode(tokenizer: ChatTokenizer, parts: list[str], answered: bool) -> None:
    text = "".join(parts)
    turns = [("system", text), ("user", text), *[("assistant", text)] * answered, ("user", "?"), ("assistant", "red ")]
    s = sample(*turns)
    features = [3] * text.count("<image>")
    encoded = tokenizer.encode(s, {"vision": features})
    expected = len(encoded.ids), int((encoded.labels != IGNORE_INDEX).sum())
    assert tokenizer.length_counter(1000)(s, {"vision": features}) == expected


def test_the_prompt_stops_where_the_last_answer_starts(tokenizer: ChatTokenizer) -> None:
    s = sample(("user", "q<image>"), ("assistant", "red"), ("user", "and"), ("assistant", "3"))
    prompt = tokenizer.prompt_ids(s, {"vision": [3]})
    encoded = tokenizer.encode(s, {"vision": [3]})
    assert prompt.tolist() == encoded.ids[: len(prompt)].tolist()
    assert tokenizer.decode(encoded.ids[len(prompt) :]) == "3"
    assert show(tokenizer, prompt[-1:]) == "<|assistant|>"


@given(st.text(), st.text())
def test_no_text_can_forge_special_tokens_and_all_text_survives(
    tokenizer: ChatTokenizer, left: str, right: str
) -> None:
    for token in ("", *SPECIAL_TOKENS):
        text = f"{left}{token}{right}".replace("<image>", "")
        ids = tokenizer.encode(sample(("user", "q"), ("assistant", text)), {}).ids
        specials = {tokenizer._tokenizer.token_to_id(t) for t in SPECIAL_TOKENS}
        start = len(tokenizer.prompt_ids(sample(("user", "q"), ("assistant", text)), {}))
        assert not specials & set(ids[start:-1].tolist())
        assert tokenizer.decode(ids[start:]) == text


def test_a_mark_in_an_answer_is_text(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode(sample(("user", "q"), ("assistant", "<image>")), {}).ids
    assert tokenizer.item_ids["vision"][0] not in ids


def test_special_tokens_that_were_added_as_ordinary_ones_are_safe(tmp_path: Path) -> None:
    plain = train_tokenizer(iter(["abc"]))
    text = plain.to_str().replace('"special":true', '"special":false')
    assert text != plain.to_str()
    (tmp_path / "t.json").write_text(text)
    tokenizer = ChatTokenizer.load(tmp_path / "t.json")
    ids = tokenizer.encode(sample(("user", IMAGE_TOKEN), ("assistant", "x")), {}).ids
    assert tokenizer.item_ids["vision"][0] not in ids


def test_a_tokenizer_without_the_chat_tokens_is_rejected_with_a_suggestion(tmp_path: Path) -> None:
    Tokenizer(models.BPE()).save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match=r"lacks the special tokens <\|pad\|> <\|system\|>.*add_special_tokens"):
        ChatTokenizer.load(tmp_path / "t.json")


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_an_unreadable_tokenizer_is_rejected(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(DataError, match=r"data\.tokenizer: .*t\.json"):
        ChatTokenizer.load(tmp_path / "t.json")


def test_thoughts_are_learned_in_front_of_the_answer(tokenizer_path: Path) -> None:
    tokenizer = ChatTokenizer.load(tokenizer_path)
    for key in ("reasoning_content", "reasoning", "thinking"):
        answer = {"role": "assistant", "content": "3", key: " 1 + 2 = 3\n"}
        entry = {"messages": [{"role": "user", "content": "1 + 2?"}, answer]}
        sample = build_sample(entry, "x.json", 0, lambda kind, value: FileMedia(value))
        encoded = tokenizer.encode(sample, {})
        learned = tokenizer.decode(encoded.labels[encoded.labels >= 0])
        assert learned == "<think>\n1 + 2 = 3\n</think>\n\n3"
        counts = tokenizer.length_counter(1000)(sample, {})
        assert counts == (len(encoded.ids), int((encoded.labels >= 0).sum()))
