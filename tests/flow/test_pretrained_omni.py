"""A run that starts from the folder of Qwen2.5-Omni, on four ranks, and the folder that is exported from it."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from mmtrain.checkpoint import Checkpoint, open_newest_good
from mmtrain.data import DataIndex, build_index
from mmtrain.data.media.item_readers import VisionItemReader
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.families import FAMILIES
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import StagePlan, UnitPlan
from mmtrain.planning.whatif import plan_again
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.evaluation.generate import load_generator
from mmtrain.runtime.evaluation.qa_eval import QuestionAnswerer, select_questions
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import World
from mmtrain.weights import export_folder
from mmtrain.weights.tiny_model import write_tiny_model
from tests.data.archives import movie
from tests.flow.runs import refuse, run_all
from tests.pixels import normalized
from tests.plans import plan_recipe as planner

NUM_ROWS, NUM_ANSWER_TOKENS = 10, 8
RECIPE = """
name: sft
model: {{hf: {folder}}}
data:
  sources: [{{path: {folder}/conversations/some.json}}]
  validation: [{{path: {folder}/conversations/few.json}}]
  seq_len: 512
  video: {{min_pixels: 1024, max_pixels: 4096}}
  audio: {{item_seconds: 0.2}}
parallel: {parallel}
cluster: {{hardware: cpu-core}}
train:
  steps: 3
  global_batch: 4
  validate_every: 3
  checkpoint: {{every: 3}}
  optimizer: {{lr: 3.0e-4}}
"""
PLACEMENTS = {
    "disaggregated 1:1:2": "{placement: disaggregated, vision: {dp: 1}, audio: {dp: 1}, llm: {tp: 1, pp: 1, dp: 2}}",
    "unified tp 2, pp 2": "{placement: unified, llm: {tp: 2, pp: 2}}",
    "disaggregated vpp 2": "{placement: disaggregated, vision: {dp: 1}, audio: {dp: 1}, llm: {tp: 1, pp: 2, vpp: 2}}",
    "colocated": "{placement: colocated, vision: {tp: 2}, audio: {tp: 2}, llm: {tp: 2}}",
}


def write_model_and_media(folder: Path) -> list[dict[str, Any]]:
    """Write a tiny model, and data in which some samples have a picture, a video and a clip; return held-out rows.

    In `conversations/watched.json` half of the samples have all of these.
    """
    write_tiny_model(FAMILIES["qwen2_5_omni"], folder, seed=0)
    conversations = folder / "conversations"
    (conversations / "video.mp4").write_bytes(movie(["red", "lime", "blue", "white"], seconds_each=1.0))
    for source, target, count in (("train", "some", 4 * NUM_ROWS), ("heldout", "few", NUM_ROWS)):
        rows = json.loads((conversations / f"{source}.json").read_text(encoding="utf-8"))
        both = next(row for row in rows if row.keys() >= {"images", "audios"})
        question, *others = both["messages"]
        asked = {**question, "content": f"<video>{question['content']}"}
        watched = {**both, "messages": [asked, *others], "videos": ["video.mp4"]}
        rows = [*rows[:count], watched, watched]
        (conversations / f"{target}.json").write_text(json.dumps(rows), encoding="utf-8")
    (conversations / "watched.json").write_text(json.dumps([*rows[:2], watched, watched]), encoding="utf-8")
    return rows


def _patches_of_video(recipe: Recipe, index: DataIndex, number: int) -> tuple[Tensor, list[int]]:
    """Return the patches of a sample's video as `transformers` orders them, and its frames, rows and columns."""
    vision = recipe.model.vision
    assert vision is not None
    reader, [media] = VisionItemReader(vision, recipe.data), index.samples[number].videos
    grids = reader.read_items("video", media).grids
    pixels = [reader.load_cells("video", media, part, len(grids), grid) for part, grid in enumerate(grids)]
    cells = [normalized(part, recipe.data.image) for part in pixels]
    (rows, cols), merge = grids[0], vision.merge
    split = torch.from_numpy(np.concatenate(cells)).view(
        -1, rows // merge, merge, cols // merge, merge, cells[0].shape[1]
    )
    return split.transpose(2, 3).reshape(-1, cells[0].shape[1]), [len(grids), rows, cols]


