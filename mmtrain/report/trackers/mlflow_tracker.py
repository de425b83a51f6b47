"""MLflow: a file store in the run's folder, or the store that `MLFLOW_TRACKING_URI` names."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmtrain.durable_files import write_whole
from mmtrain.report.trackers.tracker import RunEnd, ShownAnswer, TrackedRun

MLFLOW_FOLDER = "mlruns"
RUN_TAG = "mmtrain.run_id"
_STEP_METRIC = "train/step"  # in every step, so that it says which ones are there; logged last
_NOT_IN_NAMES = re.compile(r"[^\w. :/-]")  # MLflow rejects the `>` of edges
_MAX_METRICS_PER_CALL = 1000  # as MLflow's servers limit them
_MAX_PARAM_CHARACTERS = 6000  # likewise
_MAX_PARAMS_PER_CALL = 100  # likewise


class MlflowTracker:
    """Shows a run in MLflow, under the run that has its id as a tag.

    In a file store, which is ours alone, the points of steps that a resumed run repeats are cut off. Another store
    cannot take points back: a step that it holds is not sent again.
    """

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""
        self._mlflow: Any = None

    def start(self, run: TrackedRun) -> int:
        """See `Tracker`."""
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"file:{(run.run_dir / MLFLOW_FOLDER).absolute()}"
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3.7 asks for consent
        import mlflow

        self._mlflow, self._client = mlflow, mlflow.MlflowClient(tracking_uri=uri)
        experiment = self._experiment_id(os.environ.get("MLFLOW_EXPERIMENT_NAME", run.name))
        found = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.run_id}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            held = self._held_step()
            if uri.startswith("file:"):
                held = min(held, run.first_step - 1)
                cut_metric_files(Path(uri.removeprefix("file:")) / experiment / self._run_id / "metrics", held)
        else:
            self._run_id = self._client.create_run(experiment, run_name=run.name, tags=_tags(run)).info.run_id
            held = 0
        if not held:
            self._log_texts(run)
        return held

    def log_step(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker`."""
        now_ms = int(time.time() * 1000)
        values = {**scalars, _STEP_METRIC: float(step)}
        points = [
            self._mlflow.entities.Metric(_NOT_IN_NAMES.sub("-", name), value, now_ms, step)
            for name, value in values.items()
        ]
        for first in range(0, len(points), _MAX_METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=points[first : first + _MAX_METRICS_PER_CALL])

    def log_answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        """See `Tracker`. A table of a step is a file, so that telling it again replaces it."""
        folder = f"answers/step-{step:08d}"
        rows = []
        for answer in answers:
            for picture in answer.pictures:
                self._client.log_artifact(self._run_id, str(picture), f"{folder}/pictures")
            pictures = [f"pictures/{picture.name}" for picture in answer.pictures]
            rows.append(
                [
                    answer.question,
                    ", ".join(pictures),
                    answer.expected,
                    answer.answered,
                    "yes" if answer.is_right else "no",
                ]
            )
        columns = ["question", "pictures", "expected", "answered", "right"]
        table = {"columns": columns, "data": rows}  # the layout that MLflow shows as a table
        self._client.log_dict(self._run_id, table, f"{folder}/answers.json")

    def flush(self) -> None:
        """See `Tracker`. Every call has written already."""

    def finish(self, end: RunEnd, summary: Mapping[str, str | float]) -> None:
        """See `Tracker`."""
        if summary:
            self._client.log_dict(self._run_id, dict(summary), "summary.json")
        for name, value in summary.items():
            self._client.set_tag(self._run_id, f"summary.{name}", str(value))
        self._client.set_terminated(self._run_id, "FINISHED" if end == "done" else "KILLED")

    def abandon(self) -> None:
        """See `Tracker`."""
        self._client = None

    def _experiment_id(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _held_step(self) -> int:
        history = self._client.get_metric_history(self._run_id, _STEP_METRIC)
        return max((point.step for point in history), default=0)

    def _log_texts(self, run: TrackedRun) -> None:
        entities = self._mlflow.entities
        params = [
            entities.Param(_NOT_IN_NAMES.sub("-", name), str(value)[:_MAX_PARAM_CHARACTERS])
            for name, value in run.config.items()
        ]
        for first in range(0, len(params), _MAX_PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[first : first + _MAX_PARAMS_PER_CALL])
        self._client.log_text(self._run_id, run.recipe, "recipe.yaml")
        self._client.log_text(self._run_id, run.plan, "plan.json")
        self._client.log_text(self._run_id, run.plan_text, "plan.txt")
        self._client.log_text(self._run_id, json.dumps(dict(run.git), indent=2), "git.json")


def cut_metric_files(folder: Path, last_step: int) -> None:
    """Remove the points after `last_step` from the metrics of a run in a file store.

    A file holds one metric, and a line `milliseconds value step` for each point. A kill may leave half of a line.
    """
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        parts = [line.split(" ") for line in lines]
        remaining = [
            line
            for line, fields in zip(lines, parts, strict=True)
            if len(fields) >= 3 and fields[2].isdigit() and int(fields[2]) <= last_step
        ]
        if remaining != lines:
            write_whole(path, "".join(f"{line}\n" for line in remaining))


def _tags(run: TrackedRun) -> dict[str, str]:
    """Return the tags of a new run. Those that MLflow's own start adds would hold the command line."""
    tags = {RUN_TAG: run.run_id, **{f"git.{name}": value for name, value in run.git.items()}}
    if "commit" in run.git:
        tags["mlflow.source.git.commit"] = run.git["commit"]
    return tags
