"""A run that starts from the folder of Qwen2-Audio, on four ranks, and the folder that is exported from it."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F

from mmtrain.checkpoint import open_newest_good
from mmtrain.data import build_index
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.families import FAMILIES
from mmtrain.plan.plan_again import plan_again
from mmtrain.plan.planner import plan_recipe as planner
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.weights import export_folder
from mmtrain.weights.tiny_model import write_tiny_model
from tests.flow.runs import refuse, run_all

RECIPE = """
name: sft
model: {{hf: {folder}}}
data:
  sources: [{{path: {folder}/conversations/train.json}}]
  validation: [{{path: {folder}/conversations/few.json}}]
  seq_len: 256
parallel: {parallel}
cluster: {{hardware: cpu-core}}
train:
  steps: 3
  global_batch: 4
  validate_every: 3
  checkpoint: {{every: 3}}
  optimizer: {{lr: 3.0e-4}}
"""


def _loss_of_transformers(recipe: Recipe, folder: Path, rows: list[dict[str, object]]) -> float:
    """Return the mean loss per target of the held-out samples, with clips that the folder's extractor prepares."""
    from transformers import AutoFeatureExtractor, Qwen2AudioForConditionalGeneration

    model = Qwen2AudioForConditionalGeneration.from_pretrained(folder)
    extract = AutoFeatureExtractor.from_pretrained(folder)
    index, tokenizer = build_index(recipe, "validation"), load_tokenizer(recipe.data.tokenizer_path)
    total, num_targets = 0.0, 0
    for number, row in enumerate(rows):
        encoded = tokenizer.encode(index.samples[number], index.media_features(number))
        ids = torch.from_numpy(np.asarray(encoded.ids))[None]
        more = {}
        if names := row.get("audios"):
            assert isinstance(names, list)
            root = recipe.data.sources[0].path.parent
            waves = [soundfile.read(root / name, dtype="float32")[0] for name in names]
            clips = extract(
                waves, sampling_rate=16000, padding="max_length", return_attention_mask=True, return_tensors="pt"
            )
            more = {"input_features": clips.input_features, "feature_attention_mask": clips.attention_mask}
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits[0]
        labels = torch.from_numpy(np.asarray(encoded.labels))
        total += F.cross_entropy(logits, labels, reduction="sum").item()
        num_targets += int((labels >= 0).sum())
    return total / num_targets


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        "{placement: disaggregated, audio: {tp: 2, pp: 1}, llm: {tp: 1, pp: 2}}",
        "{placement: unified, llm: {tp: 2, pp: 2}}",
        "{placement: colocated, audio: {tp: 2}, llm: {tp: 2}}",
    ],
    ids=["disaggregated", "unified", "colocated"],
)
def test_a_trained_qwen2_audio_has_the_same_loss_in_transformers(parallel: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["qwen2_audio"], folder, seed=0)
    conversations = folder / "conversations"
    rows = json.loads((conversations / "heldout.json").read_text(encoding="utf-8"))[:12]
    (conversations / "few.json").write_text(json.dumps(rows), encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder, parallel=parallel), encoding="utf-8")
    request = TrainRequest(load_recipe(path, env={}), planner, plan_again, "cpu-core", 4, tmp_path / "run")
    untrained_loss = _loss_of_transformers(request.recipe, folder, rows)
    assert run_all(*[request] * 4) == [""] * 4
    checkpoint = open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse)
    export_folder(load_run_recipe(request.run_dir), checkpoint, tmp_path / "out")
    our_loss = read_metrics(request.run_dir)[-1]["val_loss"]
    assert our_loss == pytest.approx(_loss_of_transformers(request.recipe, tmp_path / "out", rows), rel=1e-4)
    assert abs(our_loss - untrained_loss) > 1e-2, "three steps changed nothing"
