"""The log of a run on disk: `metrics.jsonl` and the answers, with each step once even if the run resumes.

The last line of the log says how fast the run was, what it kept of text-only efficiency, and what it cost.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from mmtrain.durable_files import append_line, cut_log, read_log, write_whole
from mmtrain.planning.artifact.plan import Plan
from mmtrain.recipe.settings.parallel_settings import ClusterSettings
from mmtrain.report.logged_totals import measured_phases
from mmtrain.report.metrics_record import StepMetrics, compact_number
from mmtrain.report.plain_text import seconds_text
from mmtrain.report.report_contents import steady_medians
from mmtrain.report.run_cost import RunCost
from mmtrain.report.scalars import NOT_CURVES

METRICS_FILE = "metrics.jsonl"
ANSWERS_FILE = "answers.jsonl"  # the answers to held-out questions, by step


class RunLog:
    """Writes a run's metrics, on the one rank with `enabled`.

    `first_step` is the step that will be logged first. Steps from there on that an earlier attempt logged are dropped,
    because they were lost with that attempt and are repeated. `notify` hears of a log that was damaged.
    """

    def __init__(
        self, run_dir: Path, first_step: int, enabled: bool, notify: Callable[[str], None] = lambda _: None
    ) -> None:
        self._enabled, self._run_dir = enabled, run_dir
        if not enabled:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        last_step_s = time_of_last_step(run_dir)
        cut_log(run_dir / METRICS_FILE, lambda step: step["step"] < first_step, notify, is_step)
        cut_log(run_dir / ANSWERS_FILE, lambda entry: entry["step"] < first_step, notify, has_answers)
        self._lines = (run_dir / METRICS_FILE).open("a", encoding="utf-8")
        if last_step_s is not None:
            os.utime(run_dir / METRICS_FILE, (last_step_s, last_step_s))

    def step(self, metrics: StepMetrics) -> None:
        """Log one step. The line is flushed at once, so that a killed process loses none.

        Raises OSError when the disk is full. The line stays buffered and is written with the next one for which there
        is room.
        """
        if not self._enabled:
            return
        self._lines.write(json.dumps(metrics.to_json(), allow_nan=False) + "\n")
        self._lines.flush()

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add values to the entry of a logged step, in one step of the file system. Raises OSError."""
        if not self._enabled:
            return
        path = self._run_dir / METRICS_FILE
        entries = [{**entry, **values} if entry["step"] == step else entry for entry in read_metrics(self._run_dir)]
        last_step_s = time_of_last_step(self._run_dir)
        write_whole(path, "".join(json.dumps(entry) + "\n" for entry in entries))
        self._lines.close()
        self._lines = path.open("a", encoding="utf-8")
        if last_step_s is not None:
            os.utime(path, (last_step_s, last_step_s))

    def answers(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Log answers to held-out questions before the step after which they were given. Raises OSError."""
        if self._enabled:
            append_line(self._run_dir / ANSWERS_FILE, json.dumps({"step": step, "answers": list(answers)}))

    def steps(self) -> list[dict[str, Any]]:
        """Return all steps that the run has logged so far; empty on other ranks than the one that logs."""
        return read_metrics(self._run_dir) if self._enabled else []

    def close(self) -> None:
        """Close the file."""
        if self._enabled:
            self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the logged steps in order, as `StepMetrics.to_json` wrote them; empty when nothing was logged.

    Lines that are no steps are skipped.
    """
    return read_log(run_dir / METRICS_FILE, is_step).entries


def time_of_last_step(run_dir: Path) -> float | None:
    """Return when a run last finished a step, in seconds since 1970 by the clock of the file system; None if never.

    It is the time of the log, which starts of the run that got to no step leave as it is.
    """
    try:
        return (run_dir / METRICS_FILE).stat().st_mtime
    except OSError:
        return None


def is_step(entry: dict[str, Any]) -> bool:
    """Return whether an entry of the log can be drawn: it counts its step, and its curves are numbers."""
    texts = [name for name, value in entry.items() if isinstance(value, str) and name not in NOT_CURVES]
    return type(entry.get("step")) is int and not texts


def has_answers(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of `answers.jsonl` is one: it counts its step and lists answers."""
    return type(entry.get("step")) is int and isinstance(entry.get("answers"), list)


def run_summary(plan: Plan, cluster: ClusterSettings, metrics: Sequence[Mapping[str, Any]]) -> str:
    """Summarize the logged steps of a run; empty if there are none.

    Throughput is that of the median step. The cost is that of all steps in the log, without starts and restarts.
    """
    medians = steady_medians(metrics)
    if "tokens_per_s" not in medians:
        return ""
    predicted, tokens_per_s = plan.predicted, medians["tokens_per_s"]
    median = f"median step {seconds_text(medians['step_time_s'])} (planned {seconds_text(predicted.step_time_s)})"
    parts = [median, f"{compact_number(tokens_per_s)} LLM tokens/s"]
    sentences = [", ".join(parts), RunCost.of_logged(cluster, metrics, plan.world_size).to_text()]
    phases = measured_phases(metrics)
    if phases is not None:
        sentences.append(phases.to_text())
    return "; ".join(sentences)
