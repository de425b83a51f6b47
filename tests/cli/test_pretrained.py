"""`model.hf`: planning needs a folder's config only, and training reports weights that do not fit before it starts."""

import json
from pathlib import Path

import pytest

from mmtrain.families import FAMILIES
from mmtrain.weights.tiny_model import write_tiny_model
from tests.cli.conftest import RunMmtrain
from tests.families.configs import QWEN2, write_config
from tests.weights.tiny_folders import FEW_CONVERSATIONS


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Write a recipe beside a folder with a config of Qwen2.5-7B, and lengths in place of data."""
    write_config(
        tmp_path / "qwen", QWEN2, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False,
    )  # fmt: skip
    (tmp_path / "lengths.csv").write_text("count,text\n64,900\n64,4000\n", encoding="utf-8")
    path = tmp_path / "sft.yaml"
    path.write_text(
        """
name: sft
model: {hf: qwen}
data: {sources: [{path: lengths.csv}], seq_len: 4096}
cluster: {hardware: h100-80g, ranks: 8}
train: {steps: 10, global_batch: 64, optimizer: {lr: 1e-5}}
""",
        encoding="utf-8",
    )
    return path


def test_planning_needs_the_config_only(run_mmtrain: RunMmtrain, recipe: Path) -> None:
    done = run_mmtrain("plan", recipe, "--set", "parallel.llm={tp: 2, pp: 2}", "--json")
    assert done.returncode == 0, done.stderr
    layers = [stage["layers"] for stage in json.loads(done.stdout)["units"]["llm"]["stages"]]
    assert max(hi for _, hi in layers) == 30


def test_a_folder_is_described(run_mmtrain: RunMmtrain, recipe: Path, tmp_path: Path) -> None:
    done = run_mmtrain("inspect", tmp_path / "qwen")
    assert done.returncode == 0, done.stderr
    assert "qwen2, training can start from it (model.hf)" in done.stdout
    assert "llm: 7,615,616,512 parameters, 28 blocks, 3584 wide, 28 heads" in done.stdout  # as its model card says
    assert "weights: none; it can be planned for, not trained from" in done.stdout

    write_tiny_model(FAMILIES["llama"], tmp_path / "llama", seed=0, num_train=FEW_CONVERSATIONS)
    summary = json.loads(run_mmtrain("inspect", tmp_path / "llama", "--json").stdout)
    assert [unit["name"] for unit in summary["units"]] == ["llm"]
    assert summary["dtypes"] == ["float32"]
    assert summary["found_in"] == {"tokenizer": "tokenizer.json", "chat template": "chat_template.jinja"}
    assert summary["text_problems"] == []
    assert summary["media_tokens"] == {}
    template = tmp_path / "llama" / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8").replace("<|im_end|>", ""), encoding="utf-8")
    shown = run_mmtrain("inspect", tmp_path / "llama").stdout
    assert f"conversations: {template}: the chat template writes no token that ends an answer" in shown
    write_config(tmp_path / "qwen", QWEN2, hidden_act="gelu")
    done = run_mmtrain("inspect", tmp_path / "qwen")
    assert (done.returncode, 'hidden_act: "gelu" is not supported yet' in done.stderr) == (2, True)


def test_what_lies_in_another_file_is_not_said_to_be_missing(run_mmtrain: RunMmtrain, tmp_path: Path) -> None:
    """Write a folder as newer versions of `transformers` do, and the template as older ones: both are read."""
    folder = tmp_path / "omni"
    write_tiny_model(FAMILIES["qwen2_5_omni"], folder, seed=0, num_train=FEW_CONVERSATIONS)
    shown = run_mmtrain("inspect", folder).stdout
    assert "not there" not in shown
    assert "image processor in preprocessor_config.json, feature extractor in preprocessor_config.json\n" in shown
    template = folder / "chat_template.jinja"
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = template.read_text(encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    template.unlink()
    processors = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    both = {"image_processor": processors, "feature_extractor": processors}
    (folder / "processor_config.json").write_text(json.dumps(both), encoding="utf-8")
    (folder / "preprocessor_config.json").unlink()
    shown = run_mmtrain("inspect", folder).stdout
    assert "not there" not in shown
    assert (
        "  beside them: tokenizer in tokenizer.json, chat template in tokenizer_config.json (chat_template), "
        "image processor in processor_config.json, feature extractor in processor_config.json\n"
    ) in shown
    (folder / "processor_config.json").unlink()
    assert "not there: image processor, feature extractor\n" in run_mmtrain("inspect", folder).stdout


def test_what_images_and_sound_cost_is_shown(run_mmtrain: RunMmtrain, tmp_path: Path) -> None:
    """Use a folder that takes pictures of at most 16 tokens, and Whisper's 50 features a second in pairs."""
    write_tiny_model(FAMILIES["qwen2_5_omni"], tmp_path / "omni", seed=0, num_train=FEW_CONVERSATIONS)
    shown = run_mmtrain("inspect", tmp_path / "omni").stdout
    costs = "image of 336 x 336 16; image of 1280 x 960 12; image of 3840 x 2160 15; second of sound 25"
    assert f"  LLM tokens: {costs}\n" in shown


def test_training_without_the_weights_starts_nothing(run_mmtrain: RunMmtrain, recipe: Path, tmp_path: Path) -> None:
    text = recipe.read_text(encoding="utf-8").replace("lengths.csv}]", "samples.json}], tokenizer: tokenizer.json")
    recipe.write_text(text.replace("cluster: {hardware: h100-80g, ranks: 8}", ""), encoding="utf-8")
    done = run_mmtrain("train", recipe, "--run-dir", tmp_path / "run")
    assert done.returncode == 2
    assert "qwen holds no weights; allowed: model.safetensors" in done.stderr
    assert not (tmp_path / "run").exists()
