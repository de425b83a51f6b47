"""The training loop: steps, what is logged of them, when to save, and when to give up."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from mmtrain.balance import StepTargets
from mmtrain.balance.imbalance import sample_above_mean_load
from mmtrain.balance.step_targets import SampleWork
from mmtrain.data import BadSampleTracker, DataIndex, Loader, Quarantined, StepData, write_quarantine
from mmtrain.errors import CheckpointError, RunError
from mmtrain.report import RunLog, StepMetrics, TrainingProgress
from mmtrain.runtime.execution.activity import LOADING, MEASURING, SAVING, TRACING
from mmtrain.runtime.execution.executor import StepOutcome
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.resilience.out_of_memory import explain_out_of_memory, is_out_of_memory, peak_memory_bytes
from mmtrain.runtime.resilience.signals import StopSignalListener
from mmtrain.runtime.run_folder import QUARANTINE_FILE, SKIPPED_STEPS_FILE
from mmtrain.runtime.run_state import RUN_STATE_FILE, write_run_state
from mmtrain.runtime.training.checkpointing import BackgroundSaver
from mmtrain.runtime.training.lr_schedule import learning_rate
from mmtrain.runtime.training.step_metrics import StepMetricsReducer, StepMetricsReduction
from mmtrain.runtime.training.tracing import RunTracer

MAX_IMBALANCE_NOTES = 20  # samples; `metrics.jsonl` names that of every step


@dataclass(kw_only=True)
class Loop:
    """One rank's way through the steps of a run."""

    job: RankContext
    index: DataIndex
    loader: Loader
    meter: StepMetricsReducer
    tracer: RunTracer
    validate: Callable[[], float]
    evaluate: Callable[[], float]
    log: RunLog
    progress: TrainingProgress
    stop: StopSignalListener
    run_dir: Path
    saver: BackgroundSaver
    predicted_gib: float | None  # this rank's peak memory by the plan
    bad: BadSampleTracker  # found by any rank; kept on the first
    step_targets: StepTargets  # what steps are arranged for
    bound: set[int] = field(default_factory=set)  # samples told of that no arrangement can even out
    bad_steps: int = 0  # in a row
    failed_saves: int = 0  # in a row

    def run(self, first: int) -> Path | None:
        """Train from step `first` to the last; return the checkpoint of a run that a signal ended before.

        All ranks leave after the same step, because the signal, that some ranks may not have had, travels with the
        figures that they exchange in every step.
        """
        train = self.job.recipe.train
        for step in range(first, train.steps):
            self.job.activity.step = step + 1
            metrics, stopped = self._step(step)
            self._record(metrics)
            last = step + 1 == train.steps
            if stopped or is_due(step, train.checkpoint.every, train.steps):
                folder = self._save(step + 1, must=stopped or last)
                if stopped and not last:
                    self._state("stopped", step + 1)
                    return folder
        self._state("done", train.steps)
        return None

    def _step(self, step: int) -> tuple[StepMetrics, bool]:
        """Load, train, measure; validate and evaluate where that is due. Also return whether a signal asked to stop."""
        train, activity = self.job.recipe.train, self.job.activity
        begin, waited = time.perf_counter(), self.loader.wait_s
        activity.start(LOADING)
        data = next(self.loader)
        lr = learning_rate(train.optimizer, step, train.steps)
        outcome = self._train(data, lr)
        activity.start(MEASURING)
        broken, waited = len(data.quarantined), self.loader.wait_s - waited
        seen = self.meter.reduce(outcome, waited, broken, self.stop.stop_requested, self.saver.done)
        took = time.perf_counter() - begin
        self._tell_slow(seen)
        if self.tracer.wants(step + 1):
            self._trace(step + 1, outcome)
        self._judge(data, outcome)
        if self.saver.pending and seen.saved:
            self._settle(must=False)
        if seen.broken_samples and (new := self._record_broken(data)):
            self.progress.note(f"step {step + 1}: {new} samples could not be decoded, see {QUARANTINE_FILE}")
        validates = train.validate_every and is_due(step, train.validate_every, train.steps) and not seen.stopped
        val_loss = self.validate() if validates else None
        evaluates = train.evaluate_every and is_due(step, train.evaluate_every, train.steps) and not seen.stopped
        metrics = self.meter.metrics(data.meta, outcome, seen, lr, took, val_loss)
        val_exact, bound = self.evaluate() if evaluates else None, self._bound_reached(data)
        return replace(metrics, val_exact=val_exact, bound_sample=bound), seen.stopped

    def _train(self, data: StepData, lr: float) -> StepOutcome:
        """Run the step; explain it when memory was not enough."""
        try:
            return self.job.train(data, lr)
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e):
                raise
            measured = peak_memory_bytes(self.job.world.device)
            story = explain_out_of_memory(
                self.job.activity.doing, data.meta, self._names(data), measured, self.predicted_gib
            )
            raise RunError(f"rank {self.job.world.rank}, step {data.meta.step + 1}: {story}") from e

    def _names(self, data: StepData) -> list[str]:
        return [self.index.samples[i].id for i in data.meta.sample_id]

    def _trace(self, step: int, outcome: StepOutcome) -> None:
        self.job.activity.start(TRACING)
        try:
            self.tracer.take(step, outcome)
        except OSError as e:  # a full disk, on the first rank
            self.progress.note(f"step {step}: the trace could not be written: {e}")

    def _tell_slow(self, seen: StepMetricsReduction) -> None:
        """Say who has become slow; keep who is for a report, should the run fail."""
        self.job.activity.slow = "; ".join(slow.to_text() for slow in seen.slow) or None
        for slow in seen.newly_slow:
            self.progress.note(slow.to_text())

    def _judge(self, data: StepData, outcome: StepOutcome) -> None:
        """Name the samples of a step whose gradient was not finite; give up after too many in a row."""
        if outcome.stepped:
            self.bad_steps = 0
            return
        self.bad_steps += 1
        step, limit = data.meta.step + 1, self.job.recipe.train.max_bad_steps
        samples = self._names(data)
        self.progress.note(
            f"step {step}: the gradient norm is {outcome.grad_norm}; no weight was changed, "
            f"samples in {SKIPPED_STEPS_FILE}"
        )
        if self.job.world.is_first:
            entry = {"step": step, "grad_norm": str(outcome.grad_norm), "samples": samples}
            self._write(
                SKIPPED_STEPS_FILE, lambda: _append(self.run_dir / SKIPPED_STEPS_FILE, json.dumps(entry) + "\n")
            )
        if self.bad_steps >= limit:
            raise RunError(
                f"step {step}: the gradient norm was not finite in {limit} steps in a row (train.max_bad_steps); "
                f"the weights are those before them. {SKIPPED_STEPS_FILE} in {self.run_dir} names their samples; "
                "look at those, at the learning rate and at train.precision"
            )

    def _bound_reached(self, data: StepData) -> str | None:
        """Name the sample that alone exceeds the mean load of this step, and tell of each such sample once."""
        meta = data.meta
        found = sample_above_mean_load(
            SampleWork(self.index.lengths, meta.sample_id).loads(self.step_targets), self.job.dp["llm"]
        )
        if found is None:
            return None
        number = int(meta.sample_id[found[0]])
        sample = self.index.samples[number].id
        if number not in self.bound and len(self.bound) < MAX_IMBALANCE_NOTES:
            self.bound.add(number)
            self.progress.note(
                f"step {meta.step + 1}: bound reached: sample {sample} alone is {found[1]:.2f} times a replica's mean "
                "share; no arrangement evens this step, a larger train.global_batch or shorter samples would"
            )
        return sample

    def _record(self, metrics: StepMetrics) -> None:
        self._write(f"step {metrics.step}: metrics", lambda: self.log.step(metrics))
        self.progress.step(metrics)

    def _write(self, what: str, write: Callable[[], None]) -> None:
        """Write some record of the run; a full disk costs the record, and is told, but not the run."""
        try:
            write()
        except OSError as e:
            self.progress.note(f"{what} could not be written: {e}")

    def _save(self, next_step: int, must: bool) -> Path | None:
        """Save in the background, or, where nothing may come before it is done, here and now."""
        self.job.activity.start(SAVING)
        if self.saver.pending:
            self._settle(must=False)
        waits = must or not self.job.recipe.train.checkpoint.background
        self.saver.start(next_step, copy=not waits)
        return self._settle(must) if waits else None

    def _settle(self, must: bool) -> Path | None:
        """Close the save under way; go on without, where it failed, unless nothing comes after or too many failed."""
        limit = self.job.recipe.train.checkpoint.max_failures
        try:
            folder = self.saver.finish()
        except CheckpointError as e:  # the same on every rank, and nothing is left of it
            self.failed_saves += 1
            self.progress.note(f"not saved ({self.failed_saves} of {limit} in a row): {e}")
            if must:
                raise
            if self.failed_saves >= limit:
                raise RunError(
                    f"{limit} checkpoints in a row could not be saved (train.checkpoint.max_failures); the last: {e}"
                ) from e
            return None
        self.failed_saves = 0
        self.progress.note(f"saved {folder}")
        self._state("running", self.saver.step)
        return folder

    def _state(self, status: Literal["running", "done", "stopped"], step: int) -> None:
        if self.job.world.is_first:
            self._write(RUN_STATE_FILE, lambda: write_run_state(self.run_dir, status, step))

    def _record_broken(self, data: StepData) -> int:
        """Put what ranks could not decode into the quarantine, and return how many samples that are.

        Each only once: several ranks may hold images of a sample, and other ranks in another epoch.
        """
        found = self.job.world.all_gather(data.quarantined)
        return self.job.world.on_first(lambda: self._quarantine(cast(list[tuple[Quarantined, ...]], found)))

    def _quarantine(self, found: Sequence[tuple[Quarantined, ...]]) -> int:
        new = self.bad.record_new([entry for entries in found for entry in entries])
        self._write(QUARANTINE_FILE, lambda: write_quarantine(self.run_dir / QUARANTINE_FILE, new, append=True))
        return len(new)


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def is_due(step: int, every: int, num_steps: int) -> bool:
    """Whether something that happens after every `every`th step, and after the last, happens after `step`."""
    return step + 1 == num_steps or (every > 0 and (step + 1) % every == 0)
