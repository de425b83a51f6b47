"""Recipes with stages: what each stage's recipe is, and what is wrong with a list of them."""

from pathlib import Path

import pytest

from mmtrain.api.stage_runs import stage_runs
from mmtrain.errors import LaunchError, RecipeError, UserError
from mmtrain.recipe import load_recipe, read_recipe
from tests.cli.conftest import RunMmtrain, run_mmtrain

__all__ = ["run_mmtrain"]

BASE = """
name: staged
model: {llm: {layers: 1, hidden: 8, heads: 2, ffn: 16, vocab: 64}}
data: {sources: [{path: lengths.csv}], seq_len: 32}
train: {steps: 9, global_batch: 2, optimizer: {lr: 0.1}, init_from: first}
"""
STAGES = """
stages:
  - name: align
    train: {optimizer: {lr: 0.5}, freeze: ["llm.layers.0.*"]}
  - name: sft
    data: {sources: [{path: other.csv}], seq_len: 64}
    train: {steps: 3}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_stage_lays_its_settings_over_the_recipe(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + STAGES)
    written = read_recipe(path)
    assert (written.stages, written.chosen_stage) == (("align", "sft"), None)
    align, sft = (written.load(f"stage={name}").recipe for name in written.stages)
    assert sft == load_recipe(path, ["stage=sft"]).recipe
    assert (align.train.steps, align.train.optimizer.lr, align.data.seq_len) == (9, 0.5, 32)
    assert (sft.train.steps, sft.train.optimizer.lr, sft.data.seq_len) == (3, 0.1, 64)
    assert sft.data.sources[0].path == tmp_path / "other.csv"
    assert not sft.train.freeze


def test_every_stage_has_a_place_of_its_own_in_the_object_store(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + STAGES)
    runs = stage_runs(read_recipe(path, ["train.checkpoint.remote=s3://bucket/run"]), tmp_path / "run")
    places = [str(run.loaded.recipe.train.checkpoint.remote) for run in runs]
    assert places == ["s3://bucket/run/1-align", "s3://bucket/run/2-sft"]
    assert [run.folder.name for run in runs] == ["1-align", "2-sft"]
    [chosen] = stage_runs(read_recipe(path, ["stage=sft", "train.checkpoint.remote=s3://bucket/run"]), tmp_path / "run")
    assert str(chosen.loaded.recipe.train.checkpoint.remote) == "s3://bucket/run/2-sft"


def test_settings_of_the_command_line_hold_for_every_stage_and_may_change_one(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + STAGES)
    changes = ["train.steps=2", "stages.0.train.optimizer.lr=0.25"]
    align, sft = (load_recipe(path, [*changes, f"stage={name}"]).recipe for name in ("align", "sft"))
    assert (align.train.steps, sft.train.steps) == (2, 2)
    assert (align.train.optimizer.lr, sft.train.optimizer.lr) == (0.25, 0.1)


def test_each_stage_has_a_folder_and_starts_from_the_one_before(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + STAGES)
    runs = stage_runs(read_recipe(path), tmp_path / "run")
    assert [run.folder for run in runs] == [tmp_path / "run" / "1-align", tmp_path / "run" / "2-sft"]
    assert [run.loaded.recipe.train.init_from for run in runs] == [tmp_path / "first", tmp_path / "run" / "1-align"]
    [chosen] = stage_runs(read_recipe(path, ["stage=sft"]), tmp_path / "run")
    assert (chosen.loaded, chosen.folder) == (runs[1].loaded, runs[1].folder)
    [plain] = stage_runs(read_recipe(write(tmp_path, BASE)), None)
    assert (plain.folder, plain.stage) == (Path("runs/staged"), None)


def test_a_recipe_is_read_once_for_all_of_its_stages(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + STAGES)
    written = read_recipe(path, ["train.steps=5"])
    path.unlink()
    runs = stage_runs(written, tmp_path / "run")
    assert [run.loaded.recipe.train.steps for run in runs] == [5, 5]


def test_problems_of_one_stage_are_not_those_of_another(tmp_path: Path) -> None:
    written = read_recipe(write(tmp_path, BASE + "stages: [{name: a, train: {stepps: 3}}, {name: b}]"))
    with pytest.raises(RecipeError, match=r"1 problem\n.*train.stepps"):
        written.load("stage=a")
    assert written.load("stage=b").recipe.train.steps == 9


@pytest.mark.parametrize(
    ("stages", "overrides", "message"),
    [
        (STAGES, [], "stages: the recipe has the stages align, sft, and this command works on one of them"),
        (STAGES, ["stage=stf"], r"stage: found 'stf'; allowed: align, sft \(--set stage=stf\)"),
        ("", ["stage=sft"], "stage: found 'sft'; the recipe has no stages"),
        ("stages: 3", [], r"stages: found no list; allowed: .* \(.*recipe.yaml:6\)"),
        ("stages: [{train: {steps: 2}}]", [], r"stages.0.name: found nothing; allowed: letters"),
        ("stages: [{name: a}, {name: a}]", [], r"stages.1.name: a is the name of an earlier stage"),
        ("stages: [{name: a/b}]", [], r"stages.0.name: found 'a/b'; allowed: letters"),
        ("stages: [{name: a}, {name: b, train: {init_from: x}}]", [], r"stages.1.train.init_from: a stage starts from"),
        ("stages: [{name: a, train: {stepps: 3}}]", ["stage=a"], r"train.stepps: .*recipe.yaml:6"),
    ],
)
def test_a_wrong_stage_is_one_clear_error(stages: str, overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(tmp_path, BASE + stages), overrides)


@pytest.mark.parametrize("option", ["--plan", "--resume-from"])
def test_options_for_one_stage_are_refused_for_several(option: str, tmp_path: Path, run_mmtrain: RunMmtrain) -> None:
    done = run_mmtrain("train", write(tmp_path, BASE + STAGES), option, "3")
    assert done.returncode == UserError.exit_code
    assert f"{option}: for one stage of the recipe; choose it with --set stage=align" in done.stderr


@pytest.mark.slow  # it imports all that trains
def test_stages_that_do_not_fit_the_started_processes_are_named_before_the_first(
    tmp_path: Path, run_mmtrain: RunMmtrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = BASE + STAGES.replace("seq_len: 64}", "seq_len: 64}\n    cluster: {ranks: 3}")
    text = text.replace(".csv}]", ".json}], tokenizer: tokenizer.json")
    recipe = write(tmp_path, text)
    done = run_mmtrain("train", recipe, "--run-dir", tmp_path / "run")
    assert done.returncode == LaunchError.exit_code
    assert "cluster.ranks: 3 in the recipe, but 2 processes were started" in done.stderr
    assert not (tmp_path / "run").exists()


def test_plan_plans_every_stage(tmp_path: Path, run_mmtrain: RunMmtrain) -> None:
    for name in ("lengths.csv", "other.csv"):
        (tmp_path / name).write_text("text\n9\n7\n8\n5\n", encoding="utf-8")
    recipe = write(tmp_path, BASE + STAGES)
    done = run_mmtrain("plan", recipe, "--cluster", "h100-80g", "--set", "cluster.ranks=2")
    assert done.returncode == 0, done.stderr
    assert "stage 1 of 2, align" in done.stdout
    assert "stage 2 of 2, sft" in done.stdout
    assert done.stdout.count("Predicted step") == 2


def test_a_stage_that_is_chosen_is_not_counted_among_those_that_do_not_run(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + STAGES)
    both = stage_runs(read_recipe(path), tmp_path / "run")
    assert [run.stage for run in both] == ["1 of 2, align", "2 of 2, sft"]
    [chosen] = stage_runs(read_recipe(path, ["stage=sft"]), tmp_path / "run")
    assert (chosen.stage, chosen.folder) == ("sft", tmp_path / "run" / "2-sft")
