"""The interface between the training loop and everything that happens around a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmtrain.data import StepData
from mmtrain.report import StepMetrics
from mmtrain.runtime.execution.executor import StepOutcome
from mmtrain.runtime.training.step_metrics import StepMetricsReduction


@dataclass
class StepContext:
    """One training step on this rank. The loop and its hooks fill it in while the step runs."""

    step: int  # from 0
    num_steps: int  # of the whole run
    lr: float = 0.0  # set before the step, by a hook
    data: StepData = field(init=False)  # this rank's share of the global batch
    outcome: StepOutcome = field(init=False)  # what this rank computed
    reduction: StepMetricsReduction = field(init=False)  # what all ranks computed
    metrics: StepMetrics = field(init=False)  # as logged; hooks add what they measure
    is_best: bool = False  # a measurement after this step is the best so far; its checkpoint is saved
    ends_early: bool = False  # no step follows, although more were planned
    checkpoint: Path | None = None  # saved in this step, and complete

    @property
    def step_number(self) -> int:
        """The step as users count, from 1."""
        return self.step + 1

    @property
    def is_last(self) -> bool:
        """Whether the run ends with this step, as planned or early."""
        return self.ends_early or self.step_number == self.num_steps

    def is_due(self, every: int) -> bool:
        """Return whether work that happens every `every` steps, and after the last one, happens in this step.

        With `every` 0 that is the last step alone.
        """
        return self.is_last or (every > 0 and self.step_number % every == 0)


class StepHook:
    """Work around a training step. A subclass overrides what it needs.

    Hooks may call collectives: all ranks run the same hooks in the same order, and a hook decides whether to call one
    only by what is equal on all ranks (the step, settings, `ctx.reduction`). An exception ends the run.
    """

    def before_step(self, ctx: StepContext) -> None:
        """Run before the step's data is loaded; only `step`, `num_steps` and `lr` of `ctx` are set."""

    def after_step(self, ctx: StepContext) -> None:
        """Run after the weights were updated and the ranks exchanged their metrics."""

    def catch_up(self, ctx: StepContext, logged: Mapping[str, Any]) -> None:
        """Do what is missing of the step that the run resumes from: a signal stopped it there, and it saved at once.

        `logged` is the step's entry in `metrics.jsonl`, equal on all ranks. Only `step`, `num_steps` and `metrics` of
        `ctx` are set; hooks add to `metrics` what they measure.
        """

    def close(self) -> None:
        """End what the hook runs beside the training. Called once, also after an error."""
