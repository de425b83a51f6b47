"""Models whose LLM joins tiles: trained on several ranks, exported, and compared under the processor of the family."""

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mmtrain.checkpoint import open_newest_good
from mmtrain.data import Sample, build_index
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
from tests.weights.onevision_processor import ComposedProcessor
from tests.weights.test_tiny_model import messages_of

NUM_ANSWER_TOKENS = 8
RECIPE = """
name: joined
model: {{hf: {folder}}}
data:
  sources: [{{path: {conversations}/some.json}}]
  validation: [{{path: {conversations}/others.json}}]
  seq_len: 512
parallel: {parallel}
cluster: {{hardware: cpu-core}}
train:
  steps: 3
  global_batch: 4
  validate_every: 3
  checkpoint: {{every: 3}}
  optimizer: {{lr: 3.0e-3}}
"""


def request_to_train(folder: Path, parallel: str, num_ranks: int) -> tuple[TrainRequest, list[dict[str, Any]]]:
    """Return a request to train three steps of the tiny model in the folder, and its held-out conversations."""
    conversations = folder / "conversations"
    rows = json.loads((conversations / "train.json").read_text(encoding="utf-8"))
    (conversations / "some.json").write_text(json.dumps(rows[:48]), encoding="utf-8")
    (conversations / "others.json").write_text(json.dumps(rows[48:60]), encoding="utf-8")
    path = folder.parent / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder, conversations=conversations, parallel=parallel), encoding="utf-8")
    loaded = load_recipe(path, env={})
    return TrainRequest(loaded, planner, plan_again, "cpu-core", num_ranks, folder.parent / "run"), rows[48:60]


def _processor_of(folder: Path) -> Callable[..., dict[str, Any]]:
    """Return what the folder's processor makes of messages: the arguments of its model."""
    from transformers import AutoProcessor

    if json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "llava_onevision":
        return ComposedProcessor(folder)
    processor = AutoProcessor.from_pretrained(folder)
    return partial(processor.apply_chat_template, tokenize=True, return_dict=True, return_tensors="pt")


def _loss_of_transformers(recipe: Recipe, folder: Path, rows: list[dict[str, Any]]) -> float:
    """Return the mean loss per target of the held-out conversations, one after another."""
    from transformers import AutoModelForImageTextToText

    model, process = AutoModelForImageTextToText.from_pretrained(folder), _processor_of(folder)
    index, tokenizer = build_index(recipe, "validation"), load_tokenizer(recipe.data.tokenizer_path)
    total, num_targets = 0.0, 0
    for number, row in enumerate(rows):
        if "video" in row:
            inputs = _video_inputs(recipe, folder, index.samples[number], row)
        else:
            inputs = process(messages_of(row, Path(recipe.data.validation[0].path).parent))
        encoded = tokenizer.encode(index.samples[number], index.media_features(number))
        assert encoded.ids.tolist() == inputs["input_ids"][0].tolist()
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        labels = torch.from_numpy(encoded.labels)
        total += float(F.cross_entropy(logits, labels, reduction="sum"))
        num_targets += int((labels >= 0).sum())
    return total / num_targets


