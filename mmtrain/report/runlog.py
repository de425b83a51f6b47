"""The record of a run on disk: `metrics.jsonl` and TensorBoard events, each step once however often it resumes."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mmtrain.report.metrics import StepMetrics

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class RunLog:
    """Writes a run's metrics; of all ranks only the one with `enabled` writes.

    `first_step` is the step that will be logged first. What a broken run had logged from there on is dropped,
    because those steps were lost with it and are taken again.
    """

    def __init__(self, run_dir: Path, first_step: int, enabled: bool) -> None:
        self._enabled = enabled
        if not enabled:
            return
        from torch.utils.tensorboard import SummaryWriter  # seconds to import, and with torch

        run_dir.mkdir(parents=True, exist_ok=True)
        _keep_before(run_dir / METRICS, first_step)
        self._lines = (run_dir / METRICS).open("a", encoding="utf-8")
        purge = first_step if first_step > 1 else None
        self._events = SummaryWriter(str(run_dir / TENSORBOARD), purge_step=purge)

    def step(self, metrics: StepMetrics) -> None:
        """Log one step. The line is handed to the system at once: a killed process loses none."""
        if not self._enabled:
            return
        values = metrics.to_json()
        self._lines.write(json.dumps(values, allow_nan=False) + "\n")
        self._lines.flush()
        split = values.pop("time_s")
        scalars = {f"train/{name}": value for name, value in values.items() if name != "step"}
        scalars |= {f"time_s/{name}": value for name, value in split.items()}
        for name, value in scalars.items():
            if value is not None:
                self._events.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        """Write what TensorBoard still holds back."""
        if self._enabled:
            self._lines.close()
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The logged steps in order, as `StepMetrics.to_json` gave them; none when nothing was logged."""
    path = run_dir / METRICS
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
