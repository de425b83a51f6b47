"""The packages of trackers themselves: names that they reject, runs that are resumed, folders that are replaced."""

from pathlib import Path

import pytest

from mmtrain.report import RunLog, read_metrics
from mmtrain.report.metrics_record import EdgeMetrics
from mmtrain.report.trackers import TrackedRun, TrackerFeeds
from mmtrain.report.trackers.open_trackers import TRACKERS
from tests.report.conftest import metrics
from tests.report.test_trackers import LIMITS
from tests.tracked_steps import LOSSES, mlflow_run, trackio_rows, wandb_rows

CURVE = {
    "wandb": "edge_bytes/vision.0>llm.0",
    "mlflow": "edge_bytes/vision.0-llm.0",
    "trackio": "edge_bytes/vision.0>llm.0",
}


def log(name: str, run_dir: Path, first: int, last: int, num_steps: int, run_id: str = "run00001") -> None:
    run = TrackedRun(
        run_id, "demo", run_dir, first, "name: demo\n", "{}", "a plan", {"train.steps": num_steps, "x": "y>z"}, {}
    )
    notes: list[str] = []
    feeds = TrackerFeeds(run, {name: TRACKERS[name].open}, notes.append, lambda: {"text": "done"}, LIMITS)
    with feeds, RunLog(run_dir, first, enabled=True) as run_log:
        for step in range(first, last + 1):
            run_log.step(metrics(step, edges={"vision.0>llm.0": EdgeMetrics(4096 + step, 0.25)}, loss=step + first / 8))
            feeds.more(is_last=step == num_steps)
    assert notes == []


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DATA_DIR", "MLFLOW_TRACKING_URI", "TRACKIO_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_resumed_run_is_the_same_run_with_each_step_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    log(name, tmp_path, 1, 7, 9)
    log(name, tmp_path, 5, 8, 9)  # what came after step 4 is lost
    log(name, tmp_path, 9, 9, 9)
    expected = [(step["step"], step["loss"]) for step in read_metrics(tmp_path)]
    assert [step for step, _ in expected] == list(range(1, 10))
    assert LOSSES[name](tmp_path) == expected
    curves = {
        "wandb": lambda: [row[CURVE[name]] for row in wandb_rows(tmp_path) if CURVE[name] in row],
        "mlflow": lambda: _mlflow_curve(tmp_path),
        "trackio": lambda: [row[CURVE[name]] for _, _, row in trackio_rows(tmp_path) if CURVE[name] in row],
    }
    assert curves[name]() == [4096 + step for step in range(1, 10)]


def _mlflow_curve(run_dir: Path) -> list[float]:
    client, run = mlflow_run(run_dir)  # which fails if there are two
    assert run.info.status == "FINISHED"
    return [point.value for point in client.get_metric_history(run.info.run_id, CURVE["mlflow"])]
