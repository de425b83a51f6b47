"""Set the learning rate of each step."""

import math

from mmtrain.recipe.settings.train_settings import LearningRateShape, OptimizerSettings
from mmtrain.runtime.training.step_hook import StepContext, StepHook

INVERSE_SQRT_UNIT = 10_000  # steps, without a warm-up: as `get_inverse_sqrt_schedule` of transformers has it


def learning_rate(settings: OptimizerSettings, step: int, num_steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of `num_steps`: linear warm-up, then the recipe's schedule.

    After the warm-up it is that of `transformers.optimization`. In the warm-up it is one step ahead of it, which trains
    its first step with a learning rate of 0.
    """
    num_warmup = settings.num_warmup_steps(num_steps)
    if step < num_warmup:
        return settings.lr * (step + 1) / num_warmup
    first_cooldown_step = num_steps - settings.num_cooldown_steps(num_steps)
    decay = _decay(settings.schedule, min(step, first_cooldown_step), num_warmup, num_steps)
    if step > first_cooldown_step:
        decay *= _shape(settings.cooldown, (step - first_cooldown_step) / (num_steps - first_cooldown_step))
    return settings.min_lr + (settings.lr - settings.min_lr) * decay


def _decay(schedule: LearningRateShape, step: int, num_warmup: int, num_steps: int) -> float:
    """Return the share of the peak that a schedule without its cool-down has left behind the warm-up."""
    if schedule in ("constant", "wsd"):
        return 1.0
    if schedule == "inverse_sqrt":
        unit = num_warmup or INVERSE_SQRT_UNIT
        return math.sqrt(unit / (step - num_warmup + unit))
    return _shape(schedule, (step - num_warmup) / max(1, num_steps - num_warmup))


def _shape(shape: str, progress: float) -> float:
    """Return what is left at a progress from 0 to 1."""
    progress = min(1.0, progress)
    if shape == "linear":
        return 1 - progress
    return 1 - math.sqrt(progress) if shape == "sqrt" else 0.5 * (1 + math.cos(math.pi * progress))


class LearningRateSchedule(StepHook):
    """Sets the learning rate of the recipe's schedule."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = settings

    def before_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        ctx.lr = learning_rate(self._settings, ctx.step, ctx.num_steps)
