"""The learning rate of every optimizer step."""

import math

from mmtrain.recipe.settings.train_settings import OptimizerSettings


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