def _their_media(recipe: Recipe, folder: Path, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield for each held-out sample the arguments of `transformers` for its media, which its processors prepare."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    extract, prepare = AutoFeatureExtractor.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    index = build_index(recipe, "validation")
    root = recipe.data.sources[0].path.parent
    for number, row in enumerate(rows):
        arguments: dict[str, Any] = {}
        if names := row.get("images"):
            arguments |= prepare([Image.open(root / name) for name in names], return_tensors="pt")
        if names := row.get("audios"):
            waves = [soundfile.read(root / name, dtype="float32")[0] for name in names]
            clips = extract(
                waves, sampling_rate=16000, padding="max_length", return_attention_mask=True, return_tensors="pt"
            )
            arguments |= {"input_features": clips.input_features, "feature_attention_mask": clips.attention_mask}
        if row.get("videos"):
            patches, grid = _patches_of_video(recipe, index, number)
            arguments |= {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([grid])}
            arguments["video_second_per_grid"] = torch.tensor([1.0])  # two frames, two of a second
        yield arguments


def _loss_of_transformers(recipe: Recipe, folder: Path, media: list[dict[str, Any]]) -> float:
    """Return the mean loss per target of the held-out samples."""
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    model = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder)
    index, tokenizer = build_index(recipe, "validation"), load_tokenizer(recipe.data.tokenizer_path)
    total, num_targets = 0.0, 0
    for number, arguments in enumerate(media):
        encoded = tokenizer.encode(index.samples[number], index.media_features(number))
        ids, labels = torch.from_numpy(np.asarray(encoded.ids))[None], torch.from_numpy(np.asarray(encoded.labels))
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **arguments).logits[0]
        total += F.cross_entropy(logits, labels, reduction="sum").item()
        num_targets += int((labels >= 0).sum())
    return total / num_targets


def _assert_same_answers(recipe: Recipe, checkpoint: Checkpoint, folder: Path, media: list[dict[str, Any]]) -> None:
    """Let our model and that of the folder answer the held-out questions, greedily."""
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    index, tokenizer = build_index(recipe, "validation"), load_tokenizer(recipe.data.tokenizer_path)
    ParallelGroups.single()
    world = World(0, 1, torch.device("cpu"))
    layout = {
        unit.name: UnitPlan(tp=1, pp=1, dp=1, ranks=(0,), stages=(StagePlan(stage=0, layers=(0, len(unit.layers))),))
        for unit in build_model_shape(recipe).units
    }
    generator = load_generator(recipe, layout, world, checkpoint, tokenizer)
    answerer = QuestionAnswerer(generator, recipe, tokenizer, index, world, NUM_ANSWER_TOKENS)
    answers, _ = answerer.generate(select_questions(index, None), blank=False)
    model = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder).eval()
    padding = list(range(tokenizer.vocab_size, recipe.model.llm.vocab))  # ids that no text has
    num_watched = 0
    for question, ours in answers.items():
        arguments = media[question.number]
        prompt = torch.from_numpy(tokenizer.prompt_ids(question.sample, index.media_features(question.number)))[None]
        tokens = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_ANSWER_TOKENS, do_sample=False,
            eos_token_id=sorted(tokenizer.end_ids), pad_token_id=0, suppress_tokens=padding, **arguments,
        )[0, prompt.shape[1] :].tolist()  # fmt: skip
        assert ours == [*itertools.takewhile(lambda token: token not in tokenizer.end_ids, tokens)]
        num_watched += "video_grid_thw" in arguments
    assert num_watched
    assert len({tuple(answer) for answer in answers.values()}) > 1, "one answer to every question proves little"


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_trained_qwen2_5_omni_has_the_same_loss_and_answers_in_transformers(placement: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    rows = write_model_and_media(folder)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder, parallel=PLACEMENTS[placement]), encoding="utf-8")
    request = TrainRequest(load_recipe(path, env={}), planner, plan_again, "cpu-core", 4, tmp_path / "run")
    media = [*_their_media(request.recipe, folder, rows)]
    untrained_loss = _loss_of_transformers(request.recipe, folder, media)
    assert run_all(*[request] * 4) == [""] * 4
    checkpoint = open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse)
    out = tmp_path / "out"
    export_folder(load_run_recipe(request.run_dir), checkpoint, out)
    our_loss = read_metrics(request.run_dir)[-1]["val_loss"]
    assert our_loss == pytest.approx(_loss_of_transformers(request.recipe, out, media), rel=1e-4)
    assert abs(our_loss - untrained_loss) > 1e-2, "three steps changed nothing"
    _assert_same_answers(request.recipe, checkpoint, out, media)
