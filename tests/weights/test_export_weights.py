"""An exported folder is the source folder with the weights of the run, bit for bit where nothing was trained."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmtrain.checkpoint import open_newest_good
from mmtrain.data.synthetic.tiny_tokenizer import write_tiny_tokenizer
from mmtrain.errors import CheckpointError, ModelFolderError, UserError
from mmtrain.families import FAMILIES
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.weights import export_folder, write_tensors
from mmtrain.weights.export_weights import describe_content
from mmtrain.weights.write_tensors import WeightReader, write_file
from tests.cli.conftest import RunMmtrain, run_mmtrain
from tests.runtime.models import run_folder
from tests.weights.comparison import content, unit_stage
from tests.weights.pretrained import glm4_moe, llama, mixtral, qwen2, recipe_from, save

__all__ = ["run_mmtrain"]

MODELS = {"qwen2": qwen2, "llama": lambda: llama(num_hidden_layers=2), "mixtral": mixtral, "glm4_moe": glm4_moe}


def run_from(folder: Path, stage: StageModule | None = None) -> Path:
    """Make a run that started from the folder, with a checkpoint of two ranks after step 7."""
    recipe = recipe_from(folder)
    run = folder.parent / "run"
    return run_folder(run, recipe, {"llm": stage or unit_stage(recipe)})


def loaded(run: Path) -> Any:
    return open_newest_good(run / CHECKPOINTS_FOLDER, print)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_give_the_same_bits(
    name: str, dtype: torch.dtype, tmp_path: Path, run_mmtrain: RunMmtrain
) -> None:
    folder = save(MODELS[name](), tmp_path / "model", dtype)
    if name == "glm4_moe":
        _add_further_block(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}", encoding="utf-8")
    (folder / "LICENSE").write_text("free", encoding="utf-8")
    for name in ("training_args.bin", "README.md", "conversations.json"):
        (folder / name).write_bytes(b"of the model before")
    out = tmp_path / "exports" / "first"
    done = run_mmtrain("export", run_from(folder), "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{out}: weights after step 7, 1 file, ")
    assert f"vllm serve {out}" in done.stdout
    assert "lmms_eval" not in done.stdout  # its tasks are about pictures
    assert content(out) == content(folder)
    assert {path.name for path in out.iterdir()} == {
        "LICENSE", "README.md", "additional_chat_templates", "chat_template.jinja", "config.json",
        "generation_config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    assert "of the model before" not in (out / "README.md").read_text(encoding="utf-8"), "a card of its own"
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text(encoding="utf-8") == "{{ tools }}"
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert list(out.parent.iterdir()) == [out]


def _add_further_block(folder: Path) -> None:
    """Add tensors of a block that predicts further tokens, as folders of the hub have them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.3.enorm.weight"] = torch.rand(48)
    tensors["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.rand(28, 48)
    save_file(tensors, path, {"format": "pt"})


def test_large_models_are_split_and_transformers_opens_them(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = qwen2(tie_word_embeddings=False)
    folder = save(theirs, tmp_path / "model", max_shard_size="60KB")
    run = run_from(folder)
    out = tmp_path / "out"
    written = export_folder(recipe_from(folder), loaded(run), out, max_file_bytes=50_000)
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    assert written.num_files == len(sizes) > 3
    assert max(sizes) < 50_000 + 4_000  # and the header
    assert not (out / "model.safetensors").exists()
    assert content(out) == content(folder)
    index = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == written.num_bytes
    opened = AutoModelForCausalLM.from_pretrained(out)
    for (name, expected), (_, param) in zip(theirs.named_parameters(), opened.named_parameters(), strict=True):
        assert torch.equal(expected, param), name


def test_another_dtype_is_stated_in_the_config(tmp_path: Path, run_mmtrain: RunMmtrain) -> None:
    folder = save(qwen2(), tmp_path / "model")
    out = tmp_path / "out"
    assert run_mmtrain("export", run_from(folder), "--out", out, "--dtype", "bf16", "--checkpoint", 7).returncode == 0
    assert {dtype for dtype, _, _ in content(out).values()} == {"torch.bfloat16"}
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config == {**json.loads((folder / "config.json").read_text(encoding="utf-8")), "dtype": "bfloat16"}


def test_a_step_without_checkpoint_is_named(tmp_path: Path, run_mmtrain: RunMmtrain) -> None:
    run = run_from(save(qwen2(), tmp_path / "model"))
    done = run_mmtrain("export", run, "--out", tmp_path / "out", "--checkpoint", 8)
    assert done.returncode == CheckpointError.exit_code
    assert "no good checkpoint of step 8" in done.stderr
    assert "there are checkpoints of steps 7" in done.stderr


def test_nothing_is_written_over_a_folder(tmp_path: Path) -> None:
    folder = save(qwen2(), tmp_path / "model")
    run = run_from(folder)
    before = content(folder)
    with pytest.raises(UserError, match=r"--out .*model: exists already"):
        export_folder(recipe_from(folder), loaded(run), folder)
    assert content(folder) == before


def test_tensors_are_written_without_sums_and_mostly_without_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(qwen2(), tmp_path / "model")
    run = run_from(folder)
    recipe, checkpoint = recipe_from(folder), loaded(run)
    targets = describe_content(recipe, None).targets
    reader = WeightReader(None, checkpoint, {})
    copied = set()
    for target in targets:
        tensor = reader.read(target)
        assert reader._parameter is not None
        memory = reader._parameter[1].untyped_storage()
        if tensor.untyped_storage().data_ptr() != memory.data_ptr():
            copied.add(target.entry.name.split(".")[-2])
    assert copied == {"q_proj", "k_proj", "v_proj"}, "only their rows lie in several places of a parameter"

    monkeypatch.setattr(hashlib, "sha256", None)
    write_file(tmp_path / "tensors.safetensors", targets, reader)
    assert load_file(tmp_path / "tensors.safetensors").keys() == {target.entry.name for target in targets}


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(qwen2(), tmp_path / "model")
    run = run_from(folder)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write_tensors, "write_durably", fail)
    with pytest.raises(UserError, match=r"--out .*: cannot write the model: No space left on device"):
        export_folder(recipe_from(folder), loaded(run), tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


def test_runs_that_no_folder_can_hold_are_refused(tmp_path: Path) -> None:
    folder = save(qwen2(), tmp_path / "model")
    run = run_from(folder)
    vision = "model.vision={layers: 1, hidden: 16, heads: 2, ffn: 24, max_side: 4}"
    write_tiny_tokenizer(folder, ["What is in the picture?"], FAMILIES["qwen2"])
    of_data = ("data.image={min_pixels: 196, max_pixels: 196}", f"data.tokenizer={folder}", "data.seq_len=128")
    recipe = recipe_from(folder, vision, *of_data)
    with pytest.raises(UserError, match=r"no family of models has all of its settings; the nearest is llava"):
        export_folder(recipe, loaded(run), tmp_path / "out")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelFolderError, match=r"model\.hf: .*config\.json: model_type 'None' is not supported"):
        export_folder(recipe, loaded(run), tmp_path / "out")
