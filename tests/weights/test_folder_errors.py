"""Folders whose weights cannot be read: everything that is wrong is named at once, before anything starts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmtrain.errors import ModelFolderError
from mmtrain.weights import open_pretrained
from tests.families.configs import QWEN2, write_config
from tests.weights.pretrained import qwen3_moe, qwen3_vl_moe, recipe_from, save

HIDDEN, FFN, VOCAB = QWEN2["hidden_size"], QWEN2["intermediate_size"], QWEN2["vocab_size"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a tiny Qwen2 without `transformers`."""
    folder = write_config(tmp_path / "model", QWEN2)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for block in range(2):
        prefix = f"model.layers.{block}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (HIDDEN,)
        for name, rows in (("q", 48), ("k", 16), ("v", 16)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, 48)
        for name in ("gate", "up"):
            shapes[f"{prefix}.mlp.{name}_proj.weight"] = (FFN, HIDDEN)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, FFN)
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def _change(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _error(folder: Path, *overrides: str) -> str:
    with pytest.raises(ModelFolderError) as caught:
        open_pretrained(recipe_from(folder, *overrides))
    return str(caught.value)


def test_a_good_folder_opens(folder: Path) -> None:
    weights = open_pretrained(recipe_from(folder))
    assert weights is not None
    assert weights.units == ("llm",)


def test_buffers_and_the_copy_of_a_tied_matrix_are_passed_over(folder: Path) -> None:
    extra = {"lm_head.weight": torch.ones(VOCAB, HIDDEN), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    _change(folder, lambda tensors: tensors.update(extra))
    assert open_pretrained(recipe_from(folder)) is not None


def test_missing_extra_and_misshaped_tensors_are_named_at_once(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.gates_proj.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")
        tensors["model.norm.weight"] = torch.ones(HIDDEN + 1)
        tensors["visual.patch_embed"] = torch.ones(2)
        tensors["model.layers.1.self_attn.q_proj.bias"] = torch.ones(48, dtype=torch.int8)

    _change(folder, change)
    error = _error(folder)
    assert "(qwen2), 5 differ:" in error
    for text in (
        "model.layers.0.mlp.gate_proj.weight: missing, [96, 48] expected "
        "(the nearest name is model.layers.0.mlp.gates_proj.weight)",
        "model.layers.0.mlp.gates_proj.weight: not a tensor of this model "
        "(the nearest name is model.layers.0.mlp.gate_proj.weight)",
        "visual.patch_embed: not a tensor of this model",
        "model.norm.weight: has the shape [49], [48] expected",
        "model.layers.1.self_attn.q_proj.bias: is stored as I8; allowed: F32, F16, BF16",
    ):
        assert text in error


def test_experts_that_a_folder_lacks_or_holds_quantized_are_named(tmp_path: Path) -> None:
    folder = save(qwen3_moe(num_hidden_layers=2, mlp_only_layers=[]), tmp_path / "model")
    experts = "model.layers.1.mlp.experts"

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{experts}.3.up_proj.weight"]
        _change_to_fp8(tensors, f"{experts}.5.down_proj.weight")

    _change(folder, change)
    error = _error(folder)
    assert "(qwen3_moe), 3 differ; they are quantized, and cannot be trained: use the folder of the bf16" in error
    for text in (
        f"{experts}.3.up_proj.weight: missing, [28, 48] expected",
        f"{experts}.5.down_proj.weight: is stored as F8_E4M3; allowed: F32, F16, BF16",
        f"{experts}.5.down_proj.weight_scale_inv: not a tensor of this model",
    ):
        assert text in error


def _change_to_fp8(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)


def test_tensors_of_all_experts_of_another_shape_are_named(tmp_path: Path) -> None:
    folder = save(qwen3_vl_moe(), tmp_path / "model")
    name = "model.language_model.layers.2.mlp.experts.down_proj"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:-1].clone()
        del tensors[name.replace("down_proj", "gate_up_proj")]

    _change(folder, change)
    error = _error(folder, "data.image.min_pixels=16", "data.image.max_pixels=576")
    assert "(qwen3_vl_moe), 2 differ:" in error
    assert f"{name}: has the shape [5, " in error
    assert f"{name.replace('down_proj', 'gate_up_proj')}: missing, [6, " in error


def test_weights_of_another_model_do_not_fill_the_screen(folder: Path) -> None:
    write_config(folder, QWEN2, num_hidden_layers=60)
    error = _error(folder)
    assert "and 656 more" in error
    assert len(error.splitlines()) == 42


def test_a_folder_without_weights_can_be_planned_but_not_trained(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "holds no weights; allowed: model.safetensors, or model.safetensors.index.json" in _error(folder)


def test_a_file_that_was_cut_off_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    assert f"{path}: no complete safetensors file: it has {len(content) - 10} bytes" in _error(folder)
    path.write_bytes(content[:100])
    assert f"{path}: no complete safetensors file: its header is cut off" in _error(folder)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}, "missing: model-1.safetensors, mo"),
        ({"weight_map": {"a": "../model/model.safetensors"}}, "names files outside the folder"),
        ({"weights": {}}, "no index of weights (KeyError: 'weight_map')"),
        ({"weight_map": {"a": 3}}, "names files that are missing: 3"),
    ],
)
def test_a_damaged_index_is_named(folder: Path, index: dict[str, object], text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert text in _error(folder)
