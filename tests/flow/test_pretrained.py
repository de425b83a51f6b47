"""A run that starts from a folder, on four ranks, and the folder that is exported from it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mmtrain.checkpoint import open_newest_good
from mmtrain.data import ChatTokenizer, build_index
from mmtrain.plan.planner import plan_recipe as planner
from mmtrain.recipe import load_recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.weights import export_folder
from tests.flow.runs import refuse, run_all
from tests.weights.pretrained import qwen2, save

RECIPE = """
name: sft
model: {{hf: {folder}}}
data:
  sources: [{{path: train.json}}]
  validation: [{{path: heldout.json}}]
  tokenizer: {tokenizer}
  seq_len: 64
parallel: {{llm: {{tp: 2, pp: 2}}}}
cluster: {{hardware: cpu-core}}
train:
  steps: 3
  global_batch: 4
  validate_every: 3
  checkpoint: {{every: 3}}
  optimizer: {{lr: 3.0e-3}}
"""


def _request(data: Path, folder: Path) -> TrainRequest:
    """Return a request to train on twelve arithmetic questions, and to validate on four."""
    for name, numbers in (("train", range(12)), ("heldout", range(12, 16))):
        rows = [
            {"messages": [
                {"role": "user", "content": f"What is {n} and {n + 1}?"},
                {"role": "assistant", "content": f"It is {2 * n + 1}."},
            ]}
            for n in numbers
        ]  # fmt: skip
        (folder.parent / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    path = folder.parent / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder, tokenizer=data / "tokenizer.json"), encoding="utf-8")
    return TrainRequest(load_recipe(path, env={}), planner, "cpu-core", 4, folder.parent / "run")


def _loss_of_transformers(request: TrainRequest, folder: Path) -> float:
    """Return the mean loss per target of the held-out samples."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = ChatTokenizer.load(request.recipe.data.tokenizer_file)
    loss, num_targets = 0.0, 0
    for sample in build_index(request.recipe, "validation").samples:
        encoded = tokenizer.encode(sample, {})
        labels = torch.from_numpy(encoded.labels)
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(encoded.ids)[None]).logits[0]
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        num_targets += int((labels >= 0).sum())
    return loss / num_targets


@pytest.mark.slow
def test_a_trained_model_has_the_same_loss_in_transformers(data: Path, tmp_path: Path) -> None:
    folder = save(qwen2(vocab_size=500), tmp_path / "model")
    request = _request(data, folder)
    untrained_loss = _loss_of_transformers(request, folder)
    assert run_all(*[request] * 4) == [""] * 4
    checkpoint = open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse)
    export_folder(load_run_recipe(request.run_dir), checkpoint, tmp_path / "out")
    our_loss = read_metrics(request.run_dir)[-1]["val_loss"]
    assert our_loss == pytest.approx(_loss_of_transformers(request, tmp_path / "out"), rel=1e-4)
    assert abs(our_loss - untrained_loss) > 1e-2, "three steps changed nothing"

    # Resumed, the run takes the checkpoint; the folder's weights are not needed any more.
    (folder / "model.safetensors").unlink()
    more = load_recipe(request.loaded.path, ["train.steps=4", "train.validate_every=0"], env={})
    assert run_all(*[replace(request, loaded=more, resume=True)] * 4) == [""] * 4
    assert open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse).step == 4

    # Another model under the same name is another run.
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text(encoding="utf-8")), "eos_token_id": 7}))
    assert "model.hf: " in run_all(*[replace(request, loaded=more, resume=True)] * 4)[0]
