"""Files of every tagged version are read; those of an unknown newer one are refused, with both versions named.

A folder beside this file has the files of one version as it wrote them (`write_files.py`). Files of a tag never change.
"""

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mmtrain import __version__
from mmtrain.checkpoint import ShardSpec, open_newest_good
from mmtrain.costs import CostTable
from mmtrain.errors import CheckpointError, PlanError, RecipeError
from mmtrain.planning import load_plan
from mmtrain.planning.artifact.plan_files import require_match
from mmtrain.recipe import load_recipe
from tests.compatibility.write_files import run_mmtrain

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDERS = sorted(path for path in HERE.iterdir() if re.fullmatch(r"\d+\.\d+\.\d+", path.name))
NEWER = "99.1.0"
BOTH_VERSIONS = f"written by mmtrain {NEWER}; this is mmtrain {__version__}, which reads format"

each_version = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def copied(folder: Path, tmp_path: Path) -> Path:
    """Return a copy of a version's files, which a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "files"))


def change(path: Path, **changes: object) -> None:
    """Change keys of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | changes), encoding="utf-8")


def seal(body: dict[str, Any]) -> bytes:
    """Make a checkpoint's manifest with the sum that belongs to it."""
    text = json.dumps(body).encode()
    return b'{"sha256":"%s","manifest":%s}\n' % (hashlib.sha256(text).hexdigest().encode(), text)


def test_every_tag_has_a_folder_and_so_has_this_version() -> None:
    tags = subprocess.run(["git", "tag", "--list", "v*"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert {tag.removeprefix("v") for tag in tags} | {__version__} <= {folder.name for folder in FOLDERS}


@each_version
def test_recipe_and_plan_are_read_and_match(folder: Path) -> None:
    """The plan's fingerprint of the recipe is today's: settings that came later have left it alone."""
    recipe = load_recipe(folder / "recipe.yaml").recipe
    plan = load_plan(folder / "plan.json")
    assert plan.mmtrain == folder.name
    require_match(plan, recipe, world_size=1, hardware="cpu-core")


@each_version
def test_the_cost_table_is_read(folder: Path) -> None:
    table = CostTable.load(folder / "costs.json")
    assert table.mmtrain == folder.name
    assert table.layers
    assert table.messages


@each_version
def test_the_checkpoint_is_read(folder: Path) -> None:
    checkpoint = open_newest_good(folder / "checkpoints", on_bad=pytest.fail)
    assert checkpoint.step == 2
    for name in checkpoint.names():
        shape = checkpoint.full_shape(name)
        assert checkpoint.read(name, ShardSpec(shape)).shape == shape


@pytest.mark.slow
@each_version
def test_a_run_goes_on_from_the_checkpoint_on_the_plan(folder: Path, tmp_path: Path) -> None:
    files = copied(folder, tmp_path)
    run = files / "run"
    run.mkdir()
    shutil.move(files / "checkpoints", run / "checkpoints")
    shutil.copyfile(files / "plan.json", run / "plan.json")
    arguments = ("--run-dir", "run", "--resume", "--set", "train.steps=3", "--set", "train.checkpoint.every=3")
    printed = run_mmtrain(files, "train", "recipe.yaml", *arguments)
    assert re.search(r"step +3/3 ", printed)
    assert "step  1/3" not in printed
    assert load_plan(run / "plan.json") == load_plan(folder / "plan.json")
    assert open_newest_good(run / "checkpoints", on_bad=pytest.fail).step == 3


@each_version
def test_files_of_an_unknown_newer_version_are_refused(folder: Path, tmp_path: Path) -> None:
    files = copied(folder, tmp_path)
    change(files / "plan.json", version=99, mmtrain=NEWER)
    with pytest.raises(PlanError, match=re.escape(f"the plan file is of format 99, {BOTH_VERSIONS}")):
        load_plan(files / "plan.json")
    change(files / "costs.json", version=99, mmtrain=NEWER)
    with pytest.raises(PlanError, match=re.escape(f"the cost table is of format 99, {BOTH_VERSIONS}")):
        CostTable.load(files / "costs.json")
    (manifest,) = files.glob("checkpoints/step-*/manifest.json")
    body = json.loads(manifest.read_bytes())["manifest"]
    manifest.write_bytes(seal(body | {"format": 99, "mmtrain": NEWER}))
    with pytest.raises(CheckpointError, match=re.escape(f"is of format 99, {BOTH_VERSIONS}")):
        open_newest_good(files / "checkpoints", on_bad=pytest.fail)
    recipe = files / "recipe.yaml"
    text = recipe.read_text(encoding="utf-8").replace(f"mmtrain: {folder.name}", f"mmtrain: {NEWER}")
    recipe.write_text(text + "color: red\n", encoding="utf-8")
    message = f"asks for mmtrain {NEWER} or later, and this is mmtrain {__version__}"
    with pytest.raises(RecipeError, match=re.escape(message)):
        load_recipe(recipe)


@each_version
def test_a_plan_with_a_key_of_another_version_names_that_version(folder: Path, tmp_path: Path) -> None:
    files = copied(folder, tmp_path)
    change(files / "plan.json", mmtrain=NEWER, color="red")
    message = f"damaged plan file (written by mmtrain {NEWER}; this is mmtrain {__version__}): color"
    with pytest.raises(PlanError, match=re.escape(message)):
        load_plan(files / "plan.json")
