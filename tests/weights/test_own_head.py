"""A config that ties the embeddings, beside an output matrix with values of its own: `transformers` does not tie."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mmtrain.families import read_model_folder
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.weights.inspect_folder import inspect_folder
from tests.weights.comparison import assert_equal_gradients, content, export_again, full_gradients, unit_stage
from tests.weights.pretrained import (
    VOCAB,
    gemma3,
    gemma3_text,
    internvl,
    llava,
    llava_onevision,
    mistral3,
    qwen2,
    qwen2_5_omni,
    qwen2_5_vl,
    qwen2_vl,
    qwen3,
    qwen3_vl,
    recipe_from,
    save,
)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gemma3": gemma3,
    "gemma3_text": gemma3_text,
    "internvl": internvl,
    "llava": lambda: llava(tie_word_embeddings=True),
    "llava_onevision": lambda: llava_onevision(tie_word_embeddings=True),
    "mistral3": lambda: mistral3(tie_word_embeddings=True),
    "qwen2": qwen2,
    "qwen2_5_omni": qwen2_5_omni,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_vl": qwen2_vl,
    "qwen3": lambda: qwen3(tie_word_embeddings=True),
    "qwen3_vl": qwen3_vl,
}
HEADS = {  # by the prefix of the decoder
    "model.embed_tokens.weight": "lm_head.weight",
    "model.language_model.embed_tokens.weight": "lm_head.weight",
    "language_model.model.embed_tokens.weight": "language_model.lm_head.weight",
}


def _tied(name: str, folder: Path) -> Path:
    """Save a model whose config ties the embeddings."""
    save(MODELS[name](), folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    return folder


def _with_head(folder: Path, is_copy: bool) -> None:
    """Add an output matrix to the files: a copy of the embeddings, or one that differs in its last number only."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    [table] = [name for name in tensors if name in HEADS]
    head = tensors[table].clone()
    if not is_copy:
        head[-1, -1] += 1
    save_file({**tensors, HEADS[table]: head}, path, {"format": "pt"})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_copy", [True, False])
def test_they_are_tied_where_transformers_ties_them(name: str, is_copy: bool, tmp_path: Path) -> None:
    folder = _tied(name, tmp_path / "model")
    _with_head(folder, is_copy)
    theirs = type(MODELS[name]()).from_pretrained(folder)
    is_tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    assert is_tied == is_copy
    read = read_model_folder(folder)
    assert (read.settings.model["llm"]["tie_embeddings"], read.has_own_head) == (is_tied, not is_tied)
    assert inspect_folder(folder).tensors_passed_over == (() if not is_tied else _heads_in(folder))


def _heads_in(folder: Path) -> tuple[str, ...]:
    return tuple(name for name in load_file(folder / "model.safetensors") if name in HEADS.values())


def test_the_model_is_trained_with_its_own_head(tmp_path: Path) -> None:
    from transformers import Qwen2ForCausalLM

    folder = _tied("qwen2", tmp_path / "model")
    path = folder / "model.safetensors"
    head = torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(5))
    save_file({**load_file(path), "lm_head.weight": head}, path, {"format": "pt"})
    theirs = Qwen2ForCausalLM.from_pretrained(folder).eval()
    ours = unit_stage(recipe_from(folder))
    ids = torch.randint(0, VOCAB, (90,), generator=torch.Generator().manual_seed(3))
    expected = theirs(input_ids=ids[None], labels=ids[None])
    loss = ours(None, TextInput((90,), ids, torch.cat([ids[1:], torch.tensor([-100])]))) / 89
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    loss.backward()
    expected.loss.backward()
    assert_equal_gradients(folder, theirs, full_gradients(ours))


@pytest.mark.parametrize("name", ["gemma3", "qwen2", "qwen2_vl"])
def test_the_exported_config_does_not_tie(name: str, tmp_path: Path) -> None:
    """Servers that go by the config alone would tie them."""
    folder = _tied(name, tmp_path / "model")
    _with_head(folder, is_copy=False)
    out = export_again(folder, recipe_from(folder, "data.seq_len=131072"))
    assert content(out) == content(folder)
    config = json.loads((out / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    assert not config.get("text_config", {}).get("tie_word_embeddings", False)
    assert not read_model_folder(out).has_own_head


def test_weights_that_are_damaged_are_left_to_whoever_opens_them(tmp_path: Path) -> None:
    folder = _tied("qwen2", tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"cut off")
    assert read_model_folder(folder).settings.model["llm"]["tie_embeddings"]
