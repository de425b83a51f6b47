"""Open everything that steps need: the loader, the log, and the hooks in their order."""

import contextlib
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mmtrain.checkpoint import SavingRun
from mmtrain.checkpoint.memory_copies import remove_all
from mmtrain.costs.recorded_costs import RECORDED_COSTS_FILE
from mmtrain.data import BadSampleTracker, Loader, StepRequest, read_quarantine
from mmtrain.planning.artifact.plan import Plan
from mmtrain.program import LLM
from mmtrain.report import RunLog, StepMetrics, TimeSplit, open_progress
from mmtrain.report.epoch_text import duration_text
from mmtrain.report.trackers import TrackerFeeds
from mmtrain.runtime.evaluation.metrics import find_metrics
from mmtrain.runtime.evaluation.qa_eval import build_held_out_evaluation
from mmtrain.runtime.evaluation.shown_answers import AnswerLog
from mmtrain.runtime.execution.activity import ENDING, LOADING, PREPARING
from mmtrain.runtime.execution.checkpointing import BackgroundSaver, SavedRank
from mmtrain.runtime.execution.input_arena import copier_for
from mmtrain.runtime.execution.peer_copies import PeerCopies
from mmtrain.runtime.execution.step_prefetcher import StepPrefetcher
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, QUARANTINE_FILE, TRACE_FILE
from mmtrain.runtime.training.choose_plan import limited_to_device, plan_that_fits
from mmtrain.runtime.training.go_back import SKIPPED_STATE
from mmtrain.runtime.training.hooks.best_checkpoint import BestCheckpoint
from mmtrain.runtime.training.hooks.checkpoints import Checkpointing, CheckpointWriter, FinishBackgroundSave
from mmtrain.runtime.training.hooks.corruption import CHECKED_STATE, CorruptionCheck
from mmtrain.runtime.training.hooks.elastic import ResumeTime, StandbyPlanning
from mmtrain.runtime.training.hooks.guards import CourseWatch, FolderGuard, NonFiniteGuard, QuarantineRecorder
from mmtrain.runtime.training.hooks.held_out import HeldOutEvaluation, Validation
from mmtrain.runtime.training.hooks.hugging_face import HuggingFaceExport, HuggingFaceFolders, finish_folders
from mmtrain.runtime.training.hooks.learning_rate import LearningRateSchedule
from mmtrain.runtime.training.hooks.peer_copying import PeerCopying
from mmtrain.runtime.training.hooks.plugin_hooks import HookRun, PluginHook, find_hooks
from mmtrain.runtime.training.hooks.replanning import Replanning
from mmtrain.runtime.training.hooks.reports import LoadImbalanceReports, MetricsLog, StragglerReports
from mmtrain.runtime.training.hooks.store_copies import CopyToStore, RemoteCopies, finish_copies
from mmtrain.runtime.training.hooks.torch_profile import TorchProfiling
from mmtrain.runtime.training.hooks.tracing import RunTracer, Tracing
from mmtrain.runtime.training.loop import Loop
from mmtrain.runtime.training.rank_run import RankRun
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.standby_plans import load_standby_plan, rank_counts_ahead
from mmtrain.runtime.training.start_run import resume_facts
from mmtrain.runtime.training.step_hook import StepContext, StepHook
from mmtrain.runtime.training.step_metrics import RankFlags
from mmtrain.runtime.training.tracked_run import flatten_settings, open_run_trackers


@dataclass(frozen=True)
class RunLogs:
    """Where a run tells what happens in it."""

    log: RunLog
    trackers: TrackerFeeds
    records: RunRecords


@dataclass(frozen=True)
class Beside:
    """What writes the run's state beside the training; None where the recipe wants it not."""

    saver: BackgroundSaver
    folders: HuggingFaceFolders | None = None
    store: RemoteCopies | None = None
    memory: PeerCopies | None = None


