"""Trackers hold the steps of `metrics.jsonl`, once each, after a run was killed and resumed."""

import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mmtrain.errors import UserError
from mmtrain.program import Forward
from mmtrain.report import read_metrics
from mmtrain.report.trackers import require_trackers
from tests.distributed import RanksFailed
from tests.faults import FailAt
from tests.flow.runs import NUM_STEPS, launch, request_for, run_all
from tests.tracked_steps import (
    LOSSES,
    mlflow_run,
    tensorboard_events,
    trackio_rows,
    wandb_rows,
)
from tests.waiting import poll

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
INSTALLED = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]
SECRETS = {
    "WANDB_BASE_URL": "https://someone:hunter2hunter2@wandb.invalid",
    "MY_SERVICE_TOKEN": "verysecretvalue-123456",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIexamplekey",
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwx",
}


@dataclass
class KillOnceTracked(FailAt):
    """Kills the rank once every tracker holds the step before, so that it has what the resumed run repeats."""

    run_dir: Path = Path()
    names: tuple[str, ...] = ()

    def _trackers_hold(self, step: int) -> bool:
        """Return whether they hold the step, as far as one sees from outside: W&B's rows are in a buffer."""
        last_lines = [
            path.read_text().rpartition(" ")[2].strip() for path in self.run_dir.glob("mlruns/*/*/metrics/train/step")
        ]
        holds = {
            "tensorboard": True,
            "wandb": bool(list(self.run_dir.glob("wandb/offline-run-*/*.wandb"))),
            "mlflow": last_lines == [str(step)],
            "trackio": bool([row for row in trackio_rows(self.run_dir) if row[1] == step]),
        }
        return all(holds[name] for name in self.names)

    def before_action(self, step: int, action: object) -> None:
        """See `FaultPoints`."""
        if step == self.step and isinstance(action, Forward):
            poll(lambda: self._trackers_hold(self.step))
        super().before_action(step, action)


@pytest.mark.slow
def test_trackers_hold_each_step_once_after_a_kill(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    run_dir = tmp_path / "run"
    changes = [f"train.loggers=[{','.join(INSTALLED)}]", "train.evaluate_every=2", "train.evaluate_questions=4"]
    unified = ["parallel.placement=unified", "cluster.ranks=1"]
    request = replace(request_for(data, run_dir, *changes, *unified), ranks=1)
    with pytest.raises(RanksFailed, match="died without a word"):
        run_all(request, faults=KillOnceTracked(0, 5, "kill", run_dir=run_dir, names=tuple(INSTALLED)))
    assert [step["step"] for step in read_metrics(run_dir)] == [1, 2, 3, 4, 5]
    assert run_all(replace(request, resume=True)) == [""]
    logged = [(step["step"], pytest.approx(step["loss"])) for step in read_metrics(run_dir)]
    assert [step for step, _ in logged] == list(range(1, NUM_STEPS + 1))
    for name in INSTALLED:
        assert LOSSES[name](run_dir) == logged, name
    written = [path.read_bytes() for path in run_dir.rglob("*") if path.is_file()]
    assert written
    for secret in ("hunter2hunter2", *list(SECRETS.values())[1:]):
        assert not [content for content in written if secret.encode() in content], secret
    _assert_answers(run_dir)


def _assert_answers(run_dir: Path) -> None:
    """Every tracker has the answers after steps 2, 4 and 6 as tables, with pictures."""
    entries = [json.loads(line) for line in (run_dir / "answers.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [2, 4, 6]
    assert all(len(entry["answers"]) == 4 for entry in entries)
    pictures = {name for entry in entries for answer in entry["answers"] for name in answer["pictures"]}
    assert pictures
    assert all((run_dir / name).is_file() for name in pictures)
    events = tensorboard_events(run_dir)
    assert [event.step for event in events.Tensors("answers/text_summary")] == [2, 4, 6]
    texts = {"recipe/text_summary", "plan/text_summary", "summary/text_summary"}
    assert texts | {"answers/1"} <= set(events.Tags()["tensors"])
    assert [event.step for event in events.Tensors("answers/1")] == [2, 4, 6]
    if "wandb" in INSTALLED:
        tables = [row for row in wandb_rows(run_dir) if row.get("answers/_type") == "table-file"]
        assert [row["_step"] for row in tables] == [2, 4, 6]
        assert [row["answers/nrows"] for row in tables] == [4, 4, 4]
        assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 1
        waiting = [path for path in (run_dir / "wandb" / "data").rglob("*") if path.is_file()]  # until it is synced
        assert [path for path in waiting if path.read_bytes().startswith(b"\x89PNG")]
    if "mlflow" in INSTALLED:
        client, run = mlflow_run(run_dir)
        assert run.info.status == "FINISHED"
        assert run.data.params["train.steps"] == str(NUM_STEPS)
        assert [f.path for f in client.list_artifacts(run.info.run_id, "answers")] == [
            f"answers/step-{step:08d}" for step in (2, 4, 6)
        ]
    if "trackio" in INSTALLED:
        rows = [(step, values["answers"]) for _, step, values in trackio_rows(run_dir) if "answers" in values]
        assert [step for step, _ in rows] == [2, 4, 6]
        assert len({run_id for run_id, _, _ in trackio_rows(run_dir)}) == 1


def test_a_recipe_with_a_credential_is_refused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_TOKEN", "opaque-value-1")
    code, message = launch(request_for(data, tmp_path / "run", "name=of-opaque-value-1"))
    assert code == 2
    assert message.startswith("name: holds what looks like a credential: 'of-***'.")
    assert not (tmp_path / "run").exists()


def test_a_tracker_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"wandb needs the `wandb` package.*pip install 'mmtrain\[wandb\]'"):
        require_trackers(["wandb"])