def _video_inputs(recipe: Recipe, folder: Path, sample: Sample, row: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the arguments of the model for a conversation that starts with a video, from frames prepared here."""
    assert recipe.model.vision is not None
    reader = VisionItemReader(recipe.model.vision, recipe.data)
    grids = reader.read_items("video", sample.videos[0]).grids
    frames = []
    for part, (rows, cols) in enumerate(grids):
        cells = normalized(
            reader.load_cells("video", sample.videos[0], part, len(grids), (rows, cols)), recipe.data.image
        )
        patch = recipe.model.vision.patch
        pixels = cells.reshape(rows, cols, 3, patch, patch).transpose(2, 0, 3, 1, 4)
        frames.append(torch.from_numpy(pixels.reshape(3, rows * patch, cols * patch)))
    question, answer = (turn["value"] for turn in row["conversations"])
    content = [{"type": "video"}, {"type": "text", "text": question.removeprefix("<video>")}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return ComposedProcessor(folder).of_video(messages, torch.stack(frames))


def _answers_of_transformers(
    recipe: Recipe, folder: Path, rows: list[dict[str, Any]], end_ids: frozenset[int]
) -> Iterator[list[int]]:
    from transformers import AutoModelForImageTextToText

    model, process = AutoModelForImageTextToText.from_pretrained(folder), _processor_of(folder)
    vocab_size = load_tokenizer(recipe.data.tokenizer_path).vocab_size
    for row in rows:
        messages = messages_of(row, Path(recipe.data.validation[0].path).parent)[:-1]
        inputs = process(messages, add_generation_prompt=True)
        tokens = model.generate(
            **inputs, max_new_tokens=NUM_ANSWER_TOKENS, do_sample=False, eos_token_id=sorted(end_ids), pad_token_id=0,
            suppress_tokens=list(range(vocab_size, recipe.model.llm.vocab)),
        )[0, inputs["input_ids"].shape[1] :].tolist()  # fmt: skip
        yield list(itertools.takewhile(lambda token: token not in end_ids, tokens))


def _our_answers(request: TrainRequest) -> list[list[int]]:
    """Let the newest checkpoint answer the last question of every held-out conversation, greedily, on one rank."""
    recipe = request.recipe
    index, tokenizer = build_index(recipe, "validation"), load_tokenizer(recipe.data.tokenizer_path)
    ParallelGroups.single()
    world = World(0, 1, torch.device("cpu"))
    shape = build_model_shape(recipe)
    layout = {}
    for unit in ("vision", "llm"):
        stage = StagePlan(stage=0, layers=(0, len(shape.unit(unit).layers)))
        layout[unit] = UnitPlan(tp=1, pp=1, dp=1, ranks=(0,), stages=(stage,))
    checkpoint = open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse)
    generator = load_generator(recipe, layout, world, checkpoint, tokenizer)
    answerer = QuestionAnswerer(generator, recipe, tokenizer, index, world, NUM_ANSWER_TOKENS)
    questions = select_questions(index, None)
    answers, _ = answerer.generate(questions, blank=False)
    return [answers[question] for question in questions]


def show_videos(folder: Path) -> None:
    """Let every second conversation be about a video, of between one and twelve frames."""
    conversations = folder / "conversations"
    rows = json.loads((conversations / "train.json").read_text(encoding="utf-8"))[:60]
    colours = ("red", "lime", "blue", "yellow")
    for number in range(0, len(rows), 2):
        first, last = colours[number // 2 % 4], colours[number // 8 % 4]
        name = f"{first}-{last}.mp4"
        shown = [first] * (1 + number // 2 % 4 * 2) + [last] * (number // 8 % 4 + 1)
        (conversations / name).write_bytes(movie(shown, seconds_each=0.05))
        turns = [{"from": "human", "value": "<video>Which colour is last?"}, {"from": "gpt", "value": last}]
        rows[number] = {"id": number, "video": name, "conversations": turns}
    (conversations / "train.json").write_text(json.dumps(rows), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "num_ranks"),
    [
        ("{placement: disaggregated, vision: {tp: 1, pp: 1, dp: 2}, llm: {tp: 1, pp: 2, dp: 1}}", 4),
        ("{placement: colocated, vision: {tp: 1, pp: 1, dp: 2}, llm: {tp: 1, pp: 2}}", 2),
    ],
)
def test_a_model_trained_on_videos_has_the_same_loss_in_transformers(
    parallel: str, num_ranks: int, tmp_path: Path
) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    write_tiny_model(FAMILIES["llava_onevision"], folder, seed=0)
    show_videos(folder)
    request, heldout = request_to_train(folder, parallel, num_ranks)
    assert {"video" in row for row in heldout} == {True, False}
    untrained_loss = _loss_of_transformers(request.recipe, folder, heldout)
    assert run_all(*[request] * num_ranks) == [""] * num_ranks
    checkpoint = open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse)
    export_folder(load_run_recipe(request.run_dir), checkpoint, out)
    our_loss = read_metrics(request.run_dir)[-1]["val_loss"]
    assert our_loss == pytest.approx(_loss_of_transformers(request.recipe, out, heldout), rel=1e-4)
    assert abs(our_loss - untrained_loss) > 1e-2, "three steps changed nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "num_ranks"),
    [
        ("{placement: disaggregated, vision: {tp: 2, pp: 1}, llm: {tp: 1, pp: 2, vpp: 2}}", 4),
        ("{placement: disaggregated, vision: {dp: 1}, llm: {tp: 1, pp: 1, dp: 2, recompute: all}}", 3),
        ("{placement: colocated, vision: {tp: 1, pp: 1, dp: 4}, llm: {tp: 2, pp: 2, sp: true}}", 4),
        ("{placement: unified, llm: {tp: 2, pp: 2}}", 4),
    ],
)
@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
def test_a_trained_model_has_the_same_loss_and_answers_in_transformers(
    family: str, parallel: str, num_ranks: int, tmp_path: Path
) -> None:
    """Tiles of one image are on several ranks of the encoder where it has a higher dp than the LLM."""
    folder, out = tmp_path / "model", tmp_path / "out"
    write_tiny_model(FAMILIES[family], folder, seed=0)
    request, heldout = request_to_train(folder, parallel, num_ranks)
    untrained_loss = _loss_of_transformers(request.recipe, folder, heldout)
    assert run_all(*[request] * num_ranks) == [""] * num_ranks
    checkpoint = open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse)
    export_folder(load_run_recipe(request.run_dir), checkpoint, out)
    our_loss = read_metrics(request.run_dir)[-1]["val_loss"]
    assert our_loss == pytest.approx(_loss_of_transformers(request.recipe, out, heldout), rel=1e-4)
    assert abs(our_loss - untrained_loss) > 1e-2, "three steps changed nothing"
    end_ids = frozenset(load_tokenizer(request.recipe.data.tokenizer_path).end_ids)
    ours = _our_answers(request)
    assert ours == list(_answers_of_transformers(request.recipe, out, heldout, end_ids))
    assert len(set(map(tuple, ours))) > 1, "one answer to every question proves little"
