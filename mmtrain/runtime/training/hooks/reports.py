"""Report what slows steps down, and log each step."""

from dataclasses import replace

from mmtrain.balance import StepTargets
from mmtrain.balance.imbalance import sample_above_mean_load
from mmtrain.balance.step_targets import SampleWork
from mmtrain.data import DataIndex
from mmtrain.report import RunLog, TrainingProgress
from mmtrain.report.source_totals import source_sentences, sum_sources
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook

MAX_LOAD_IMBALANCE_NOTES = 20  # more would bury the progress; `metrics.jsonl` names the sample of every step


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
    """Names the sample that alone exceeds the mean load of a step; notes each such sample once."""

    def __init__(self, index: DataIndex, targets: StepTargets, num_replicas: int, records: RunRecords) -> None:
        self._index, self._targets, self._num_replicas = index, targets, num_replicas
        self._records = records
        self._reported: set[int] = set()  # samples

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        meta = ctx.data.meta
        loads = SampleWork(self._index.lengths, meta.sample_id).loads(self._targets)
        worst = sample_above_mean_load(loads, self._num_replicas)
        if worst is None:
            return
        row, load_over_mean = worst
        number = int(meta.sample_id[row])
        sample = self._index.samples[number].id
        ctx.metrics = replace(ctx.metrics, bound_sample=sample)
        if number in self._reported or len(self._reported) >= MAX_LOAD_IMBALANCE_NOTES:
            return
        self._reported.add(number)
        self._records.note(
            f"step {ctx.step_number}: load imbalance: sample {sample} alone is {load_over_mean:.2f}x the mean load of "
            "a data-parallel rank, so this step cannot be balanced; raise train.global_batch, shorten samples, or let "
            "ranks share them (parallel.llm.cp)"
        )


class MetricsLog(StepHook):
    """Writes the step's metrics to the run's log and shows them."""

    def __init__(self, log: RunLog, progress: TrainingProgress, records: RunRecords) -> None:
        self._log, self._progress, self._records = log, progress, records

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        self._records.try_write(f"step {ctx.metrics.step}: metrics", lambda: self._log.step(ctx.metrics))
        self._progress.step(ctx.metrics)
        if ctx.is_last and ctx.metrics.sources:
            for sentence in source_sentences(sum_sources(self._log.steps())):
                self._records.note(sentence)