@contextlib.contextmanager
def open_loop(run: RankRun) -> Iterator[Loop]:
    """Open everything that steps need, and yield the loop over them; all ranks call this together."""
    session, rank_context, reducer = run.session, run.rank_context, run.reducer
    recipe, world, first_step = rank_context.recipe, rank_context.world, run.position.first_step
    validation = Validation(rank_context, recipe.train.validate_every) if recipe.train.validate_every else None
    of_peak = f"MFU is the share of {reducer.peak_flops:.3g} FLOP/s, {world.size} x {run.plan.hardware}"
    session.console.print(of_peak, highlight=False)
    if first_step:
        left_s = (recipe.train.num_steps - first_step) * run.plan.predicted.step_time_s
        text = f"{recipe.train.num_steps - first_step:,} of {recipe.train.num_steps:,} steps are left"
        session.console.print(f"{text}, predicted to take {duration_text(left_s)}", highlight=False)
    session.stop.save_from_now_on()  # all ranks have come here, and the first step takes seconds
    rank_context.faults.start(world.rank)
    rank_context.faults.take_optimizer(rank_context.optimizer)
    notify = partial(_print_of_rank, world.rank)
    with (
        contextlib.ExitStack() as stack,
        RunLog(session.request.run_dir, first_step + 1, world.is_first, notify) as log,
        open_progress(session.console, recipe.name, recipe.train.num_steps, first_step + 1) as progress,
        _make_loader(run) as loader,
        _prefetch(run, loader) as steps,
    ):
        records = RunRecords(session.request.run_dir, progress, world.is_first)
        course = CourseWatch(run.position.course, records)
        folders = _open_hugging_face_folders(run, records)
        state = _saved_state(run, course)
        saver = _make_saver(run, state, folders)
        peer_copies = _open_peer_copies(run, state)
        trackers = stack.enter_context(open_run_trackers(run, records))
        copies = _open_copies(run, records)
        beside = Beside(saver, folders, copies, peer_copies)
        hooks = build_hooks(run, validation, course, beside, RunLogs(log, trackers, records))
        for hook in hooks:
            stack.callback(hook.close)
        _catch_up(run, hooks, log)
        if folders is not None and not run.has_steps_left:  # it was killed while its last folders were written
            folders.look_again(last_step=run.position.first_step)
            finish_folders(folders, session.patient_world, rank_context.activity)
        if copies is not None and not run.has_steps_left:
            finish_copies(copies, session.patient_world, rank_context.activity)
        yield Loop(
            rank_context=rank_context,
            steps=steps,
            reducer=reducer,
            flags=lambda: RankFlags(
                session.stop.stop_requested,
                not saver.done,
                session.lock.is_lost,
                peer_copies is not None and not peer_copies.done,
            ),
            memory_report=run.memory_report,
            records=records,
            hooks=hooks,
            early_end=lambda: None if run.position.best is None else run.position.best.early_end(),
        )
        rank_context.activity.start(ENDING)


def _catch_up(run: RankRun, hooks: Sequence[StepHook], log: RunLog) -> None:
    """Let hooks do what the run had left out in the step that it resumes from, when a signal stopped it."""
    first_step, num_steps = run.position.first_step, run.rank_context.recipe.train.num_steps
    logged: dict[str, Any] = run.session.patient_world.on_first(lambda: (log.steps() or [{}])[-1]) if first_step else {}
    if logged.get("step") != first_step:
        return
    ctx = StepContext(first_step - 1, num_steps)
    none_s = TimeSplit(0.0, 0.0, 0.0, 0.0)
    ctx.metrics = StepMetrics(first_step, 0.0, 0.0, 0.0, 1.0, 0, 0, 0.0, 0.0, 0.0, none_s, 0)
    for hook in hooks:
        hook.catch_up(ctx, logged)


def build_hooks(
    run: RankRun,
    validation: Validation | None,
    course: CourseWatch,
    beside: Beside,
    logs: RunLogs,
) -> tuple[StepHook, ...]:
    """Return the hooks of a run.

    The order decides what a failure leaves behind: what concerns the finished step alone comes first, then what reads
    held-out data, then the log, and last the checkpoint, after which the run may end.
    """
    rank_context, index, records = run.rank_context, run.session.index, logs.records
    world, activity, train = rank_context.world, rank_context.activity, rank_context.recipe.train
    writer = CheckpointWriter(beside.saver, train.checkpoint, records, activity)
    hooks: list[StepHook] = [
        FolderGuard(run.session.claim),
        LearningRateSchedule(train.optimizer),
        StragglerReports(activity, records),
        Tracing(_tracer(run, records), frozenset(train.trace_steps), activity, records),
        *_profiling(run, records),
        NonFiniteGuard(index, records, train.max_nonfinite_steps),
        course,
        FinishBackgroundSave(writer),
        QuarantineRecorder(world, _bad_samples(run, records), records),
        _make_replanning(run, records),
    ]
    if validation:
        hooks.append(validation)
    if train.evaluate_every:
        answer_log = AnswerLog(logs.log, records.run_dir, rank_context.recipe.data.image)
        metrics = find_metrics(train.metrics)
        evaluate = build_held_out_evaluation(rank_context)
        hooks.append(HeldOutEvaluation(evaluate, train.evaluate_every, metrics, answer_log, records))
    if run.position.best is not None:
        hooks.append(BestCheckpoint(run.position.best, train, world, records))
    hooks += _plugin_hooks(run)
    checkpointing = Checkpointing(writer, records, train.checkpoint)
    copying = None
    if beside.memory is not None:
        copying = PeerCopying(beside.memory, train.peer_copies.every, partial(_print_of_rank, world.rank))
    hooks += [
        *_elastic_hooks(run, records),
        LoadImbalanceReports(index, run.targets, rank_context.dp[LLM], records),
        MetricsLog(logs.log, logs.trackers, records),
        *_corruption_check(run, writer, checkpointing, copying, records),
        checkpointing,
        *([] if copying is None else [copying]),
    ]
    if beside.folders is not None:
        hooks.append(HuggingFaceExport(beside.folders, writer, run.session.patient_world, activity))
    if beside.store is not None:
        hooks.append(CopyToStore(beside.store, writer, run.session.patient_world, activity))
    return tuple(hooks)


