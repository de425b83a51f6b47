"""The demo's model, trained for a moment and exported, gives the same answers in transformers as here."""

import json
from pathlib import Path

import pytest

from mmtrain.checkpoint import open_newest_good
from mmtrain.data import build_index
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
from mmtrain.weights import export_folder
from tests.flow.runs import refuse, request_for, run_all
from tests.runtime.models import evaluated
from tests.weights.test_new_folder import answer_of_transformers, our_answers

MAX_NEW_TOKENS = 12


@pytest.mark.slow
def test_the_exported_demo_answers_in_transformers_as_evaluate_says(data: Path, tmp_path: Path) -> None:
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    run_dir, out = tmp_path / "run", tmp_path / "exported"
    rows = json.loads((data / "train.json").read_text(encoding="utf-8"))
    questions = tmp_path / "questions.json"  # those that it has seen, so that many answers are right
    questions.write_text(json.dumps(rows[:40]), encoding="utf-8")
    changes = [
        "train.steps=60", "train.checkpoint.every=60", "model.vision.layers=5", "model.llm.layers=3",
        "data.seq_len=368", f"data.validation.0={{path: {questions}, image_root: {data}}}",
    ]  # fmt: skip
    request = request_for(data, run_dir, *changes)
    assert run_all(request, request) == ["", ""]
    recipe = load_run_recipe(run_dir)
    export_folder(recipe, open_newest_good(run_dir / CHECKPOINTS_FOLDER, refuse), out)

    ours = our_answers(recipe, run_dir, MAX_NEW_TOKENS)
    model = LlavaForConditionalGeneration.from_pretrained(out).eval()
    processor = AutoProcessor.from_pretrained(out)
    samples = build_index(recipe, "validation").samples
    theirs = {sample.id: answer_of_transformers(model, processor, sample, MAX_NEW_TOKENS) for sample in samples}
    assert theirs == ours
    num_right = sum(theirs[sample.id] == sample.answer.strip() for sample in samples)
    assert num_right == sum(template.exact for template in evaluated(run_dir).templates)
    assert num_right > 4
