"""Remember which checkpoint is the best by a held-out metric, and end a run that gains no more."""

import math
from collections.abc import Mapping
from typing import Any, Self

from mmtrain.checkpoint import BEST_STEP
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.train_settings import BestSettings, TrainSettings
from mmtrain.report import StepMetrics
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook
from mmtrain.runtime.world import World

BEST_STATE = "best"  # key of the state of checkpoints


class BestTracker:
    """Compares the measurements of a metric: which was the best, and how many since then have gained too little.

    The rules are those of transformers: any better value is the best, and one that is better by more than `min_gain`
    starts `patience` anew (its `EarlyStoppingCallback`). A value that is not finite is never better.
    """

    def __init__(self, settings: BestSettings, state: Mapping[str, Any] | None = None) -> None:
        """Continue from what `state` returned, unless that is of another metric."""
        self._settings = settings
        self._rises = settings.rises
        saved = state or {}
        if self._identity.items() <= saved.items():
            self.best_step: int | None = saved["step"]
            self.best_value: float | None = saved["value"]
            self._num_without_gain: int = saved["num_without_gain"]  # in a row
        else:
            self.best_step, self.best_value = None, None
            self._num_without_gain = 0

    @classmethod
    def of(cls, recipe: Recipe, state: Mapping[str, Any] | None = None) -> Self | None:
        """Return the tracker of a run; None without `train.best`."""
        return None if recipe.train.best is None else cls(recipe.train.best, state)

    @property
    def _identity(self) -> dict[str, object]:
        return {"metric": self._settings.metric, "higher_is_better": self._rises}

    def state(self) -> dict[str, object]:
        """Return what checkpoints hold: the best step, and all that decides later on."""
        measured = {"step": self.best_step, "value": self.best_value, "num_without_gain": self._num_without_gain}
        return {BEST_STEP: self.best_step, BEST_STATE: {**self._identity, **measured}}

    def observe(self, step: int, value: float) -> bool:
        """Take in the value measured after a step (from 1); return whether it is the best so far."""
        gain = self._gain(value)
        self._num_without_gain = 0 if gain > self._settings.min_gain else self._num_without_gain + 1
        if gain <= 0:
            return False
        self.best_step, self.best_value = step, value
        return True

    def early_end(self) -> str | None:
        """Say why no further step is worth it; None while the run goes on."""
        patience = self._settings.patience
        if patience is None or self._num_without_gain < patience:
            return None
        margin = f" by more than {self._settings.min_gain:g}" if self._settings.min_gain else ""
        return (
            f"{self._settings.metric} was not better{margin} in {self._num_without_gain} measurements in a row; "
            f"{self.describe()}. A larger train.best.patience and --resume go on"
        )

    def describe(self) -> str:
        """Say which step was the best so far."""
        if self.best_value is None:
            return f"{self._settings.metric} has had no finite value"
        return f"the best {self._settings.metric} so far is {self.best_value:.6g}, of step {self.best_step}"

    def _gain(self, value: float) -> float:
        """Return by how much a value is better than the best so far; infinity for the first."""
        if not math.isfinite(value):
            return -math.inf
        if self.best_value is None:
            return math.inf
        return value - self.best_value if self._rises else self.best_value - value


class BestCheckpoint(StepHook):
    """Has the checkpoint of the best step saved, and ends the run when `train.best.patience` is used up.

    The first rank's value decides on all ranks: some metrics are known to it alone, and a sum over ranks may differ in
    its last bit.
    """

    def __init__(self, tracker: BestTracker, train: TrainSettings, world: World, records: RunRecords) -> None:
        assert train.best is not None, "a run with a tracker has a metric"
        self._tracker, self._world, self._records = tracker, world, records
        self._metric = train.best.metric
        self._every = train.validate_every if train.best.of_loss else train.evaluate_every

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. A run that stops has not measured."""
        if ctx.is_due(self._every) and not ctx.reduction.stop_requested:
            self._observe(ctx)

    def catch_up(self, ctx: StepContext, logged: Mapping[str, Any]) -> None:
        """See `StepHook`."""
        if ctx.is_due(self._every) and self._metric not in {**logged, **logged.get("extra", {})}:
            self._observe(ctx)

    def _observe(self, ctx: StepContext) -> None:
        value: float = self._world.on_first(lambda: measured_value(ctx.metrics, self._metric))
        ctx.is_best = self._tracker.observe(ctx.step_number, value)
        ctx.ends_early = self._tracker.early_end() is not None
        if ctx.step_number == ctx.num_steps:
            self._records.note(f"{self._tracker.describe()}; `--checkpoint best` takes its checkpoint")


def measured_value(metrics: StepMetrics, name: str) -> float:
    """Return a held-out measurement of a step, by its name in `metrics.jsonl`; not a number where it has none."""
    value = getattr(metrics, name, None)
    if value is None:
        value = metrics.extra.get(name)
    return math.nan if value is None else float(value)