def _tracer(run: RankRun, records: RunRecords) -> RunTracer:
    path = records.run_dir / TRACE_FILE
    context = run.rank_context
    return RunTracer(context.graph, context.world, run.reducer.timing, run.plan.sha256, path)


def _profiling(run: RankRun, records: RunRecords) -> tuple[StepHook, ...]:
    settings, world = run.rank_context.recipe.train.profile, run.rank_context.world
    if settings is None:
        return ()
    return (TorchProfiling(settings, world.rank, world.device, run.rank_context.activity, records),)


def _plugin_hooks(run: RankRun) -> list[StepHook]:
    recipe, world = run.rank_context.recipe, run.rank_context.world
    settings = flatten_settings(recipe)
    seen = HookRun(run.session.request.run_dir, world.rank, world.size, recipe.train.num_steps, settings)
    return [PluginHook(plugin, seen) for plugin in find_hooks(recipe.train.hooks)]


def _corruption_check(
    run: RankRun, writer: CheckpointWriter, saves: Checkpointing, copying: PeerCopying | None, records: RunRecords
) -> tuple[StepHook, ...]:
    every = run.rank_context.recipe.train.corruption_check.every
    if not every:
        return ()

    def is_saved(ctx: StepContext) -> bool:
        return saves.is_due(ctx) or (copying is not None and copying.takes_copy(ctx))

    def finish_saves() -> None:
        if writer.saver.pending:
            writer.finish(must=False)
        if copying is not None:
            copying.finish()

    position, is_mixed = run.position, run.session.request.mixed_devices
    return (CorruptionCheck(run.rank_context, position.first_step, every, finish_saves, is_saved, records, is_mixed),)


def _bad_samples(run: RankRun, records: RunRecords) -> BadSampleTracker:
    """Count from what the run found before it was resumed."""
    earlier = read_quarantine(records.run_dir / QUARANTINE_FILE)
    return BadSampleTracker(run.session.index, run.rank_context.recipe.data.max_bad_rate, earlier)


def _elastic_hooks(run: RankRun, records: RunRecords) -> tuple[StepHook, ...]:
    """Return the hooks of an elastic run, on rank 0, which is the one that plans and logs."""
    request, world = run.session.request, run.rank_context.world
    if not request.elastic or not world.is_first:
        return ()
    fingerprint, hardware = request.recipe_sha256, request.hardware
    address = run.session.address
    counts = rank_counts_ahead(world.size, address.ranks_per_node, may_grow=address.launcher != "mmtrain")
    missing = [n for n in counts if load_standby_plan(request.run_dir, fingerprint, n, hardware) is None]

    def planner_for(num_ranks: int) -> Callable[[], Plan]:
        planner = partial(
            request.planner,
            limited_to_device(request.recipe, hardware, run.device_memory),
            run.session.index.lengths,
            world_size=num_ranks,
            hardware=hardware,
            recipe_sha256=fingerprint,
        )
        return partial(plan_that_fits, request.recipe, run.device_memory, planner)

    return ResumeTime(run.chosen.last_step_s, records), StandbyPlanning(missing, planner_for, records)


