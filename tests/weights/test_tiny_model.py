"""Tiny models of every family: folders that `transformers` and `model.hf` open."""

import json
from pathlib import Path

import pytest

from mmtrain.errors import DataError
from mmtrain.families import FAMILIES
from mmtrain.weights.tiny_model import find_family_by_name, write_tiny_model

SEED = 3


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_opens_it_and_renders_its_conversations(tmp_path: Path, family: str) -> None:
    import transformers

    summary = write_tiny_model(FAMILIES[family], tmp_path, SEED)
    model_class = getattr(transformers, FAMILIES[family].architectures[0])
    model, loading = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values()), loading
    assert sum(p.numel() for p in model.parameters()) == summary.parameters
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == summary.vocab
    conversations = json.loads((tmp_path / "conversations.json").read_text())
    assert len(conversations) == summary.conversations
    inputs = tokenizer.apply_chat_template(conversations[0]["messages"], return_tensors="pt", return_dict=True)
    assert model(**inputs, labels=inputs["input_ids"]).loss < 10


def test_the_same_seed_makes_the_same_files(tmp_path: Path) -> None:
    contents = []
    for name, seed in (("a", SEED), ("b", SEED), ("c", SEED + 1)):
        write_tiny_model(FAMILIES["llama"], tmp_path / name, seed)
        contents.append({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]
    assert contents[0]["model.safetensors"] != contents[2]["model.safetensors"]
    assert contents[0]["conversations.json"] != contents[2]["conversations.json"]


def test_other_folders_and_unknown_families_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(DataError, match="not empty and not a tiny model"):
        write_tiny_model(FAMILIES["llama"], tmp_path, SEED)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(DataError, match=r"FAMILY: found 'gpt5'; allowed: .*qwen2"):
        find_family_by_name("gpt5")
