"""A run that starts from the folder of a Qwen-VL, on four ranks, and the folder that is exported from it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmtrain.balance import assign
from mmtrain.checkpoint import open_newest_good
from mmtrain.data import BatchBuilder, PayloadNeed, build_index
from mmtrain.families import FAMILIES
from mmtrain.models.stage_inputs import EncoderInput, TextInput
from mmtrain.plan.plan_again import plan_again
from mmtrain.plan.planner import plan_recipe as planner
from mmtrain.program import LLM, Microbatch
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.execution.rank_context import unit_inputs
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.weights import export_folder
from mmtrain.weights.tiny_model import write_tiny_model
from tests.flow.runs import refuse, run_all
from tests.weights.test_qwen_vl import assert_same_answers, in_squares

RECIPE = """
name: sft
model: {{hf: {folder}}}
data:
  sources: [{{path: {conversations}/some.json}}]
  validation: [{{path: {conversations}/others.json}}]
  seq_len: 192
parallel: {parallel}
cluster: {{hardware: cpu-core}}
train:
  steps: 3
  global_batch: 4
  validate_every: 3
  checkpoint: {{every: 3}}
  optimizer: {{lr: 3.0e-4}}
"""


def _loss_of_transformers(recipe: Recipe, folder: Path) -> float:
    """Return the mean loss per target of the held-out samples, one after another, on the pixels that we prepare."""
    from transformers import AutoModelForImageTextToText

    index = build_index(recipe, "validation")
    needs = (
        PayloadNeed(LLM, 0, media=False, ids=True, labels=True),
        PayloadNeed("vision", 0, media=True, ids=False, labels=False),
    )
    once = {need.unit: 1 for need in needs}
    meta = assign(0, 0, [np.arange(len(index.samples))], index.lengths, once, once)
    inputs = unit_inputs(BatchBuilder(index, recipe, needs, once).build(meta), torch.device("cpu"), torch.float32)
    text, images = inputs[Microbatch(LLM, 0, 0)], inputs[Microbatch("vision", 0, 0)]
    assert isinstance(text, TextInput)
    assert isinstance(images, EncoderInput)
    assert text.ids is not None
    assert text.labels is not None
    assert images.cells is not None
    grids = list(zip(images.rows, images.cols, strict=True))
    patches = iter(zip(grids, images.cells.split([rows * cols for rows, cols in grids]), strict=True))
    model = AutoModelForImageTextToText.from_pretrained(folder)
    losses = []
    for ids, labels in zip(text.ids.split(text.lengths), text.labels.split(text.lengths), strict=True):
        is_feature = ids == model.config.image_token_id
        shown: list[Any] = []
        while sum(rows * cols // 4 for (rows, cols), _ in shown) < int(is_feature.sum()):
            shown.append(next(patches))
        more = {}
        if shown:
            more = {
                "pixel_values": torch.cat([in_squares(cells, *grid) for grid, cells in shown]),
                "image_grid_thw": torch.tensor([(1, *grid) for grid, _ in shown]),
                "mm_token_type_ids": is_feature.int()[None],
            }
        with torch.no_grad():
            logits = model(input_ids=ids[None], **more).logits[0]
        losses.append(F.cross_entropy(logits, labels, reduction="sum"))
    return float(sum(losses)) / int((text.labels >= 0).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        "{placement: unified, llm: {tp: 2, pp: 2}}",
        "{placement: disaggregated, vision: {tp: 1, pp: 2}, llm: {tp: 1, pp: 2}}",
    ],
)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_trained_model_has_the_same_loss_and_answers_in_transformers(
    family: str, parallel: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES[family], folder, seed=0)
    conversations = folder / "conversations"
    rows = json.loads((conversations / "train.json").read_text(encoding="utf-8"))
    (conversations / "some.json").write_text(json.dumps(rows[:48]), encoding="utf-8")
    (conversations / "others.json").write_text(json.dumps(rows[48:64]), encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder, conversations=conversations, parallel=parallel), encoding="utf-8")
    request = TrainRequest(load_recipe(path, env={}), planner, plan_again, "cpu-core", 4, tmp_path / "run")
    untrained_loss = _loss_of_transformers(request.recipe, folder)
    assert run_all(*[request] * 4) == [""] * 4
    checkpoint = open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse)
    recipe, out = load_run_recipe(request.run_dir), tmp_path / "out"
    export_folder(recipe, checkpoint, out)
    our_loss = read_metrics(request.run_dir)[-1]["val_loss"]
    assert our_loss == pytest.approx(_loss_of_transformers(request.recipe, out), rel=1e-4)
    assert abs(our_loss - untrained_loss) > 1e-2, "three steps changed nothing"
    assert_same_answers(recipe, checkpoint, out)
