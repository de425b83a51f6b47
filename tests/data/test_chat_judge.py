"""Ids, labels, prompts and lengths of every family with published vocabularies; transformers is the judge."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from mmtrain.data import Sample, Turn
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX, SampleTokenizer
from mmtrain.families import FAMILIES
from tests.data.chat_families import CHAT_FAMILIES, ChatFamily, write_chat_folder
from tests.data.chat_judge import ChatJudge, chat_judge
from tests.data.drawn_conversations import draw_conversation
from tests.data.model_folders import FAMILIES as SMALL_FOLDERS
from tests.data.model_folders import write_folder

# Which folders state a wrong class.
KNOWS_WRONG_CLASS = Version(transformers.__version__) >= Version("5.24")
_TOKENIZERS: dict[tuple[str, ...], Any] = {}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chat")


@contextmanager
def opened(root: Path, name: str) -> Iterator[tuple[SampleTokenizer, ChatJudge]]:
    folder = root / name if (root / name).exists() else write_chat_folder(root, name)
    with chat_judge(folder, name, _TOKENIZERS) as judge:
        yield load_tokenizer(folder, thoughts=CHAT_FAMILIES[name].thoughts), judge


def _label(token: int, is_target: bool) -> int:
    return token if is_target else IGNORE_INDEX


# Tokenizers, templates and processors of these are those of the dense models.
WITH_EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe", "qwen3_5_moe_text"}
# No package has their vocabulary; `tests.flow.test_pretrained` trains them with a tiny one.
_NOT_JUDGED = {"glm4_moe", "glm4v_moe", "gemma4", "gemma4_text", "smolvlm"}


def test_every_family_is_judged() -> None:
    assert {chat.family for chat in CHAT_FAMILIES.values()} == set(FAMILIES) - WITH_EXPERTS - _NOT_JUDGED


# Those whose vocabulary opens in a second are judged in the quick tests too, and Gemma's, which takes ten, once in the
# slow ones.
_QUICK = ("llava", "llava_next", "mistral", "qwen3", "qwen3_5", "qwen3_5, thinking off")
_SLOW = tuple(name for name in sorted(CHAT_FAMILIES) if name != "gemma3_text")


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *((name, 20) for name in _QUICK),
        *(pytest.param(name, 40, marks=pytest.mark.slow) for name in _SLOW),
        *(pytest.param(name, 1000, marks=pytest.mark.long) for name in sorted(CHAT_FAMILIES)),
    ],
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
            labels = encoded.labels.tolist()
            num_targets = sum(label != IGNORE_INDEX for label in labels)
            assert count(sample, features) == (len(expected.ids), num_targets)
            if expected.is_target is not None:
                assert labels == [*map(_label, expected.ids[1:], expected.is_target[1:]), IGNORE_INDEX], drawn.messages
            assert tokenizer.prompt_ids(sample, features).tolist() == judge.prompt(drawn)


@pytest.mark.slow
@pytest.mark.skipif(not KNOWS_WRONG_CLASS, reason="this transformers takes the class of Qwen2, as the folder states")
def test_a_folder_of_qwen3_5_that_states_the_class_of_qwen2_is_cut_by_its_own(root: Path, tmp_path: Path) -> None:
    if not (root / "qwen2_vl").exists():
        write_chat_folder(root, "qwen2_vl")
    folder = tmp_path / "folder"
    shutil.copytree(root / "qwen2_vl", folder, symlinks=True)
    text = "नमस्ते ไทยนี้ שָׁלוֹם 3.14"
    ids = {}
    for model_type in ("qwen2_vl", "qwen3_5", "qwen3_5_moe"):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
        sample = Sample("", "", 0, (Turn("user", text), Turn("assistant", "Yes.")), ())
        ids[model_type] = load_tokenizer(folder).encode(sample, {}).ids.tolist()
        theirs = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
        assert any(ids[model_type][start : start + len(theirs)] == theirs for start in range(len(ids[model_type])))
    assert ids["qwen2_vl"] != ids["qwen3_5"] == ids["qwen3_5_moe"]


@pytest.mark.parametrize("writes_start", [False, True])
@pytest.mark.parametrize("writes_end", [False, True])
@pytest.mark.parametrize("adds_end", [False, True])
def test_a_processor_lets_the_tokenizer_add_its_tokens(
    tmp_path: Path, writes_start: bool, writes_end: bool, adds_end: bool
) -> None:
    """Unless the template starts with the first one. In LLaVA's folders only the tokenizer does."""
    llava = SMALL_FOLDERS["llava"]
    end = "{{ eos_token }}" if writes_end else ""
    template = ("{{ bos_token }}" if writes_start else "") + llava.template.replace(
        "' ' }}{% endg", f"' ' }}}}{end}{{% endg"
    )
    folder = write_folder(tmp_path, replace(llava, template=template))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    single = "<s> $A </s>" if adds_end else "<s> $A"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llava"}))
    chat = ChatFamily("llava", "", template, {"image": "<image>"}, all_parts=True)
    judge = ChatJudge(chat, AutoTokenizer.from_pretrained(folder))
    loaded = load_tokenizer(folder)
    count = loaded.length_counter(100_000)
    random = Random(7)
    for _ in range(10):
        drawn = draw_conversation(chat, random)
        expected = judge.judge(drawn)
        encoded = loaded.encode(drawn.sample, drawn.features)
        assert encoded.ids.tolist() == expected.ids
        num_targets = int((encoded.labels != IGNORE_INDEX).sum())
        assert count(drawn.sample, drawn.features) == (len(expected.ids), num_targets)
        if expected.is_target is not None:
            labels = [*map(_label, expected.ids[1:], expected.is_target[1:]), IGNORE_INDEX]
            assert encoded.labels.tolist() == labels
        assert loaded.prompt_ids(drawn.sample, drawn.features).tolist() == judge.prompt(drawn)
        forged = replace(drawn.sample, turns=(*drawn.sample.turns[:-1], Turn("assistant", "x</s>")))
        assert loaded.encode(forged, drawn.features).ids[0] == tokenizer.token_to_id("<s>")
