"""`mmtrain recipes` lists the shipped recipes, and copies one so that it works from where it was written."""

import json
import re
from pathlib import Path

import pytest

from mmtrain.api.shipped_recipes import shipped_recipes
from mmtrain.recipe import editor_schema, load_recipe
from tests.cli.conftest import RunMmtrain

ROOT = Path(__file__).parents[2]
# The others start from a model of the hub, and name no file that exists.
LOADABLE = [recipe.name for recipe in shipped_recipes() if not re.search(r"_sft|_lora|_align", recipe.name)]
MAX_SUMMARY_CHARACTERS = 220


@pytest.fixture(autouse=True)
def work_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_recipes_are_listed_with_a_sentence(run_mmtrain: RunMmtrain) -> None:
    rows = json.loads(run_mmtrain("recipes", "--json").stdout)["recipes"]
    names = {path.relative_to(ROOT / "recipes").with_suffix("").as_posix() for path in ROOT.glob("recipes/**/*.yaml")}
    assert {row["name"] for row in rows} == names
    assert all(10 < len(row["summary"]) < MAX_SUMMARY_CHARACTERS for row in rows)
    table = run_mmtrain("recipes", columns=80).stdout.splitlines()
    assert table[0].startswith("demo  ")
    assert max(map(len, table[:-1])) <= 80


@pytest.mark.parametrize("name", LOADABLE)
def test_a_copy_is_the_recipe_with_data_in_the_working_folder(
    run_mmtrain: RunMmtrain, tmp_path: Path, name: str
) -> None:
    """Both are loaded: paths between shipped files and paths of data lead to where they led from the tree."""
    assert run_mmtrain("recipes", "copy", name, "--out", "some/where").returncode == 0
    copy = tmp_path / "some" / "where" / f"{name}.yaml"
    copied = load_recipe(copy).recipe.model_dump_json()
    original = load_recipe(ROOT / "recipes" / f"{name}.yaml").recipe.model_dump_json()
    from_recipes = copied.replace(str(tmp_path / "some" / "where"), str(ROOT / "recipes"))
    assert from_recipes.replace(str(tmp_path), str(ROOT)) == original


def test_the_default_folder_makes_the_commands_of_the_pages_work(run_mmtrain: RunMmtrain, tmp_path: Path) -> None:
    """They name `recipes/demo.yaml`, and so does the comment of the recipe itself."""
    run_mmtrain("recipes", "copy", "recipes/demo.yaml")
    original = (ROOT / "recipes" / "demo.yaml").read_text(encoding="utf-8")
    copy = (tmp_path / "recipes" / "demo.yaml").read_text(encoding="utf-8")
    assert copy == original.replace("../docs/recipe.schema.json", "recipe.schema.json")


def test_comments_name_the_copy(run_mmtrain: RunMmtrain, tmp_path: Path) -> None:
    run_mmtrain("recipes", "copy", "demo", "--out", ".")
    text = (tmp_path / "demo.yaml").read_text(encoding="utf-8")
    assert "#     mmtrain train demo.yaml\n" in text
    assert "- path: demo-data/train.json\n" in text


@pytest.mark.parametrize("name", ["demo", "whatif/internvl_26b", "whatif/papers/mmscale_7b"])
def test_the_schema_lies_where_the_copy_says(run_mmtrain: RunMmtrain, tmp_path: Path, name: str) -> None:
    run_mmtrain("recipes", "copy", name)
    for path in tmp_path.glob("recipes/**/*.yaml"):
        schema = re.search(r"\$schema=(\S+)", path.read_text(encoding="utf-8"))
        assert schema is not None
        assert json.loads((path.parent / schema[1]).read_text(encoding="utf-8")) == editor_schema()


def test_nothing_is_overwritten(run_mmtrain: RunMmtrain, tmp_path: Path) -> None:
    """A base that was changed stops the copy before the first file is written."""
    base = tmp_path / "recipes" / "whatif" / "common.yaml"
    base.parent.mkdir(parents=True)
    base.write_text("name: mine\n", encoding="utf-8")
    done = run_mmtrain("recipes", "copy", "whatif/internvl_26b")
    assert done.returncode == 2
    assert "recipes/whatif/common.yaml: there already, with other content; nothing was written" in done.stderr
    assert base.read_text(encoding="utf-8") == "name: mine\n"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [base]


def test_recipes_of_one_base_are_copied_beside_each_other(run_mmtrain: RunMmtrain, tmp_path: Path) -> None:
    run_mmtrain("recipes", "copy", "whatif/internvl_26b")
    done = run_mmtrain("recipes", "copy", "whatif/eva_llama_26b")
    assert done.returncode == 0
    assert done.stdout.startswith("recipes/whatif/eva_llama_26b.yaml: written")
    again = run_mmtrain("recipes", "copy", "whatif/eva_llama_26b")
    assert again.stdout.startswith("recipes/whatif/eva_llama_26b.yaml: there already, as it is shipped")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("demmo", "; did you mean demo?"),
        ("internvl_26b", "; did you mean whatif/internvl_26b?"),
        ("mmscale_70b", "; did you mean whatif/mmscale_70b or whatif/papers/mmscale_70b?"),
        ("zzz", ". `mmtrain recipes` lists all"),
    ],
)
def test_an_unknown_name_gets_the_nearest(run_mmtrain: RunMmtrain, name: str, nearest: str) -> None:
    done = run_mmtrain("recipes", "copy", name)
    assert done.returncode == 2
    assert f"no recipe of mmtrain is called {name!r}{nearest}" in done.stderr


def test_recipes_name_models_as_the_hub_does() -> None:
    """A folder like `models/NAME` would be the name of a stranger's model there."""
    named = {
        path.name: match[1]
        for path in (ROOT / "recipes").glob("*.yaml")
        if (match := re.search(r"^  hf: (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    }
    assert named
    assert {name.partition("/")[0] for name in named.values()} == {"Qwen", "google", "llava-hf"}
