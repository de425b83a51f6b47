"""A run that starts from a folder, on four ranks, and the folder that is exported from it."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.balance import assign
from mmtrain.checkpoint import Checkpoint, open_newest_good
from mmtrain.data import BatchBuilder, ChatTokenizer, PayloadNeed, build_index
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.families import FAMILIES
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.model_shape import build_model_shape
from mmtrain.models.stage_inputs import EncoderInput, TextInput
from mmtrain.plan.artifact.plan import StagePlan, UnitPlan
from mmtrain.plan.plan_again import plan_again
from mmtrain.plan.planner import plan_recipe as planner
from mmtrain.program import LLM, Microbatch
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.evaluation.generate import load_generator
from mmtrain.runtime.evaluation.qa_eval import QuestionAnswerer, select_questions
from mmtrain.runtime.execution.rank_context import unit_inputs
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import World
from mmtrain.weights import export_folder
from mmtrain.weights.tiny_model import write_tiny_model
from tests.flow.runs import refuse, run_all
from tests.weights.pretrained import IMAGE_SIDE, clip, llava, save, siglip

NUM_ANSWER_TOKENS = 12
RECIPE = """
name: sft
model: {{hf: {folder}}}
data:
  sources: [{{path: {train}}}]
  validation: [{{path: {heldout}}}]
  tokenizer: {tokenizer}
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


def _request(folder: Path, train: Path, heldout: Path, tokenizer: Path, parallel: str) -> TrainRequest:
    path = folder.parent / "recipe.yaml"
    path.write_text(
        RECIPE.format(folder=folder, train=train, heldout=heldout, tokenizer=tokenizer, parallel=parallel),
        encoding="utf-8",
    )
    return TrainRequest(load_recipe(path, env={}), planner, plan_again, "cpu-core", 4, folder.parent / "run")


def _pixels(patches: Tensor, patch: int) -> Tensor:
    """Put patches (N * side * side, 3 * patch * patch) together to images (N, 3, height, width)."""
    grid = patches.view(-1, IMAGE_SIDE, IMAGE_SIDE, 3, patch, patch)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, IMAGE_SIDE * patch, IMAGE_SIDE * patch)


