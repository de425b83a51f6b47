"""Ids, labels, prompts and lengths of every family with published vocabularies; transformers is the judge."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX, SampleTokenizer
from mmtrain.families import FAMILIES
from tests.data.chat_families import CHAT_FAMILIES, write_chat_folder
from tests.data.chat_judge import ChatJudge, chat_judge
from tests.data.drawn_conversations import draw_conversation

_TOKENIZERS: dict[tuple[str, ...], Any] = {}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chat")


@contextmanager
def opened(root: Path, name: str) -> Iterator[tuple[SampleTokenizer, ChatJudge]]:
    folder = root / name if (root / name).exists() else write_chat_folder(root, name)
    with chat_judge(folder, name, _TOKENIZERS) as judge:
        yield load_tokenizer(folder), judge


def test_every_family_is_judged() -> None:
    assert {chat.family for chat in CHAT_FAMILIES.values()} == set(FAMILIES)


# Those whose vocabulary opens in a second are judged in the quick tests too.
_QUICK = ("mistral", "qwen3")
_TO_MEND = ("gemma3", "gemma3_text", "llava", "llava_next")


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, 20) for name in _QUICK]
    + [pytest.param(name, 60, marks=pytest.mark.slow) for name in sorted(CHAT_FAMILIES) if name not in _TO_MEND],
)
def test_conversations_are_those_of_transformers(name: str, number: int, root: Path) -> None:
    random = Random(1)
    with opened(root, name) as (tokenizer, judge):
        count = tokenizer.length_counter(1_000_000)
        for _ in range(number):
            drawn = draw_conversation(CHAT_FAMILIES[name], random)
            sample, features = drawn.sample, drawn.features
            expected = judge.judge(drawn)
            encoded = tokenizer.encode(sample, features)
            assert encoded.ids.tolist() == expected.ids, drawn.messages
            labels = [IGNORE_INDEX] * len(expected.ids)
            labels[:-1] = [
                token if is_target else IGNORE_INDEX
                for token, is_target in zip(expected.ids[1:], expected.is_target[1:], strict=True)
            ]
            assert encoded.labels.tolist() == labels, drawn.messages
            assert count(sample, features) == (len(expected.ids), sum(expected.is_target))
            assert tokenizer.prompt_ids(sample, features).tolist() == judge.prompt(drawn)
