"""Set the learning rate of each step."""

import math

from mmtrain.recipe.settings.train_settings import OptimizerSettings
from mmtrain.runtime.training.step_hook import StepContext, StepHook


def learning_rate(settings: OptimizerSettings, step: int, num_steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of `num_steps`: linear warm-up, then the recipe's decay."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    progress = (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps)
    progress = min(1.0, progress)
    decay = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.min_lr + (settings.lr - settings.min_lr) * decay


class LearningRateSchedule(StepHook):
    """Sets the learning rate of the recipe's schedule."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = settings

    def before_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        ctx.lr = learning_rate(self._settings, ctx.step, ctx.num_steps)