def _loss_of_transformers(recipe: Recipe, folder: Path) -> float:
    """Return the mean loss per target of the held-out samples, one after another, on the pixels that we prepare."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    index = build_index(recipe, "validation")
    needs = (PayloadNeed(LLM, 0, media=False, ids=True, labels=True),)
    model_class = AutoModelForCausalLM
    if recipe.model.vision is not None:
        needs += (PayloadNeed("vision", 0, media=True, ids=False, labels=False),)
        model_class = AutoModelForImageTextToText
    once = {need.unit: 1 for need in needs}
    meta = assign(0, 0, [np.arange(len(index.samples))], index.lengths, once, once)
    inputs = unit_inputs(BatchBuilder(index, recipe, needs, once).build(meta), torch.device("cpu"), torch.float32)
    text = inputs[Microbatch(LLM, 0, 0)]
    assert isinstance(text, TextInput)
    assert text.ids is not None
    assert text.labels is not None
    pixels = iter(())
    if recipe.model.vision is not None:
        media = inputs[Microbatch("vision", 0, 0)]
        assert isinstance(media, EncoderInput)
        assert media.cells is not None
        pixels = iter(_pixels(media.cells, recipe.model.vision.patch))
    model = model_class.from_pretrained(folder)
    losses = []
    for ids, labels in zip(text.ids.split(text.lengths), text.labels.split(text.lengths), strict=True):
        merge = 1 if recipe.model.vision is None else recipe.model.vision.merge
        num_features = int((ids == getattr(model.config, "image_token_id", -1)).sum())
        extra = 0 if recipe.model.vision is None else recipe.model.vision.extra_features
        num_images = num_features // ((IMAGE_SIDE // merge) ** 2 + extra)  # each is a tile, if there are tiles
        images = [next(pixels) for _ in range(num_images)]
        more = {"pixel_values": torch.stack(images)} if images else {}
        with torch.no_grad():
            losses.append(F.cross_entropy(model(input_ids=ids[None], **more).logits[0], labels, reduction="sum"))
    return float(sum(losses)) / int((text.labels >= 0).sum())


def _assert_same_answers(recipe: Recipe, checkpoint: Checkpoint, folder: Path) -> None:
    """Let our model and that of the folder answer the held-out questions, greedily; for text only."""
    from transformers import AutoModelForCausalLM

    if recipe.model.vision is not None:
        return
    index, tokenizer = build_index(recipe, "validation"), load_tokenizer(recipe.data.tokenizer_path)
    ParallelGroups.single()
    world = World(0, 1, torch.device("cpu"))
    num_layers = len(build_model_shape(recipe).unit("llm").layers)
    stage = StagePlan(stage=0, layers=(0, num_layers))
    layout = {"llm": UnitPlan(tp=1, pp=1, dp=1, ranks=(0,), stages=(stage,))}
    generator = load_generator(recipe, layout, world, checkpoint, tokenizer)
    answerer = QuestionAnswerer(generator, recipe, tokenizer, index, world, NUM_ANSWER_TOKENS)
    answers, _ = answerer.generate(select_questions(index, None), blank=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    padding = list(range(tokenizer.vocab_size, recipe.model.llm.vocab))  # ids that no text has
    for question, ours in answers.items():
        prompt = torch.from_numpy(tokenizer.prompt_ids(question.sample, {}))[None]
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_ANSWER_TOKENS, do_sample=False,
            eos_token_id=sorted(tokenizer.end_ids), pad_token_id=0, suppress_tokens=padding,
        )[0, prompt.shape[1] :].tolist()  # fmt: skip
        theirs = list(itertools.takewhile(lambda token: token not in tokenizer.end_ids, tokens))
        assert ours == theirs
    assert len({tuple(answer) for answer in answers.values()}) > 1, "one answer to every question proves little"


def _assert_training_and_export_agree_with_transformers(request: TrainRequest, folder: Path) -> None:
    untrained_loss = _loss_of_transformers(request.recipe, folder)
    assert run_all(*[request] * 4) == [""] * 4
    checkpoint = open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse)
    out = folder.parent / "out"
    export_folder(load_run_recipe(request.run_dir), checkpoint, out)
    _assert_same_answers(request.recipe, checkpoint, out)
    our_loss = read_metrics(request.run_dir)[-1]["val_loss"]
    assert our_loss == pytest.approx(_loss_of_transformers(request.recipe, out), rel=1e-4)
    assert abs(our_loss - untrained_loss) > 1e-2, "three steps changed nothing"


def _text_request(family: str, tmp_path: Path) -> TrainRequest:
    """Ask for three steps of a tiny text model, which is tensor- and pipeline-parallel."""
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES[family], folder, seed=0)
    rows = json.loads((folder / "conversations" / "train.json").read_text(encoding="utf-8"))
    train, heldout = tmp_path / "train.json", tmp_path / "heldout.json"
    train.write_text(json.dumps(rows[:48]), encoding="utf-8")
    heldout.write_text(json.dumps(rows[48:60]), encoding="utf-8")
    return _request(folder, train, heldout, folder, "{llm: {tp: 2, pp: 2}}")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "qwen3"])
def test_trained_text_models_have_the_same_loss_and_answers_in_transformers(family: str, tmp_path: Path) -> None:
    """Train LLMs with windows, norms of heads and of outputs, and two rotary bases; generate with a KV cache."""
    _assert_training_and_export_agree_with_transformers(_text_request(family, tmp_path), tmp_path / "model")


@pytest.mark.slow
def test_a_trained_qwen2_has_the_same_loss_and_answers_in_transformers_and_is_resumed(tmp_path: Path) -> None:
    request, folder = _text_request("qwen2", tmp_path), tmp_path / "model"
    _assert_training_and_export_agree_with_transformers(request, folder)

    # Resumed, the run takes the checkpoint; the folder's weights are not needed any more.
    (folder / "model.safetensors").unlink()
    more = load_recipe(request.loaded.path, ["train.steps=4", "train.validate_every=0"], env={})
    assert run_all(*[replace(request, loaded=more, resume=True)] * 4) == [""] * 4
    assert open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse).step == 4

    # Another model under the same name is another run.
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text(encoding="utf-8")), "max_position_embeddings": 7}))
    more = load_recipe(request.loaded.path, ["train.steps=5"], env={})
    assert "model.hf: " in run_all(*[replace(request, loaded=more, resume=True)] * 4)[0]


DISAGGREGATED = "{placement: disaggregated, vision: {tp: 2, pp: 1}, llm: {tp: 1, pp: 2}}"
COLOCATED = "{placement: colocated, vision: {tp: 2, pp: 1}, llm: {tp: 2, pp: 2}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tower", "strategy", "parallel"),
    [(clip, "default", DISAGGREGATED), (clip, "full", COLOCATED), (siglip, "full", DISAGGREGATED)],
)
def test_a_trained_llava_has_the_same_loss_in_transformers(
    tower: Callable[[], Any], strategy: str, parallel: str, data: Path, tmp_path: Path
) -> None:
    """Train the tower on two tensor-parallel ranks, and the LLM on two pipeline ranks."""
    [image_token] = ChatTokenizer.load(data / "tokenizer.json").item_ids["vision"]
    model = llava(vocab_size=500, image_token=image_token, tower=tower(), strategy=strategy)
    folder = save(model, tmp_path / "model")
    request = _request(folder, data / "train.json", data / "heldout.json", data / "tokenizer.json", parallel)
    _assert_training_and_export_agree_with_transformers(request, folder)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [DISAGGREGATED, COLOCATED, "{placement: unified, llm: {tp: 2, pp: 2}}"])
def test_a_trained_internvl_has_the_same_loss_in_transformers(parallel: str, tmp_path: Path) -> None:
    """Train on pictures of one tile and of several."""
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["internvl"], folder, seed=0)
    conversations = folder / "conversations"
    rows = json.loads((conversations / "train.json").read_text(encoding="utf-8"))
    train, heldout = conversations / "some.json", conversations / "others.json"
    train.write_text(json.dumps(rows[:48]), encoding="utf-8")
    heldout.write_text(json.dumps(rows[48:60]), encoding="utf-8")
    request = _request(folder, train, heldout, folder, parallel)
    _assert_training_and_export_agree_with_transformers(request, folder)
