"""The training loop of one rank: load, train, measure; everything else is a `StepHook`."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mmtrain.runtime.execution.activity import LOADING, MEASURING
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.execution.step_prefetcher import StepPrefetcher
from mmtrain.runtime.resilience.out_of_memory import OutOfMemoryReport, is_out_of_memory
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook
from mmtrain.runtime.training.step_metrics import RankFlags, StepMetricsReducer


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The steps of a run on one rank."""

    rank_context: RankContext
    steps: StepPrefetcher
    reducer: StepMetricsReducer
    flags: Callable[[], RankFlags]  # of this rank, at the end of a step
    memory_report: OutOfMemoryReport
    records: RunRecords
    hooks: tuple[StepHook, ...]  # called in this order, before and after each step
    early_end: Callable[[], str | None]  # why no further step is worth it, equal on all ranks; None: the next one is

    def run(self, first_step: int) -> Path | None:
        """Train from `first_step` (from 0) to the last, or until a signal; return the checkpoint of a stopped run.

        Only some ranks may have received the signal. It travels with the metrics that the ranks exchange in every
        step, so that all of them leave after the same one.
        """
        num_steps = self.rank_context.recipe.train.num_steps
        for step in range(first_step, num_steps):
            reason = self.early_end()
            if reason is not None:
                self.records.note(f"the run ends early, after step {step} of {num_steps}: {reason}")
                self.records.write_state("done", step, reason)
                return None
            ctx = StepContext(step, num_steps)
            self._run_step(ctx)
            if ctx.reduction.stop_requested and not ctx.is_last:
                return ctx.checkpoint
        self.records.write_state("done", num_steps)
        return None

    def _run_step(self, ctx: StepContext) -> None:
        activity = self.rank_context.activity
        activity.step = ctx.step_number
        for hook in self.hooks:
            hook.before_step(ctx)
        start_s = time.perf_counter()
        earlier_wait_s = self.steps.wait_s
        activity.start(LOADING)
        prepared = next(self.steps)
        ctx.data = prepared.data
        try:
            ctx.outcome = self.rank_context.train_executor.run(replace(prepared.input, lr=ctx.lr))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self.memory_report.to_error(ctx.data.meta) from error
        activity.start(MEASURING)
        data_wait_s = self.steps.wait_s - earlier_wait_s
        ctx.reduction = self.reducer.reduce(ctx.outcome, data_wait_s, len(ctx.data.quarantined), self.flags())
        step_time_s = time.perf_counter() - start_s
        ctx.metrics = self.reducer.metrics(ctx.data.meta, ctx.outcome, ctx.reduction, ctx.lr, step_time_s)
        for hook in self.hooks:
            hook.after_step(ctx)
