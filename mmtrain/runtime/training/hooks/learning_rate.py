"""Set the learning rate of each step."""

from mmtrain.recipe.settings.train_settings import OptimizerSettings
from mmtrain.runtime.training.lr_schedule import learning_rate
from mmtrain.runtime.training.step_hook import StepContext, StepHook


class LearningRateSchedule(StepHook):
    """Sets the learning rate of the recipe's schedule."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = settings

    def before_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        ctx.lr = learning_rate(self._settings, ctx.step, ctx.num_steps)
