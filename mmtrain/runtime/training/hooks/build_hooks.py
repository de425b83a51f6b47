"""The hooks of a run, in the order in which they run."""

from dataclasses import dataclass

from mmtrain.balance import StepTargets
from mmtrain.data import BadSampleTracker, DataIndex, read_quarantine
from mmtrain.planning.artifact.plan import Plan
from mmtrain.program import LLM
from mmtrain.report import RunLog, TrainingProgress
from mmtrain.runtime.evaluation.qa_eval import build_held_out_evaluation
from mmtrain.runtime.execution.checkpointing import BackgroundSaver
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.run_folder import QUARANTINE_FILE, TRACE_FILE
from mmtrain.runtime.run_owner import FolderClaim
from mmtrain.runtime.training.hooks.checkpoints import Checkpointing, CheckpointWriter, FinishBackgroundSave
from mmtrain.runtime.training.hooks.course import CourseWatch
from mmtrain.runtime.training.hooks.folder_guard import FolderGuard
from mmtrain.runtime.training.hooks.held_out import HeldOutEvaluation, Validation
from mmtrain.runtime.training.hooks.learning_rate import LearningRateSchedule
from mmtrain.runtime.training.hooks.nonfinite_guard import NonFiniteGuard
from mmtrain.runtime.training.hooks.quarantine import QuarantineRecorder
from mmtrain.runtime.training.hooks.replanning import Replanning
from mmtrain.runtime.training.hooks.reports import LoadImbalanceReports, MetricsLog, StragglerReports
from mmtrain.runtime.training.hooks.tracing import Tracing
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.run_tracer import RunTracer
from mmtrain.runtime.training.step_hook import StepHook
from mmtrain.runtime.training.step_metrics import StepMetricsReducer


@dataclass(frozen=True)
class RunParts:
    """What hooks are built from."""

    rank_context: RankContext
    plan: Plan
    index: DataIndex
    targets: StepTargets  # what the samples of a step are arranged for
    reducer: StepMetricsReducer
    validation: Validation | None
    saver: BackgroundSaver
    course: CourseWatch
    replanning: Replanning
    log: RunLog
    progress: TrainingProgress
    records: RunRecords
    claim: FolderClaim
    elastic: tuple[StepHook, ...]  # of a run that may change its number of ranks


def build_hooks(parts: RunParts) -> tuple[StepHook, ...]:
    """Return the hooks of a run.

    The order decides what a failure leaves behind: what concerns the finished step alone comes first, then what reads
    held-out data, then the log, and last the checkpoint, after which the run may end.
    """
    rank_context, records = parts.rank_context, parts.records
    world, activity, train = rank_context.world, rank_context.activity, rank_context.recipe.train
    writer = CheckpointWriter(parts.saver, train.checkpoint, records, activity)
    hooks: list[StepHook] = [
        FolderGuard(parts.claim),
        LearningRateSchedule(train.optimizer),
        StragglerReports(activity, records),
        Tracing(_tracer(parts), frozenset(train.trace_steps), activity, records),
        NonFiniteGuard(parts.index, records, train.max_nonfinite_steps),
        parts.course,
        FinishBackgroundSave(writer),
        QuarantineRecorder(world, _bad_samples(parts), records),
        parts.replanning,
    ]
    if parts.validation:
        hooks.append(parts.validation)
    if train.evaluate_every:
        hooks.append(HeldOutEvaluation(build_held_out_evaluation(rank_context), train.evaluate_every))
    hooks += [
        *parts.elastic,
        LoadImbalanceReports(parts.index, parts.targets, rank_context.dp[LLM], records),
        MetricsLog(parts.log, parts.progress, records),
        Checkpointing(writer, records, train.checkpoint.every),
    ]
    return tuple(hooks)


def _tracer(parts: RunParts) -> RunTracer:
    path = parts.records.run_dir / TRACE_FILE
    context = parts.rank_context
    return RunTracer(context.graph, context.world, parts.reducer.timing, parts.plan.sha256, path)


def _bad_samples(parts: RunParts) -> BadSampleTracker:
    """Count from what the run found before it was resumed."""
    earlier = read_quarantine(parts.records.run_dir / QUARANTINE_FILE)
    return BadSampleTracker(parts.index, parts.rank_context.recipe.data.max_bad_rate, earlier)
