"""A run that starts from another run's checkpoint, on another plan, and is resumed without it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmtrain.checkpoint import open_chosen, open_newest_good
from mmtrain.errors import UserError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.recipe import dump_recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, PLAN_FILE, RECIPE_FILE
from mmtrain.runtime.training.start_weights import check_start_weights
from mmtrain.weights.adapters import adapted_weights, adapter_names, read_parameter
from tests.flow.runs import refuse, request_for, run_all

LORA = "train.lora={rank: 4, targets: [llm.*.linear_*], also_train: [vision.projector.*]}"
UNCHANGED = tuple(f"train.optimizer.{x}" for x in ("lr=1e-12", "min_lr=0", "weight_decay=0", "warmup_steps=0"))


@pytest.mark.slow
def test_a_run_starts_from_merged_adapters_of_another_on_another_plan(data: Path, tmp_path: Path) -> None:
    steps = ("train.steps=2", "train.optimizer.lr=0.1")
    first = request_for(data, tmp_path / "first", LORA, *steps, "parallel.placement=unified", "parallel.llm.tp=2")
    assert run_all(first, first) == ["", ""]
    changes = (f"train.init_from={tmp_path}/first", "train.steps=1", "parallel.placement=disaggregated", *UNCHANGED)
    second = request_for(data, tmp_path / "second", *changes)
    assert run_all(second, second) == ["", ""]

    before, after = (open_newest_good(tmp_path / name / CHECKPOINTS_FOLDER, refuse) for name in ("first", "second"))
    adapters = adapted_weights(build_model_shape(first.recipe))
    names = [name for name in after.names() if "#" not in name]
    for name in names:
        expected = read_parameter(before, name)
        if name in adapters:
            a, b = (read_parameter(before, half) for half in adapter_names(name))
            assert b.any(), "two steps left the adapter without effect"
            expected = expected + adapters[name].scale * (b @ a)
        torch.testing.assert_close(read_parameter(after, name), expected, rtol=1e-6, atol=1e-6)
    assert adapters.keys() < set(names)
    assert [row["step"] for row in read_metrics(tmp_path / "second")] == [1]

    # The first run cannot go on without its adapters.
    bare = request_for(data, tmp_path / "first", *steps, "parallel.placement=unified", "train.steps=3", resume=True)
    files = [tmp_path / "first" / name for name in (RECIPE_FILE, PLAN_FILE)]
    contents = [path.read_bytes() for path in files]
    assert "could not be continued: train.lora: rank=4" in run_all(bare, bare)[0]
    assert [path.read_bytes() for path in files] == contents

    # Resumed, it needs the first run no more.
    shutil.rmtree(tmp_path / "first")
    more = request_for(data, tmp_path / "second", *changes, "train.steps=2")
    assert run_all(*[replace(more, resume=True)] * 2) == ["", ""]


@pytest.mark.slow
def test_a_run_of_another_model_is_refused_with_every_parameter(data: Path, tmp_path: Path) -> None:
    first = request_for(data, tmp_path / "first", "train.steps=1")
    assert run_all(first, first) == ["", ""]
    second = request_for(data, tmp_path / "second", f"train.init_from={tmp_path}/first", "model.llm.ffn=72")
    errors = run_all(second, second)
    assert errors[0] == errors[1]
    assert "trained another model, 4 parameters differ" in errors[0]
    assert "llm.layers.2.mlp.linear_fc2.weight: has the shape" in errors[0]


def test_a_folder_without_a_run_or_a_checkpoint_is_refused_before_anything_starts(data: Path, tmp_path: Path) -> None:
    recipe = request_for(data, tmp_path / "second", f"train.init_from={tmp_path}/first").recipe
    with pytest.raises(UserError, match=r"^train\.init_from: .*first: not the folder of a run: there is no such"):
        check_start_weights(recipe)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
    with pytest.raises(UserError, match=r"^train\.init_from: the run in .*first has no checkpoint yet"):
        check_start_weights(recipe)


@pytest.mark.slow
def test_a_run_starts_from_the_chosen_checkpoint_of_another(data: Path, tmp_path: Path) -> None:
    first = request_for(data, tmp_path / "first", "train.steps=2", "train.checkpoint.every=1")
    assert run_all(first, first) == ["", ""]
    changes = (f"train.init_from={tmp_path}/first", "train.steps=1", *UNCHANGED)
    second = request_for(data, tmp_path / "second", *changes, "train.init_checkpoint=1")
    assert run_all(second, second) == ["", ""]
    before, last = (open_chosen(tmp_path / "first" / CHECKPOINTS_FOLDER, step, refuse) for step in (1, 2))
    after = open_newest_good(tmp_path / "second" / CHECKPOINTS_FOLDER, refuse)
    name = "llm.layers.1.mlp.linear_fc1.weight"
    torch.testing.assert_close(read_parameter(after, name), read_parameter(before, name), rtol=1e-6, atol=1e-6)
    assert not read_parameter(after, name).allclose(read_parameter(last, name), rtol=1e-6, atol=1e-6)

    no_best = request_for(data, tmp_path / "third", *changes, "train.init_checkpoint=best")
    assert "train.init_checkpoint: no checkpoint in" in run_all(no_best, no_best)[0]


def test_only_runs_have_checkpoints_to_choose_from(data: Path, tmp_path: Path) -> None:
    recipe = request_for(data, tmp_path / "run", "train.init_checkpoint=best").recipe
    with pytest.raises(UserError, match=r"^train\.init_checkpoint: found best, but train\.init_from \(None\) is no"):
        check_start_weights(recipe)
