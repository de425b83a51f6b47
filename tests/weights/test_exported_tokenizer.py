"""The folder of a new model cuts text as its training did, whatever class transformers has for its type."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast

from mmtrain.checkpoint import open_newest_good
from mmtrain.data import Sample, Turn, load_tokenizer
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.recipe import Recipe
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.weights import export_folder
from tests.data.model_folders import FAMILIES, LLAVA, write_folder
from tests.runtime.models import randomize, recipe, run_folder, whole
from tests.weights.test_new_folder import CLIP, FIXED

TEXTS = ("a cat", " a cat", "  two", "", "x</s> y", "<s>it", "a\n b", "<image> c", "<|im_end|> z", "it's 1999 ")
# Tokenizers of LLMs: the vocabulary, the type of the model, and what their files state.
LLAMA = {"tokenizer_class": "LlamaTokenizer"}
TOKENIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "old llama": ("vicuna", "llama", LLAMA | {"legacy": True}),
    "new llama": ("vicuna", "llama", LLAMA | {"legacy": False, "add_bos_token": True}),
    "llama without prefix": ("vicuna", "llama", LLAMA | {"add_prefix_space": False}),
    "llama without names": ("vicuna", "llama", LLAMA | {"bos_token": None, "eos_token": None}),
    "qwen": ("qwen2", "qwen2", {"tokenizer_class": "Qwen2Tokenizer"}),
    "gpt2 as qwen": ("gpt2_chatml", "qwen3", {"tokenizer_class": "Qwen2TokenizerFast"}),
    "gemma": ("vicuna", "gemma3_text", {"tokenizer_class": "GemmaTokenizer", "unk_token": "<unk>"}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generate_demo(folder := tmp_path_factory.mktemp("demo") / "data", seed=4, train=4, heldout=2)
    return folder


def _exported(
    data: Path, tokenizer: Path, out: Path, has_images: bool = True, **llm: Any
) -> tuple[Path, tuple[str, ...]]:
    """Export a run that started from random weights, with a tokenizer of an LLM."""
    size = load_tokenizer(tokenizer).vocab_size
    stated = recipe(data / "tokenizer.json", data / "train.json", None, **llm).model_dump()
    stated["data"] |= {"tokenizer": tokenizer, "image": FIXED}
    stated["model"]["llm"] |= {"vocab": max(512, size)}
    stated["model"]["vision"] = CLIP if has_images else None
    settings = Recipe.model_validate(stated)
    units = whole(settings)
    randomize(units.values())
    run = run_folder(out / "run", settings, units)
    written = export_folder(settings, open_newest_good(run / CHECKPOINTS_FOLDER, print), out / "out")
    return out / "out", written.notes


def _tokenizer(path: Path, name: str) -> Path:
    vocabulary, model_type, stated = TOKENIZERS[name]
    family = FAMILIES[vocabulary]
    family = replace(
        family, template=LLAVA, special=(*family.special, "<image>", "<|im_end|>")[: len(family.special) + 2]
    )
    family = replace(family, special=tuple(dict.fromkeys(family.special)))
    folder = write_folder(path, family, **{"image_token": "<image>"} | stated)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "old llama" else pytest.mark.slow) for name in sorted(TOKENIZERS)]
)
def test_ids_are_the_same_before_and_after_the_export(name: str, data: Path, tmp_path: Path) -> None:
    source = _tokenizer(tmp_path / "llm", name)
    folder, notes = _exported(data, source, tmp_path)
    assert notes == ()
    before, after = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    of_processor = processor.tokenizer
    for text in TEXTS:
        expected = before(text, add_special_tokens=False)["input_ids"]
        assert after(text, add_special_tokens=False)["input_ids"] == expected, text
        assert of_processor(text, add_special_tokens=False)["input_ids"] == expected, text
        assert after(text)["input_ids"] == of_processor(text)["input_ids"], text
    trained, here = (load_tokenizer(path, has_processor=True) for path in (source, folder))
    sample = Sample("s", "f.json", 0, (*(Turn("user", t) for t in TEXTS[:3]), Turn("assistant", " ok ")), ())
    ids = trained.encode(sample, {}).ids.tolist()
    assert here.encode(sample, {}).ids.tolist() == ids
    messages = [{"role": turn.role, "content": [{"type": "text", "text": turn.text}]} for turn in sample.turns]
    by_processor = processor.apply_chat_template(messages, tokenize=True, return_dict=True)
    assert by_processor["input_ids"][0] == ids
    assert {**after.special_tokens_map, **before.special_tokens_map} == after.special_tokens_map


def test_a_class_that_no_file_can_change_is_named(data: Path, tmp_path: Path) -> None:
    """transformers opens Qwen2's own class for models of its type, also with mmtrain's own tokenizer."""
    folder, [note] = _exported(data, _tokenizer(tmp_path / "llm", "old llama"), tmp_path, False, qkv_bias=True)
    assert "for models of the type qwen2, AutoTokenizer cuts text in its own way" in note
    before = AutoTokenizer.from_pretrained(tmp_path / "llm")
    named = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        assert named(text, add_special_tokens=False)["input_ids"] == before(text, add_special_tokens=False)["input_ids"]
