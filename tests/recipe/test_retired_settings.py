"""A retired setting still works for one release, and warns; a recipe may state the lowest version that reads it."""

import subprocess
import sys
from pathlib import Path

import pytest

from mmtrain import __version__
from mmtrain.errors import RecipeError, RetiredSettingWarning
from mmtrain.recipe import load_recipe
from mmtrain.recipe.loading.retired_settings import RETIRED_SETTINGS, RetiredSetting

DEMO = Path(__file__).parents[2] / "recipes" / "demo.yaml"


def recipe_with(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"extends: {DEMO}\n{text}", encoding="utf-8")
    return path


def test_the_replacement_takes_the_value_and_the_warning_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RETIRED_SETTINGS, "train.total_steps", RetiredSetting("0.2.0", "train.watchdog_s"))
    path = recipe_with(tmp_path, "train: {total_steps: 77}\n")
    message = (
        r"^train\.total_steps is retired since mmtrain 0\.2\.0 and will be rejected: write train\.watchdog_s \(.*:2\)"
    )
    with pytest.warns(RetiredSettingWarning, match=message):
        loaded = load_recipe(path)
    assert loaded.recipe.train.watchdog_s == 77
    assert loaded.origin("train.watchdog_s") == f"{path}:2"


def test_a_setting_of_the_command_line_is_replaced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RETIRED_SETTINGS, "watchdog.seconds", RetiredSetting("0.2.0", "train.watchdog_s"))
    with pytest.warns(RetiredSettingWarning, match="write train.watchdog_s"):
        loaded = load_recipe(DEMO, ["watchdog.seconds=5"])
    assert loaded.recipe.train.watchdog_s == 5


def test_a_setting_without_a_replacement_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RETIRED_SETTINGS, "train.colour", RetiredSetting("0.2.0", None))
    with pytest.warns(
        RetiredSettingWarning, match="train.colour is retired .* it has no effect any more; leave it out"
    ):
        loaded = load_recipe(recipe_with(tmp_path, "train: {colour: red}\n"))
    assert loaded.recipe == load_recipe(DEMO).recipe


def test_both_names_together_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RETIRED_SETTINGS, "train.total_steps", RetiredSetting("0.2.0", "train.steps"))
    message = (
        r"train\.total_steps: was replaced by train\.steps, which the recipe has too; leave train\.total_steps out"
    )
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe_with(tmp_path, "train: {total_steps: 77}\n"))


def test_the_command_line_shows_the_warning_as_a_message(tmp_path: Path) -> None:
    """The recipe has an error too, so that the command ends once it is loaded."""
    path = recipe_with(tmp_path, "train: {colour: red, steps: none}\n")
    code = f"""
import sys
from mmtrain.cli import main
from mmtrain.recipe.loading.retired_settings import RETIRED_SETTINGS, RetiredSetting
RETIRED_SETTINGS["train.colour"] = RetiredSetting("0.2.0", None)
sys.argv = ["mmtrain", "plan", {str(path)!r}]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.startswith("mmtrain: train.colour is retired since mmtrain 0.2.0 and will be rejected: ")
    assert "Warning" not in done.stderr
    assert "train.steps" in done.stderr


@pytest.mark.parametrize("version", [__version__, "0.0.1"])
def test_a_recipe_for_this_version_or_an_older_one_is_read(tmp_path: Path, version: str) -> None:
    assert load_recipe(recipe_with(tmp_path, f"mmtrain: {version}\n")).recipe.mmtrain == version


def test_a_recipe_for_a_newer_version_is_refused_before_its_unknown_settings(tmp_path: Path) -> None:
    path = recipe_with(tmp_path, "mmtrain: 99.1.0\ntrain: {colour: red}\n")
    message = (
        f":2: the recipe asks for mmtrain 99.1.0 or later, and this is mmtrain {__version__}; install it with `pip"
    )
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


@pytest.mark.parametrize("value", ["0.1", "newest", "[1]"])
def test_what_is_no_version_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(
        RecipeError, match=r"mmtrain: found .*; allowed: the lowest version that reads the recipe, such as"
    ):
        load_recipe(recipe_with(tmp_path, f"mmtrain: {value}\n"))


def test_a_base_may_ask_for_more_than_the_recipe(tmp_path: Path) -> None:
    base = recipe_with(tmp_path, "mmtrain: 99.1.0\n")
    path = tmp_path / "over.yaml"
    path.write_text(f"extends: {base}\nmmtrain: {__version__}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"recipe\.yaml:2: the recipe asks for mmtrain 99\.1\.0"):
        load_recipe(path)
