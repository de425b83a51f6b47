"""Measure the model on held-out samples: its loss, and the answers that it gives."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mmtrain.balance import Grouping
from mmtrain.data import BadSampleTracker, BatchBuilder, build_index, validation_batches
from mmtrain.data.loading.storage_outage import OutageReport, StorageProbe
from mmtrain.data.loading.watched_reads import WatchedReads
from mmtrain.recipe.settings.modalities import GENERATOR
from mmtrain.runtime.evaluation.metrics import Metric, score_answers
from mmtrain.runtime.evaluation.qa_eval import GivenAnswers
from mmtrain.runtime.evaluation.shown_answers import AnswerLog
from mmtrain.runtime.execution.activity import LOADING
from mmtrain.runtime.execution.input_arena import copier_for
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.execution.step_prefetcher import StepPrefetcher
from mmtrain.runtime.execution.unit_inputs import loss_scales
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook


class Validation(StepHook):
    """Computes the loss of the held-out batches every `every` steps, and after the last one.

    It is what the loss of one step with all their samples would be, and so is the generator's part of it.
    """

    def __init__(self, rank_context: RankContext, every: int) -> None:
        recipe = rank_context.recipe
        self._rank_context, self._every = rank_context, every
        index = build_index(recipe, "validation")
        self._batches = validation_batches(
            index,
            Grouping.of(recipe.data, recipe.train.num_groups),
            rank_context.dp,
            rank_context.num_microbatches,
            recipe.train.validate_batches,
            dispatch=rank_context.graph.dispatches_items,
            setting=recipe.data.held_out_setting,
        )
        probe = StorageProbe(index.samples)
        note_outage = partial(rank_context.activity.note_outage, "validation")
        report = OutageReport(partial(print, flush=True), recipe.data.storage_patience_s, note_outage)
        self._reads = WatchedReads(probe.find_outage, report)
        builder = BatchBuilder(
            index,
            recipe,
            rank_context.needs,
            rank_context.num_microbatches,
            monitor=self._reads.monitor,
            probe=probe,
        )
        # Media are decoded in a thread: else the device would wait for each batch, one after another.
        self._steps = StepPrefetcher(
            (builder.build(meta) for meta in itertools.cycle(self._batches)),
            partial(rank_context.host_input, trains=False),
            copier_for(rank_context.world.device),
            ahead=recipe.data.prefetch > 0,
        )
        self._bad_samples = BadSampleTracker(index, recipe.data.max_bad_rate)

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. A run that stops saves at once instead, and catches up when it is resumed."""
        if ctx.is_due(self._every) and not ctx.reduction.stop_requested:
            self._measure(ctx)

    def catch_up(self, ctx: StepContext, logged: Mapping[str, Any]) -> None:
        """See `StepHook`."""
        if ctx.is_due(self._every) and "val_loss" not in logged:
            self._measure(ctx)

    def _measure(self, ctx: StepContext) -> None:
        loss, drawing_loss = self._losses()
        ctx.metrics = replace(ctx.metrics, val_loss=loss, val_drawing_loss=drawing_loss)

    def close(self) -> None:
        """See `StepHook`."""
        self._steps.close()
        self._reads.close()

    def _losses(self) -> tuple[float, float | None]:
        """Return the loss, and the generator's part of it without its weight; None for models without one."""
        recipe, world = self._rank_context.recipe, self._rank_context.world
        scales = [loss_scales(recipe, meta) for meta in self._batches]
        # A scale is the inverse of what a loss is the mean over: target tokens, or elements of images to draw.
        joint_scales = {unit: 1.0 / sum(1.0 / of_batch[unit] for of_batch in scales) for unit in scales[0]}
        losses = dict.fromkeys(joint_scales, 0.0)  # this rank's parts
        for of_batch in scales:
            self._rank_context.activity.start(LOADING)
            step = next(self._steps)
            self._bad_samples.record_new(step.data.quarantined)
            unit_losses = self._rank_context.validate_on(step.input).unit_losses
            for unit, part in unit_losses.items():
                losses[unit] += part * joint_scales[unit] / of_batch[unit]
        loss = world.all_reduce(sum(losses.values()))
        generator = recipe.model.generator
        if generator is None:
            return loss, None
        return loss, world.all_reduce(losses[GENERATOR]) / generator.loss_weight


class HeldOutEvaluation(StepHook):
    """Lets the model answer held-out questions every `every` steps, and after the last one.

    All ranks call `evaluate` together. The first one scores them by `metrics` and logs some.
    """

    def __init__(
        self,
        evaluate: Callable[[], GivenAnswers],
        every: int,
        metrics: Sequence[Metric],
        answer_log: AnswerLog,
        records: RunRecords,
    ) -> None:
        self._evaluate, self._every, self._metrics = evaluate, every, metrics
        self._answer_log, self._records = answer_log, records

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. A run that stops saves at once instead, and catches up when it is resumed."""
        if ctx.is_due(self._every) and not ctx.reduction.stop_requested:
            self._measure(ctx)

    def catch_up(self, ctx: StepContext, logged: Mapping[str, Any]) -> None:
        """See `StepHook`."""
        if ctx.is_due(self._every) and "val_exact" not in logged:
            self._measure(ctx)

    def _measure(self, ctx: StepContext) -> None:
        given = self._evaluate()
        ctx.metrics = replace(ctx.metrics, val_exact=given.exact)
        if self._records.is_first:
            scores = {f"val_{name}": value for name, value in score_answers(self._metrics, given.answers).items()}
            scores.pop("val_exact", None)  # above, where questions with broken media count as wrong
            ctx.metrics = replace(ctx.metrics, extra={**ctx.metrics.extra, **scores})
            self._records.try_write(
                f"step {ctx.step_number}: answers", lambda: self._answer_log.write(ctx.step_number, given.answers)
            )
