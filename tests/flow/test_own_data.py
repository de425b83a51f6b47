"""Whole runs on data of other layouts, and on a source of which a part is held out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.data import build_index
from mmtrain.program import Backward
from mmtrain.report import read_metrics
from mmtrain.runtime.evaluation.score_run import EvaluateRequest, EvaluationResult, run
from tests.distributed import RanksFailed
from tests.faults import FailAt
from tests.flow.runs import assert_same_end, request_for, run_all


def _copy_in_another_layout(data: Path, folder: Path) -> None:
    """Write the demo's samples with keys of their own; the pictures stay where they are."""
    folder.mkdir()
    for name in ("train.json", "heldout.json"):
        entries = []
        for entry in json.loads((data / name).read_text()):
            question, answer = (turn["value"] for turn in entry["conversations"])
            rest = {key: value for key, value in entry.items() if key not in ("conversations", "image")}
            entries.append({**rest, "qa": {"question": question, "answer": answer}, "pictures": entry.get("image")})
        (folder / name).write_text(json.dumps(entries))
    (folder / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())


@pytest.mark.slow
def test_a_run_on_another_layout_is_the_run_on_messages(data: Path, unbroken: Path, tmp_path: Path) -> None:
    _copy_in_another_layout(data, tmp_path / "own")
    settings = []
    for name in ("sources", "validation"):
        settings.append(f"data.{name}.0.columns={{query: qa.question, response: qa.answer, images: pictures}}")
        settings.append(f"data.{name}.0.image_root={data}")
    request = request_for(tmp_path / "own", tmp_path / "run", *settings)
    assert run_all(request, request) == ["", ""]
    assert_same_end(tmp_path / "run", unbroken)


HELD_OUT = ("data.validation=[]", "data.validation_fraction=0.2", "train.validate_every=3")


@pytest.mark.slow
def test_a_run_holds_out_the_same_samples_when_it_is_resumed(data: Path, tmp_path: Path) -> None:
    whole = request_for(data, tmp_path / "whole", *HELD_OUT)
    assert run_all(whole, whole) == ["", ""]
    request = request_for(data, tmp_path / "run", *HELD_OUT)
    with pytest.raises(RanksFailed, match="rank 1: died without a word"):
        run_all(request, request, faults=FailAt(1, 4, "kill", action=Backward))
    resumed = replace(request, resume=True)
    assert run_all(resumed, resumed) == ["", ""]
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    losses = [[step.get("val_loss") for step in read_metrics(tmp_path / name)] for name in ("run", "whole")]
    assert losses[0] == losses[1]
    assert losses[0][2] is not None
    other = request_for(data, tmp_path / "run", *HELD_OUT, "data.validation_fraction=0.3", resume=True)
    assert all("data.validation_fraction: 0.2 then, 0.3 now" in error for error in run_all(other, other))

    results: list[EvaluationResult] = []
    run(EvaluateRequest(tmp_path / "whole", whole.planner, results.append))
    recipe = whole.loaded.recipe
    num_held_out = len(build_index(recipe, "validation").samples)
    assert results[0].total.questions == num_held_out
    assert 5 < num_held_out < len(build_index(recipe).samples)


@pytest.mark.slow
def test_a_run_on_samples_that_are_cut_is_the_same_on_another_plan(data: Path, tmp_path: Path) -> None:
    cut = ("data.max_sample_tokens=48", "data.too_long=cut", "data.max_bad_rate=1", "train.checkpoint.every=0")
    plans = {"apart": (), "together": ("parallel.placement=unified",)}
    losses = {}
    for name, settings in plans.items():
        request = request_for(data, tmp_path / name, *cut, *settings)
        assert run_all(request, request) == ["", ""]
        losses[name] = [step["loss"] for step in read_metrics(tmp_path / name)]
    index = build_index(request.loaded.recipe)
    assert 5 < sum(sample.cut is not None for sample in index.samples) < len(index.samples)
    assert losses["apart"] == pytest.approx(losses["together"], rel=1e-4)
