"""`mmtrain convert-config`, the command."""

import json
from pathlib import Path

from mmtrain.recipe.loading.other_trainers import TRAINERS
from tests.cli.conftest import RunMmtrain


def test_the_command_writes_a_recipe_once(run_mmtrain: RunMmtrain, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"num_train_epochs": 2, "learning_rate": "2e-5", "foo": 1}))
    done = run_mmtrain("convert-config", tmp_path / "c.json", "--out", tmp_path / "r.yaml")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "r.yaml").read_text()
    assert "#   * foo: 1: is not known here" in text
    assert "epochs: 2.0" in text
    again = run_mmtrain("convert-config", tmp_path / "c.json", "--out", tmp_path / "r.yaml")
    assert again.returncode != 0
    assert "exists; name another file" in again.stderr
    described = json.loads(run_mmtrain("convert-config", tmp_path / "c.json", "--json").stdout)
    assert described["trainer"] in TRAINERS
