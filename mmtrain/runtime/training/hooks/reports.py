"""Report what slows steps down, and log each step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmtrain.balance import StepTargets
from mmtrain.balance.grouping.imbalance import sample_above_mean_load
from mmtrain.balance.step_targets import SampleWork
from mmtrain.data import DataIndex
from mmtrain.recipe.settings.train_settings import HELD_OUT_PREFIX
from mmtrain.report import RunLog
from mmtrain.report.logged_totals import source_sentences, sum_sources
from mmtrain.report.trackers import TrackerFeeds
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook

MIN_NOTED_IMBALANCE = 1.3  # times the mean load; less is a matter of course where a step has few samples


class StragglerReports(StepHook):
    """Names ranks that have become slow; keeps those that are slow for the report of a failure."""

    def __init__(self, activity: Activity, records: RunRecords) -> None:
        self._activity, self._records = activity, records

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        self._activity.stragglers = "; ".join(s.to_text() for s in ctx.reduction.stragglers) or None
        for straggler in ctx.reduction.new_stragglers:
            self._records.note(straggler.to_text())


class LoadImbalanceReports(StepHook):
    """Names in the metrics the sample that alone exceeds the mean load of a step; notes the first far above it."""

    def __init__(self, index: DataIndex, targets: StepTargets, num_replicas: int, records: RunRecords) -> None:
        self._index, self._targets, self._num_replicas = index, targets, num_replicas
        self._records = records
        self._was_noted = False  # once, because notes of every step would bury the progress

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        meta = ctx.data.meta
        loads = SampleWork(self._index.lengths, meta.sample_id).loads(self._targets)
        worst = sample_above_mean_load(loads, self._num_replicas)
        if worst is None:
            return
        row, load_over_mean = worst
        sample = self._index.samples[int(meta.sample_id[row])].id
        ctx.metrics = replace(ctx.metrics, bound_sample=sample)
        if self._was_noted or load_over_mean <= MIN_NOTED_IMBALANCE:
            return
        self._was_noted = True
        self._records.note(
            f"step {ctx.step_number}: load imbalance: sample {sample} alone is {load_over_mean:.1f}x the mean load of "
            "a data-parallel rank; raise train.global_batch, shorten samples, or let ranks share them "
            "(parallel.llm.cp). `bound_sample` in metrics.jsonl names the sample of every such step"
        )


class MetricsLog(StepHook):
    """Writes the step's metrics to the run's log and shows them; trackers read the log."""

    def __init__(self, log: RunLog, trackers: TrackerFeeds, records: RunRecords) -> None:
        self._log, self._trackers, self._records = log, trackers, records

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        self._records.try_write(f"step {ctx.metrics.step}: metrics", lambda: self._log.step(ctx.metrics))
        self._trackers.more(is_last=ctx.is_last)
        self._records.progress.step(ctx.metrics)
        if ctx.is_last and ctx.metrics.sources:
            for sentence in source_sentences(sum_sources(self._log.steps())):
                self._records.note(sentence)

    def catch_up(self, ctx: StepContext, logged: Mapping[str, Any]) -> None:
        """See `StepHook`. Trackers that have the step already do not see what is added to it."""
        measured = {name: value for name, value in ctx.metrics.to_json().items() if name.startswith(HELD_OUT_PREFIX)}
        extra = {**logged.get("extra", {}), **ctx.metrics.extra}
        added = {**measured, **({"extra": extra} if extra else {})}
        if added:
            self._records.try_write(f"step {ctx.step_number}: metrics", lambda: self._log.add(ctx.step_number, added))
            self._records.note(f"step {ctx.step_number}: measured what the stopped run had left out")
