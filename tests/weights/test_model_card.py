"""`mmtrain export` writes a card, and `--push` publishes the folder: in its own process, to a stand-in of the hub."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mmtrain.runtime.run_folder import RECIPE_FILE, load_run_recipe
from mmtrain.runtime.training.model_card import model_card
from tests.weights.hub_server import COMMIT, StandInHub, serve_model
from tests.weights.pretrained import qwen2, save
from tests.weights.test_export_weights import run_from

ROOT = Path(__file__).parents[2]
REPO, TOKEN = "some-org/tiny-model", "hf_abcdefghijklmnopqrstuvwxyz012345"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StandInHub]:
    with serve_model(REPO, tmp_path) as served:
        yield served


@pytest.fixture
def run(tmp_path: Path) -> Path:
    base = save(qwen2(), tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    (base / "LICENSE").write_text("Apache License 2.0")
    run = run_from(base)
    steps = [{"step": 6, "loss": 0.5, "val_loss": 0.75, "extra": {"val_f1": 0.25}}, {"step": 7, "loss": 0.125}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in [*steps, {"step": 8, "loss": 9.0}]))
    return run


def export(run: Path, hub: StandInHub, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    env |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(run.parent / "hf")}
    line = [sys.executable, "-m", "mmtrain", "export", str(run), "--out", "out", *arguments]
    return subprocess.run(line, cwd=run.parent, env=env, capture_output=True, text=True, timeout=300)


def head_of(card: str) -> dict[str, object]:
    head: dict[str, object] = yaml.safe_load(card.split("---\n")[1])
    return head


def test_a_folder_is_published_with_its_card(run: Path, hub: StandInHub) -> None:
    done = export(run, hub, "--push", REPO)
    assert done.returncode == 0, done.stderr
    assert f"published: {hub.url}/{REPO}/commit/{COMMIT}" in done.stdout
    written = {path.name: path.read_bytes() for path in (run.parent / "out").iterdir()}
    assert hub.received == written
    created = next(content for path, content in hub.requests if path.endswith("/repos/create"))
    assert isinstance(created, dict)
    assert created.get("private") is True or created.get("visibility") == "private"
    card = written["README.md"].decode()
    assert head_of(card) == {"library_name": "transformers", "tags": ["mmtrain"], "license": "apache-2.0"}
    assert "the weights after step 7 of" in card
    assert "base. Its licence: apache-2.0 and LICENSE." in card
    for row in ("| loss | 0.125 | 7 |", "| val_loss | 0.75 | 6 |", "| val_f1 | 0.25 | 6 |"):
        assert row in card
    assert str(run.parent) not in card, "no path of this machine"
    assert TOKEN not in card + done.stdout + done.stderr


@pytest.mark.parametrize(
    ("status", "text"), [(401, "does not know you: log in with `hf auth login`"), (403, "you may not write there")]
)
def test_a_hub_that_refuses_is_asked_before_weights_are_written(
    run: Path, hub: StandInHub, status: int, text: str
) -> None:
    hub.refuses_posts = status
    done = export(run, hub, "--push", REPO)
    assert done.returncode == 1
    assert text in done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not (run.parent / "out").exists()


def test_an_upload_that_breaks_off_leaves_the_folder_and_says_how_to_go_on(run: Path, hub: StandInHub) -> None:
    hub.refuses_posts, hub.refused_path = 403, "/commit/"
    done = export(run, hub, "--push", REPO)
    assert done.returncode == 1
    assert f"out is complete; `hf upload {REPO} out` uploads it, without what has arrived" in done.stderr
    assert (run.parent / "out" / "README.md").exists()


def test_a_name_that_is_none_is_refused(run: Path, hub: StandInHub) -> None:
    done = export(run, hub, "--push", "no name")
    assert done.returncode == 2
    assert "--push: found 'no name'; allowed: the name of a repository, ORG/NAME" in done.stderr


def test_a_card_masks_credentials_and_states_what_is_not_known(run: Path) -> None:
    (run.parent / "base" / "README.md").unlink()
    (run.parent / "base" / "LICENSE").unlink()
    (run / "metrics.jsonl").unlink()
    text = (run / RECIPE_FILE).read_text().replace("name: tiny", f"name: tiny-{TOKEN}")
    (run / RECIPE_FILE).write_text(text)
    recipe = load_run_recipe(run)
    card = model_card(run, recipe, 7, "model")
    assert TOKEN not in card
    assert "Its folder states no licence" in card
    assert "The log of the run has no measurements up to this step." in card
    assert "The folder of the run has no plan that can be read." in card
    assert "license" not in head_of(card)