def _make_replanning(run: RankRun, records: RunRecords) -> Replanning:
    """Return what plans again for this run when its costs have turned out to be others."""
    request, activity = run.session.request, run.rank_context.activity
    recipe = request.recipe
    limited = limited_to_device(recipe, run.plan.hardware, run.device_memory)
    replanner = partial(request.replanner, limited, run.session.index.lengths, present=run.plan)
    plan_with_costs = partial(plan_that_fits, recipe, run.device_memory, replanner)
    replanning = Replanning(
        plan_with_costs,
        run.reducer,
        run.rank_context.world,
        activity,
        records,
    )
    has_recorded_costs = request.resume and (request.run_dir / RECORDED_COSTS_FILE).exists()
    if records.is_first and has_recorded_costs and recipe.train.replan != "off":
        replanning.plan_with_recorded_costs()
    return replanning


def _open_hugging_face_folders(run: RankRun, records: RunRecords) -> HuggingFaceFolders | None:
    """Return what writes Hugging Face folders on rank 0, and does nothing on others; None if the recipe wants none."""
    settings = run.rank_context.recipe.train.checkpoint
    if not settings.hf_every:
        return None
    folders = HuggingFaceFolders(settings, records)
    if records.is_first:
        folders.open(run.position.first_step)
    return folders


def _open_copies(run: RankRun, records: RunRecords) -> RemoteCopies | None:
    """Return what copies checkpoints on rank 0, and does nothing on others; None if the recipe names no store."""
    settings = run.rank_context.recipe.train.checkpoint
    return None if settings.remote is None else RemoteCopies(settings, records)


def _saved_state(run: RankRun, course: CourseWatch) -> Callable[[], Mapping[str, object]]:
    """Return what gives everything beside the weights that a resumed run depends on."""
    best, optimizer = run.position.best, run.rank_context.optimizer
    state = {
        "facts": resume_facts(run.rank_context.recipe, run.session.index),
        SKIPPED_STATE: list(run.position.skipped_positions),
    }
    return lambda: {
        **state,
        CHECKED_STATE: optimizer.checked_step,
        **course.state(),
        **({} if best is None else best.state()),
    }


def _make_saver(
    run: RankRun, state: Callable[[], Mapping[str, object]], folders: HuggingFaceFolders | None
) -> BackgroundSaver:
    """Return what saves this run's checkpoints."""
    return BackgroundSaver(
        run.session.request.run_dir / CHECKPOINTS_FOLDER,
        SavedRank.of(run.rank_context),
        state,
        SavingRun(
            run.session.claim.run_id,
            run.session.claim.require,
            (lambda checkpoint: False) if folders is None else folders.is_owed,
        ),
    )


def _open_peer_copies(run: RankRun, state: Callable[[], Mapping[str, object]]) -> PeerCopies | None:
    """Return what copies this rank's state into memory; None if nothing does. All ranks call this together."""
    copies = run.copies
    if copies is None:
        return None
    if not run.has_steps_left:  # it was killed after its last checkpoint
        remove_all(copies.memory.root)
        return None
    return PeerCopies(copies.memory, SavedRank.of(run.rank_context), state, copies.course, run.position.copy_slot)


def _make_loader(run: RankRun) -> Loader:
    """Return what prepares this rank's steps, from the first that it trains. All ranks call this together."""
    rank_context, position = run.rank_context, run.position
    rank_context.activity.start(PREPARING)
    node = socket.gethostname()
    num_local_ranks = run.session.patient_world.all_gather(node).count(node)
    rank_context.activity.start(LOADING)
    first = StepRequest(
        position.first_step,
        rank_context.dp,
        rank_context.num_microbatches,
        rank_context.needs,
        run.targets,
        position.skipped_positions,
    )
    notify = partial(_print_of_rank, rank_context.world.rank)
    on_outage = partial(rank_context.activity.note_outage, "training")
    return Loader(run.session.index, run.stream, rank_context.recipe, first, num_local_ranks, notify, on_outage)


def _prefetch(run: RankRun, loader: Loader) -> StepPrefetcher:
    """Return what brings this rank's steps to the device, with the sources of their samples if there are several."""
    rank_context = run.rank_context
    explain = partial(run.memory_report.to_input_error, needs=rank_context.needs)
    copier = copier_for(rank_context.world.device)
    is_ahead = rank_context.recipe.data.prefetch > 0
    host_input = partial(rank_context.host_input, sources=run.reducer.sources)
    return StepPrefetcher(loader, host_input, copier, is_ahead, stop=loader.close, explain=explain)


def _print_of_rank(rank: int, text: str) -> None:
    """Print what concerns one rank, whichever it is: rank 0 may not know of it."""
    print(f"mmtrain: rank {rank}: {text}", file=sys.stderr, flush=True)
