"""`mmtrain init` writes a recipe that loads, plans and trains as it is, from options or from answers."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mmtrain.api.new_recipe import MAX_SEQ_LEN, RecipeAnswers, write_new_recipe
from mmtrain.errors import DataError, PlanError, RecipeError, TooManyBadSamples, UserError
from mmtrain.families import FAMILIES
from mmtrain.recipe import load_recipe
from mmtrain.weights.tiny_model import write_tiny_model
from tests.cli.conftest import RunMmtrain

NUM_TRAIN = 130


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny LLaVA and conversations."""
    folder = tmp_path_factory.mktemp("init")
    write_tiny_model(FAMILIES["llava"], folder / "tiny", seed=0, num_train=NUM_TRAIN)
    return folder


def test_options_become_a_recipe_that_plans(
    run_mmtrain: RunMmtrain, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    data = "tiny/conversations/train.json"
    heldout = "tiny/conversations/heldout.json"
    done = run_mmtrain(
        "init", "--model", "tiny", "--data", data, "--heldout", heldout, "--gpus", 2, "--hardware", "cpu-core",
        "--out", "recipes/mine.yaml",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "  mmtrain train recipes/mine.yaml"
    text = Path("recipes/mine.yaml").read_text(encoding="utf-8")
    assert str(folder) not in text, "it can be moved with its data"
    assert text.count(" # ") > 7, "settings have comments"
    recipe = load_recipe(Path("recipes/mine.yaml")).recipe
    assert recipe.name == "mine"
    assert recipe.model.hf == folder / "tiny"
    assert recipe.data.sources[0].path == folder / data
    assert recipe.data.validation[0].path == folder / heldout
    assert recipe.train.steps == 3, "once through the data, 64 samples a step"
    assert recipe.model.vision is not None
    assert recipe.model.vision.freeze
    planned = run_mmtrain("plan", "recipes/mine.yaml", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["world_size"] == 2


def test_answers_at_a_terminal_become_the_same_recipe(folder: Path, tmp_path: Path) -> None:
    """The command asks in a terminal; an empty answer leaves the choice to the machine."""
    out = tmp_path / "asked.yaml"
    ours, theirs = pty.openpty()
    answers = f"{folder}/tiny\n{folder}/tiny/conversations/train.json\n\ncpu-core\n2\n"
    os.write(ours, answers.encode())
    done = subprocess.run(
        [sys.executable, "-m", "mmtrain", "init", "--out", str(out)],
        stdin=theirs, capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    assert "Folder of the model" in done.stdout
    recipe = load_recipe(out).recipe
    assert not recipe.data.validation
    assert (recipe.cluster.hardware, recipe.cluster.ranks) == ("cpu-core", 2)


def test_without_a_terminal_nothing_is_asked(run_mmtrain: RunMmtrain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    done = run_mmtrain("init", "--model", "tiny")
    sys.stdin.close()
    assert done.returncode == 2
    assert "init asks for --data, and stdin is no terminal: give the options" in done.stderr


def test_a_recipe_in_the_way_stays(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\n", encoding="utf-8")
    with pytest.raises(UserError, match="no recipe is overwritten"):
        write_new_recipe(RecipeAnswers(str(folder / "tiny"), "x.json"), path)
    assert path.read_text(encoding="utf-8") == "name: mine\n"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "nowhere/at/all"}, RecipeError, "nowhere/at/all"),
        ({"data": "none.json"}, DataError, r"none\.json"),
        ({"hardware": "h1000"}, PlanError, "h1000"),
    ],
)
def test_what_cannot_be_used_leaves_no_recipe(
    folder: Path, tmp_path: Path, changes: dict[str, str], error: type[UserError], message: str
) -> None:
    stated = {"model": str(folder / "tiny"), "data": str(folder / "tiny/conversations/train.json"), **changes}
    with pytest.raises(error, match=message):
        write_new_recipe(RecipeAnswers(**stated), tmp_path / "mine.yaml")  # type: ignore[arg-type]
    assert not (tmp_path / "mine.yaml").exists()


def test_groups_hold_the_longest_sample_and_say_what_is_longer(folder: Path, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("count,text\n196,900\n4,3000\n1,90000\n", encoding="utf-8")
    model = str(folder / "tiny")
    written = write_new_recipe(RecipeAnswers(model, str(lengths)), tmp_path / "by_data.yaml")
    assert written.recipe.data.seq_len == 4096
    assert (written.num_samples, written.num_too_long, written.num_left_out) == (200, 1, 0)
    assert written.recipe.train.steps == 4
    assert MAX_SEQ_LEN < 90000
    stated = write_new_recipe(RecipeAnswers(model, str(lengths), seq_len=3500), tmp_path / "stated.yaml")
    assert (stated.recipe.data.seq_len, stated.num_too_long) == (3500, 1)
    with pytest.raises(TooManyBadSamples, match="too_long 5"):
        write_new_recipe(RecipeAnswers(model, str(lengths), seq_len=1000), tmp_path / "short.yaml")
    assert not (tmp_path / "short.yaml").exists()


@pytest.mark.parametrize("name", ["12", "true", "a: b", "# none", "it's", "ä b"])
def test_names_of_files_are_written_so_that_they_read_back(folder: Path, tmp_path: Path, name: str) -> None:
    data = tmp_path / f"{name}.csv"
    data.write_text("count,text\n64,900\n", encoding="utf-8")
    path = tmp_path / "mine.yaml"
    write_new_recipe(RecipeAnswers(str(folder / "tiny"), str(data)), path)
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["data"]["sources"][0]["path"] == data.as_posix()
