"""Forms of part in which chat templates read media: found by probing, or refused with what to do."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.data import Sample, Turn, load_tokenizer
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.text.template_tokenizer import TemplateTokenizer
from tests.data.chat_families import QWEN2_AUDIO
from tests.data.model_folders import CHATML, FAMILIES, write_folder

AUDIO_TOKENS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
QWEN2_AUDIO_SHAPE = replace(
    FAMILIES["qwen2"],
    special=(*FAMILIES["qwen2"].special, *AUDIO_TOKENS),
    named={**FAMILIES["qwen2"].named, "audio_token": "<|AUDIO|>"},
)


def folder_of(path: Path, template: str, model_type: str = "qwen2_audio") -> Path:
    folder = write_folder(path, replace(QWEN2_AUDIO_SHAPE, template=template))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def prompt_of(tokenizer: TemplateTokenizer) -> str:
    turns = (Turn("user", "<audio>What is this? <audio>"), Turn("assistant", "a bell"))
    sample = Sample("s", "f.json", 0, turns, (), clips=(FileMedia("a.wav"), FileMedia("b.wav")))
    ids = tokenizer.prompt_ids(sample, {"audio": [2, 1]})
    assert tokenizer.length_counter(1000)(sample, {"audio": [2, 1]})[0] == len(
        tokenizer.encode(sample, {"audio": [2, 1]}).ids
    )
    return str(tokenizer._tokenizer.decode(ids.tolist(), skip_special_tokens=False))


@pytest.mark.parametrize(
    "condition",
    [
        "part['type'] == 'audio'",
        "'audio' in part",
        "'audio_url' in part",
        "'audio' in part or 'audio_url' in part or message['type'] == 'audio'",
        "part['audio_url']",
        "part.audio_url and part.audio_url.url",
        "part.type == 'audio_url'",
        "part.type == 'audio_url' and part.audio_url is string",
        "part.get('url')",
        "part.type == 'audio' and (part.path or part.url)",
        "part.type == 'input_audio'",
        "part.input_audio is defined and part.input_audio.data",
    ],
)
def test_a_template_gets_the_form_of_part_that_it_reads(tmp_path: Path, condition: str) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path, QWEN2_AUDIO.replace("AUDIO_PART", condition)))
    assert isinstance(tokenizer, TemplateTokenizer)
    clips = "Audio 1: <|audio_bos|><|AUDIO|><|AUDIO|><|audio_eos|>\n", "Audio 2: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
    assert f"user\n{clips[0]}What is this? {clips[1]}<|im_end|>" in prompt_of(tokenizer)
    assert tokenizer.warnings == ()


@pytest.mark.parametrize("condition", ["part.type == 'sound'", "'audio_file' in part", "false", "part.audio_url.of"])
def test_a_template_that_reads_another_form_is_refused(tmp_path: Path, condition: str) -> None:
    """And no feature tokens are put into texts instead."""
    tokenizer = load_tokenizer(folder_of(tmp_path, QWEN2_AUDIO.replace("AUDIO_PART", condition)))
    assert "audio" not in tokenizer.item_ids
    reason = tokenizer.describe_missing_item_token("audio")
    assert "chat template reads the parts of a message, but does not write <|AUDIO|> for a part of audio" in reason
    assert 'let it write <|AUDIO|> for {"type": "audio"}' in reason


def test_a_template_that_writes_another_token_is_refused(tmp_path: Path) -> None:
    other = QWEN2_AUDIO.replace("AUDIO_PART", "part.type == 'audio'").replace("<|AUDIO|>", "<|audio_bos|>")
    tokenizer = load_tokenizer(folder_of(tmp_path, other))
    assert "it writes <|audio_bos|> <|audio_eos|>; let it" in tokenizer.describe_missing_item_token("audio")


@pytest.mark.parametrize(("model_type", "is_said"), [("qwen2_audio", True), ("qwen2", False)])
def test_placeholders_in_the_texts_of_a_template_for_texts_are_said(
    tmp_path: Path, model_type: str, is_said: bool
) -> None:
    """To those whose model has media: a vocabulary may have tokens for them without."""
    tokenizer = load_tokenizer(folder_of(tmp_path, CHATML, model_type))
    assert isinstance(tokenizer, TemplateTokenizer)
    assert "user\n<|AUDIO|><|AUDIO|>What is this? <|AUDIO|><|im_end|>" in prompt_of(tokenizer)
    assert len(tokenizer.warnings) == is_said
    if is_said:
        assert "is one for texts, so that <|AUDIO|> is written into the text" in tokenizer.warnings[0]
