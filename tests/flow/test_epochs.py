"""A run of one epoch uses each sample once, also if it is killed and goes on with other replicas; then it does more."""

from pathlib import Path

import pytest

from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.report import read_metrics
from tests.faults import FailAt
from tests.flow.runs import SHARDED, launch, request_for

NUM_SAMPLES = 60
SETTINGS = ["train.epochs=1", "train.optimizer.warmup_ratio=0.25", "train.checkpoint.every=1"]


@pytest.mark.slow
def test_an_epoch_is_an_epoch_over_kills_and_replicas(tmp_path: Path) -> None:
    data, run_dir = tmp_path / "data", tmp_path / "run"
    generate_demo(data, seed=3, train=NUM_SAMPLES, heldout=8)
    two = [*SETTINGS, *SHARDED, "cluster.ranks=2"]
    one = [*SETTINGS, "parallel.placement=unified", "cluster.ranks=1"]
    code, _ = launch(request_for(data, run_dir, *two), FailAt(rank=0, step=2, kind="kill"))
    assert code != 0
    done_before = len(read_metrics(run_dir))
    code, error = launch(request_for(data, run_dir, *one, resume=True, ranks=1))
    assert (code, error) == (0, "")
    metrics = read_metrics(run_dir)
    assert 0 < done_before < len(metrics)
    assert [entry["step"] for entry in metrics] == list(range(1, len(metrics) + 1))
    assert sum(entry["samples"] for entry in metrics) == NUM_SAMPLES
    steps = len(metrics)
    code, error = launch(request_for(data, run_dir, *two, "train.epochs=2", resume=True))
    assert (code, error) == (0, "")
    metrics = read_metrics(run_dir)
    assert len(metrics) == 2 * steps
    assert sum(entry["samples"] for entry in metrics) == 2 * NUM_SAMPLES
    code, error = launch(request_for(data, run_dir, *two, "train.steps=99", resume=True))
    assert "train.epochs is set: True then, None now" in error
