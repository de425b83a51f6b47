"""Runs that keep their best checkpoint and end early, also after a kill and on another number of ranks."""

import json
from pathlib import Path

import pytest

from mmtrain.checkpoint import find
from mmtrain.checkpoint.verify_files import read_manifest
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, read_run_state
from tests.faults import FailAt
from tests.flow.runs import SHARDED, launch, request_for
from tests.forked_command import run_forked

# Of a loss that falls the first value is the highest: step 1 stays the best, and step 5 is the fourth without a gain.
SETTINGS = [
    "train.steps=20",
    "train.checkpoint.every=1",
    "train.checkpoint.keep=1",
    "train.validate_every=1",
    "train.validate_batches=1",
    "train.best={metric: val_loss, higher_is_better: true, patience: 4}",
]
LAST_STEP = 5


def best_of(run_dir: Path) -> dict[str, object]:
    """Return what the newest checkpoint says of the best one."""
    state = read_manifest(find(run_dir / CHECKPOINTS_FOLDER)[0]).state
    best = state["best"]
    assert isinstance(best, dict)
    assert best["step"] == state["best_step"]
    return best


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("best") / "data"
    generate_demo(folder, seed=3, train=60, heldout=8)
    return folder


@pytest.mark.slow
def test_a_run_ends_early_and_its_best_checkpoint_is_read(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    paths = [f"data.sources.0.path={data}/train.json", f"data.validation.0.path={data}/heldout.json"]
    request = request_for(data, run_dir, *SETTINGS, "parallel.placement=unified", "cluster.ranks=1", ranks=1)
    assert launch(request) == (0, "")
    assert [step["step"] for step in read_metrics(run_dir)] == [1, 2, 3, 4, 5], paths
    losses = [step["val_loss"] for step in read_metrics(run_dir)]
    assert max(losses) == losses[0]
    assert [folder.name for folder in find(run_dir / CHECKPOINTS_FOLDER)] == ["step-00000005", "step-00000001"]
    assert best_of(run_dir) | {"step": 1, "value": losses[0], "num_without_gain": 4} == best_of(run_dir)
    reason = f"val_loss was not better in 4 measurements in a row; the best val_loss so far is {losses[0]:.6g}, of step"
    state = read_run_state(run_dir)
    assert (state["status"], state["step"], state["error"]) == ("done", LAST_STEP, None)
    assert state["ended_early"].startswith(reason)

    evaluated = run_forked(tmp_path, "evaluate", str(run_dir), "--checkpoint", "best", "--limit", "2", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["step"] == 1
    newest = run_forked(tmp_path, "evaluate", str(run_dir), "--limit", "2", "--json")
    assert json.loads(newest.stdout)["step"] == LAST_STEP
    exported = run_forked(tmp_path, "export", str(run_dir), "--out", "out", "--checkpoint", "best")
    assert exported.returncode == 0, exported.stderr
    assert "step 1" in exported.stdout
    wrong = run_forked(tmp_path, "export", str(run_dir), "--out", "out2", "--checkpoint", "worst")
    assert wrong.returncode == 2
    assert "--checkpoint: found 'worst'; allowed: newest, best, or the step of a checkpoint" in wrong.stderr

    resumed = run_forked(tmp_path, "train", str(run_dir / "recipe.yaml"), "--run-dir", str(run_dir), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"the run ends early, after step {LAST_STEP} of 20: {reason}" in " ".join(resumed.stdout.split())
    assert len(read_metrics(run_dir)) == LAST_STEP
    more = ["--resume", "--set", "train.best.patience=6"]
    goes_on = run_forked(tmp_path, "train", str(run_dir / "recipe.yaml"), "--run-dir", str(run_dir), *more)
    assert goes_on.returncode == 0, goes_on.stderr
    assert len(read_metrics(run_dir)) == LAST_STEP + 2


@pytest.mark.slow
def test_the_end_is_the_same_after_a_kill_and_on_other_ranks(data: Path, tmp_path: Path) -> None:
    """What decides goes with the checkpoint, to the last bit, and two ranks decide as one does."""
    two = [*SETTINGS, *SHARDED, "cluster.ranks=2"]
    one = [*SETTINGS, "parallel.placement=unified", "cluster.ranks=1"]
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    assert launch(request_for(data, unbroken, *two)) == (0, "")
    code, _ = launch(request_for(data, killed, *two), FailAt(rank=1, step=3, kind="kill"))
    assert code != 0
    before = best_of(killed)
    assert before["step"] == 1
    assert launch(request_for(data, killed, *one, resume=True, ranks=1)) == (0, "")
    assert [step["step"] for step in read_metrics(killed)] == [1, 2, 3, 4, 5]
    assert best_of(killed) == best_of(unbroken), "value and count, bit for bit"
    assert best_of(killed)["value"] == before["value"]
    assert read_run_state(killed) == read_run_state(unbroken)
