"""Measure the model on held-out samples: its loss, and the answers that it gives."""

from collections.abc import Callable
from dataclasses import replace

from mmtrain.balance import Grouping
from mmtrain.data import BadSampleTracker, BatchBuilder, build_index, validation_batches
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.training.step_hook import StepContext, StepHook


class Validation(StepHook):
    """Computes the mean loss per target token of the held-out batches every `every` steps, and after the last one."""

    def __init__(self, rank_context: RankContext, every: int) -> None:
        recipe = rank_context.recipe
        self._rank_context, self._every = rank_context, every
        index = build_index(recipe, "validation")
        self._batches = validation_batches(
            index,
            Grouping.of(recipe.data, recipe.train.global_batch),
            rank_context.dp,
            rank_context.num_microbatches,
            recipe.train.validate_batches,
        )
        self._builder = BatchBuilder(index, recipe, rank_context.needs, rank_context.num_microbatches)
        self._bad_samples = BadSampleTracker(index, recipe.data.max_bad_rate)

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. A run that stops saves at once instead."""
        if ctx.is_due(self._every) and not ctx.reduction.stop_requested:
            ctx.metrics = replace(ctx.metrics, val_loss=self._loss())

    def _loss(self) -> float:
        total_targets = sum(meta.total_targets for meta in self._batches)
        loss = 0.0  # this rank's part
        for meta in self._batches:
            data = self._builder.build(meta)
            self._bad_samples.record_new(data.quarantined)
            loss += self._rank_context.validate(data).loss * meta.total_targets / total_targets
        return self._rank_context.world.all_reduce(loss)


class HeldOutEvaluation(StepHook):
    """Lets the model answer held-out questions every `every` steps, and after the last one.

    `evaluate` returns the share of answers that are exactly right; all ranks call it together.
    """

    def __init__(self, evaluate: Callable[[], float], every: int) -> None:
        self._evaluate, self._every = evaluate, every

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. A run that stops saves at once instead."""
        if ctx.is_due(self._every) and not ctx.reduction.stop_requested:
            ctx.metrics = replace(ctx.metrics, val_exact=self._evaluate())
