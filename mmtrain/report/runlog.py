"""The record of a run on disk: `metrics.jsonl` and TensorBoard events, each step once however often it resumes."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from mmtrain.report.metrics_record import StepMetrics

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class RunLog:
    """Writes a run's metrics; of all ranks only the one with `enabled` writes.

    `first_step` is the step that will be logged first. What a broken run had logged from there on is dropped,
    because those steps were lost with it and are taken again.
    """

    def __init__(self, run_dir: Path, first_step: int, enabled: bool) -> None:
        self._enabled = enabled
        if not enabled:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        _keep_before(run_dir / METRICS_FILE, first_step)
        self._lines = (run_dir / METRICS_FILE).open("a", encoding="utf-8")
        self._events = _Events(run_dir / TENSORBOARD_FOLDER, first_step)

    def step(self, metrics: StepMetrics) -> None:
        """Log one step. The line is handed to the system at once: a killed process loses none.

        Raises OSError when the disk is full. The line is then kept, and written with the next one for which there is
        room; TensorBoard lacks the steps in between.
        """
        if not self._enabled:
            return
        values = metrics.to_json()
        try:
            self._lines.write(json.dumps(values, allow_nan=False) + "\n")
            self._lines.flush()
        finally:
            split, edges = values.pop("time_s"), values.pop("edges")
            words = ("step", "slow_ranks", "bound_sample")  # and no curves
            scalars = {f"train/{name}": value for name, value in values.items() if name not in words}
            scalars |= {f"time_s/{name}": value for name, value in split.items()}
            scalars |= {f"edge_{name}/{edge}": value for edge, found in edges.items() for name, value in found.items()}
            self._events.add(metrics.step, scalars)

    def close(self) -> None:
        """Write what TensorBoard still holds back."""
        if self._enabled:
            self._events.close()
            self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Events:
    """TensorBoard events of a run.

    What a full disk breaks stays broken: the writer's thread has ended, and whatever it is given raises the same error
    for ever. So it is dropped then, and a new one, with a file of its own, takes its place in the next step.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder = folder
        self._writer = self._open(purge_step=first_step if first_step > 1 else None)

    def add(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Log figures of a step, those that there are."""
        try:
            self._writer = self._writer or self._open()
            for name, value in scalars.items():
                if value is not None:
                    self._writer.add_scalar(name, value, step)
        except OSError:
            self._writer = None
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is lost here stands in the metrics
            if self._writer is not None:
                self._writer.close()

    def _open(self, purge_step: int | None = None) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import, and with torch

        return SummaryWriter(str(self._folder), purge_step=purge_step)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The logged steps in order, as `StepMetrics.to_json` gave them; none when nothing was logged."""
    path = run_dir / METRICS_FILE
    return (
        [step for line in path.read_text(encoding="utf-8").splitlines() if (step := _parse(line))]
        if path.exists()
        else []
    )


def _keep_before(path: Path, first_step: int) -> None:
    """Drop steps from `first_step` on, and a line that a kill cut short; by rename, lest a second kill lose all."""
    if not path.exists():
        return
    kept = [step for step in read_metrics(path.parent) if step["step"] < first_step]
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text("".join(json.dumps(step) + "\n" for step in kept), encoding="utf-8")
    draft.replace(path)


def _parse(line: str) -> dict[str, Any] | None:
    """A logged step, or None for a line that is not whole."""
    try:
        step: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return step
