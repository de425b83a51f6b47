"""Arranging a step for its plan changes who computes what, and neither losses nor the order of the data."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.balance import StepTargets
from mmtrain.data import GroupStream, build_index
from mmtrain.planning import Plan, load_plan
from mmtrain.planning.artifact.balancing_targets import derive_step_targets
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, PLAN_FILE
from mmtrain.runtime.training.train_request import TrainRequest
from tests.flow.runs import request_for, run_all

TOGETHER = ("parallel.placement=unified", "parallel.llm.dp=2", "train.global_batch=8")
APART = ("parallel.placement=disaggregated", "train.global_batch=8")
CHUNKS = (*APART, "model.llm.layers=4", "parallel.llm.pp=2", "parallel.llm.vpp=2")


def _losses(run_dir: Path) -> list[float]:
    return [step["loss"] for step in read_metrics(run_dir)]


def _rearranged(request: TrainRequest, plan: Plan) -> bool:
    """Whether targets change some of the first steps of a run."""
    recipe = request.loaded.recipe
    index = build_index(recipe)
    stream, targets = GroupStream.of(recipe, index), derive_step_targets(recipe, plan, index.lengths)
    dp = {name: unit.dp for name, unit in plan.units.items()}
    ways = [
        [stream.batch(s, 8, dp, plan.schedule.num_microbatches, a).sample_id.tolist() for s in range(3)]
        for a in (targets, StepTargets(reorder=False))
    ]
    return ways[0] != ways[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "ranks"),
    [(TOGETHER, 2), (APART, 2), (CHUNKS, 3)],
    ids=["units together, two replicas", "a pipeline of two", "an interleaved pipeline"],
)
def test_losses_are_those_of_steps_as_they_come(
    data: Path, tmp_path: Path, changes: tuple[str, ...], ranks: int
) -> None:
    arranged, plain = (
        request_for(data, tmp_path / on, *changes, "train.steps=3", f"data.reorder={on}") for on in ("true", "false")
    )
    assert run_all(*[arranged] * ranks) == [""] * ranks
    assert _rearranged(arranged, load_plan(arranged.run_dir / PLAN_FILE))
    assert run_all(*[plain] * ranks) == [""] * ranks
    assert _losses(arranged.run_dir) == pytest.approx(_losses(plain.run_dir), rel=1e-5)


@pytest.mark.slow  # 8 s
def test_a_run_continues_in_the_same_data_under_another_plan(data: Path, tmp_path: Path) -> None:
    whole = request_for(data, tmp_path / "whole", *TOGETHER)
    assert run_all(whole, whole) == ["", ""]
    shutil.copytree(whole.run_dir, tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / CHECKPOINTS_FOLDER / "step-00000006")
    moved = replace(request_for(data, tmp_path / "moved", *APART), resume=True)
    assert run_all(moved, moved) == ["", ""]
    assert load_plan(moved.run_dir / PLAN_FILE).placement == "disaggregated"
    steps = [(s["samples"], s["tokens"]) for s in read_metrics(moved.run_dir)]
    assert steps == [(s["samples"], s["tokens"]) for s in read_metrics(whole.run_dir)]
    assert _losses(moved.run_dir) == pytest.approx(_losses(whole.run_dir), rel=1e-5)


def test_a_sample_that_no_arrangement_evens_out_is_named(data: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "data"
    shutil.copytree(data, spoiled)
    samples = json.loads((data / "train.json").read_text(encoding="utf-8"))[:4]
    samples[2]["conversations"][-1]["value"] = " ".join(["red"] * 120)
    (spoiled / "train.json").write_text(json.dumps(samples), encoding="utf-8")
    request = request_for(spoiled, tmp_path / "run", *TOGETHER[:2], "train.global_batch=2", "train.steps=2")
    assert run_all(request, request) == ["", ""]
    steps = read_metrics(request.run_dir)
    assert {step.get("bound_sample") for step in steps} == {samples[2]["id"]}
