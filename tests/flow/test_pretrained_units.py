"""Units that start from folders of their own, on plans that split them over tensor-parallel and pipeline ranks."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mmtrain.checkpoint import open_newest_good
from mmtrain.families import FAMILIES
from mmtrain.planning.whatif import plan_again
from mmtrain.recipe import load_recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.weights import export_folder
from mmtrain.weights.tiny_model import write_tiny_model
from tests.flow.runs import refuse, run_all
from tests.models.factory import randomize
from tests.plans import plan_recipe as planner
from tests.weights.pretrained import clip, qwen2, save

TINY_VOCAB = 512  # of the tokenizers of tiny models
RECIPE = """
name: units
model: {{vision: {{hf: {folder}/tower}}, llm: {{hf: {folder}/llm}}}}
data:
  sources: [{{path: {folder}/conversations/some.json}}]
  validation: [{{path: {folder}/conversations/others.json}}]
  seq_len: 256
  workers: 0
parallel: {parallel}
cluster: {{hardware: cpu-core}}
train:
  steps: 3
  global_batch: 4
  validate_every: 3
  checkpoint: {{every: 3}}
  optimizer: {{lr: 3.0e-4}}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tower of CLIP, an LLM whose tokenizer has tokens for pictures, and conversations about pictures."""
    from transformers import CLIPVisionModel

    folder = tmp_path_factory.mktemp("units")
    write_tiny_model(FAMILIES["llava"], folder / "llava", seed=0)
    tower = CLIPVisionModel(clip())
    randomize(tower)
    save(tower, folder / "tower")
    save(qwen2(vocab_size=TINY_VOCAB), folder / "llm")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(folder / "llava" / name, folder / "llm" / name)
    conversations = (folder / "llava" / "conversations").rename(folder / "conversations")
    rows = json.loads((conversations / "train.json").read_text(encoding="utf-8"))
    for name, chosen in (("some", rows[:48]), ("others", rows[48:60])):
        (conversations / f"{name}.json").write_text(json.dumps(chosen), encoding="utf-8")
    return folder


def _train(folders: Path, run_dir: Path, num_ranks: int, parallel: str) -> None:
    recipe = run_dir.with_suffix(".yaml")
    recipe.write_text(RECIPE.format(folder=folders, parallel=parallel), encoding="utf-8")
    request = TrainRequest(load_recipe(recipe, env={}), planner, plan_again, "cpu-core", num_ranks, run_dir)
    assert run_all(*[request] * num_ranks) == [""] * num_ranks


@pytest.fixture(scope="module")
def on_one_rank(folders: Path) -> Path:
    _train(folders, folders / "run", 1, "{}")
    return folders / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        "{placement: disaggregated, vision: {tp: 2, pp: 1}, llm: {tp: 1, pp: 2}}",
        "{placement: colocated, vision: {tp: 2, pp: 1}, llm: {tp: 2, pp: 2}}",
        "{placement: unified, llm: {tp: 2, pp: 2}}",
    ],
    ids=["disaggregated", "colocated", "unified"],
)
def test_units_of_two_folders_train_alike_on_any_plan(
    parallel: str, folders: Path, on_one_rank: Path, tmp_path: Path
) -> None:
    """Compare with one rank, whose units compute what `transformers` computes; export both as one LLaVA."""
    from transformers import LlavaForConditionalGeneration

    _train(folders, tmp_path / "run", 4, parallel)
    rows, expected = read_metrics(tmp_path / "run"), read_metrics(on_one_rank)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-4)
    assert rows[-1]["val_loss"] == pytest.approx(expected[-1]["val_loss"], rel=1e-4)
    checkpoint = open_newest_good(tmp_path / "run" / CHECKPOINTS_FOLDER, refuse)
    export_folder(load_run_recipe(tmp_path / "run"), checkpoint, tmp_path / "out")
    model, loading = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    assert all(torch.isfinite(param).all() for param in model.parameters())
