"""`mmtrain train`: a run from its recipe to the trained model."""

import contextlib
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from mmtrain.balance import StepTargets
from mmtrain.checkpoint import SavingRun
from mmtrain.data import DataIndex, GroupStream, Loader, StepRequest, build_index
from mmtrain.durable_files import disk_errors_named
from mmtrain.errors import LaunchError, StoppedAndSaved
from mmtrain.plan.artifact.plan import Plan
from mmtrain.recipe import recipe_fingerprint
from mmtrain.report import RunLog, open_progress
from mmtrain.runtime.execution.activity import (
    BUILDING,
    ENDING,
    INDEXING,
    LOADING,
    PLANNING,
    PREPARING,
    RESTORING,
    Activity,
)
from mmtrain.runtime.execution.checkpointing import BackgroundSaver, SavedRank
from mmtrain.runtime.execution.rank_context import RankContext, build_rank_context
from mmtrain.runtime.execution.recorder import StepRecorder, clock_for
from mmtrain.runtime.resilience.config_consensus import require_consensus
from mmtrain.runtime.resilience.failures import report_failures
from mmtrain.runtime.resilience.folder_lock import FolderLock
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.resilience.orphans import LauncherMonitor, has_watching_launcher
from mmtrain.runtime.resilience.out_of_memory import OutOfMemoryReport, predicted_peak_gib
from mmtrain.runtime.resilience.signals import StopSignalListener
from mmtrain.runtime.resilience.watchdog import LOST_RANK_SILENCE_S, Watchdog
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.runtime.run_owner import FolderClaim
from mmtrain.runtime.run_state import read_run_state
from mmtrain.runtime.training.choose_plan import ChosenPlan, choose_plan
from mmtrain.runtime.training.go_back import SKIPPED_STATE
from mmtrain.runtime.training.hooks.build_hooks import RunParts, build_hooks
from mmtrain.runtime.training.hooks.course import CourseWatch
from mmtrain.runtime.training.hooks.elastic import ResumeTime, StandbyPlanning
from mmtrain.runtime.training.hooks.held_out import Validation
from mmtrain.runtime.training.hooks.replanning import Replanning
from mmtrain.runtime.training.local_restarts import launch_with_restarts
from mmtrain.runtime.training.loop import Loop
from mmtrain.runtime.training.replanned_run import share_recorded_costs
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.standby_plans import load_standby_plan, rank_counts_ahead
from mmtrain.runtime.training.start_run import (
    RunPosition,
    claim_run_folder,
    introduce_run,
    introduce_start_weights,
    open_start_weights,
    restore_run,
    resume_facts,
    share_step_targets,
)
from mmtrain.runtime.training.step_hook import StepHook
from mmtrain.runtime.training.step_metrics import RankFlags, StepMetricsReducer
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import Address, World, find_address, has_agent_store, join, leave, torch_seed
from mmtrain.weights import open_pretrained


def run(request: TrainRequest) -> None:
    """Train in the processes that a launcher has started, or start our own.

    Raises UserError for wrong input and RunError where the run breaks; both name what and where.
    """
    if not request.resume:
        open_pretrained(request.recipe)  # report a folder whose weights do not fit before anything starts
    address = find_address()
    if address is not None:
        if request.max_restarts:
            raise LaunchError(
                f"--max-restarts: {request.max_restarts} found, but {address.launcher} started these processes and "
                "must restart them (torchrun --max-restarts, sbatch --requeue with --resume); leave it out here"
            )
        train_rank(_request_under_torchrun(request, address) if address.launcher == "torchrun" else request, address)
    elif request.ranks == 1 and not request.max_restarts:
        train_rank(request, Address(0, 1, 0, "127.0.0.1", free_port(), "mmtrain"))
    else:
        launch_with_restarts(request, train_rank)


def _request_under_torchrun(request: TrainRequest, address: Address) -> TrainRequest:
    """Return what to do in a start by torchrun, which starts ranks again with the arguments of the first start.

    An elastic run resumes whatever its folder holds: when nodes come or go, torchrun counts no attempt. For it, a
    signal that stopped ranks is no end either: torchrun itself stops them so when a node has come, and a node whose
    agent gets a signal leaves a run that goes on.

    Raises StoppedAndSaved for a run that a signal stopped, and LaunchError for what an elastic run cannot do.
    """
    if request.elastic:
        if request.go_back is not None:
            raise LaunchError(
                "--resume-from: with --elastic, each restart by torchrun would go back again. Go back once without "
                "--elastic, then continue with it"
            )
        if has_agent_store():
            raise LaunchError(
                "--elastic: torchrun lets the ranks meet in a store that nodes which come later cannot find. Start "
                "torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment and with --rdzv-backend=c10d, "
                "on every node"
            )
        return replace(request, resume=True, may_be_new=not request.resume)
    if not address.attempt:
        return request
    if read_run_state(request.run_dir).get("status") == "stopped":
        raise StoppedAndSaved("stopped by a signal before this restart, which torchrun counts as a failure")
    return replace(request, resume=True, go_back=None, force_unlock=False)


def train_rank(request: TrainRequest, address: Address) -> None:
    """Train as one rank of the run. Raises StoppedAndSaved when a signal stopped the run before its last step."""
    num_ranks, max_gpus = request.recipe.cluster.ranks, request.recipe.parallel.max_gpus
    may_differ = request.elastic or (max_gpus is not None and address.world_size <= max_gpus)
    if num_ranks is not None and address.world_size != num_ranks and not may_differ:
        raise LaunchError(
            f"cluster.ranks: {num_ranks} in the recipe, but {address.world_size} processes were started; "
            "start as many, leave cluster.ranks out to take what the launcher starts, or add --elastic"
        )
    if torch.get_num_threads() > 1 and not torch.cuda.is_available():
        torch.set_num_threads(1)  # a rank is one core; more threads than cores would fight the other ranks
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignalListener())
        if has_watching_launcher(address):
            stack.enter_context(LauncherMonitor(address.rank))
        checkpoint = _train(request, address, join(address), stop)
        leave()
    if checkpoint:
        raise StoppedAndSaved(f"stopped by a signal and saved {checkpoint}; continue with --resume")


def _train(request: TrainRequest, address: Address, world: World, stop: StopSignalListener) -> Path | None:
    """Train from the first step, or from the newest good checkpoint, to the last step, or until a signal stops the run.

    Return the checkpoint of a run that was stopped.
    """
    recipe = request.recipe
    require_consensus(world, {"recipe": recipe.model_dump(mode="json"), "torch": torch.__version__})
    activity = Activity(recorder=StepRecorder(clock_for(world.device)))
    notify = partial(print, flush=True)
    with FolderLock(request.run_dir, notify, launcher=request.restarting_launcher) as lock:  # rank 0 takes it for all
        claim = world.on_first(lambda: claim_run_folder(request, lock))
        with (
            report_failures(claim, world.rank, activity),
            Watchdog(
                activity,
                recipe.train.watchdog_s,
                request.run_dir,
                world,
                may_write=claim.is_held,
                silence_limit_s=LOST_RANK_SILENCE_S if request.elastic else None,
            ),
            disk_errors_named(request.run_dir),
        ):
            patient_world = world.without_timeout()
            activity.start(INDEXING)
            index = build_index(recipe, notify=notify)  # one rank reads the data, and prints
            require_consensus(
                patient_world, {"data": {"samples": len(index.samples), "fingerprint": index.fingerprint}}
            )
            activity.start(PLANNING)
            chosen = choose_plan(request, patient_world, index)
            activity.start(BUILDING)
            pretrained = open_start_weights(request, patient_world)
            rank_context = build_rank_context(recipe, chosen.plan, world, activity, request.faults, pretrained)
            torch.manual_seed(torch_seed(recipe.train.seed))  # after building, which may draw differently on each rank
            console = Console(quiet=not world.is_first)
            if pretrained is not None:
                pretrained.close()
                introduce_start_weights(console, recipe, pretrained)
            position = RunPosition()
            if request.resume:
                activity.start(RESTORING)
                position = restore_run(request, patient_world, rank_context, index, console)
            activity.start(INDEXING)
            introduce_run(console, request, chosen, index, position.first_step)
            return _run_steps(
                _RankRun(
                    request, address, patient_world, rank_context, chosen, index, console, position, stop, claim, lock
                )
            )


@dataclass(frozen=True)
class _RankRun:
    """A run on one rank, ready for its first step."""

    request: TrainRequest
    address: Address
    patient_world: World  # for waits in which other ranks may take any time
    rank_context: RankContext
    chosen: ChosenPlan
    index: DataIndex
    console: Console
    position: RunPosition
    stop: StopSignalListener
    claim: FolderClaim
    lock: FolderLock

    @property
    def plan(self) -> Plan:
        """What this rank executes its part of."""
        return self.chosen.plan


def _run_steps(run: _RankRun) -> Path | None:
    """Open everything that steps need, and run the training loop."""
    request, rank_context, index = run.request, run.rank_context, run.index
    recipe, world, num_steps = rank_context.recipe, rank_context.world, rank_context.recipe.train.steps
    stream = GroupStream.of(recipe, index)
    first_step = run.position.first_step
    targets = share_step_targets(run.patient_world, recipe, run.plan, index)
    recorded = share_recorded_costs(run.patient_world, request)
    reducer = StepMetricsReducer(rank_context, stream, run.plan.hardware, run.position.skipped_positions, recorded)
    validation = Validation(rank_context, recipe.train.validate_every) if recipe.train.validate_every else None
    run.console.print(
        f"MFU is the share of {reducer.peak_flops:.3g} FLOP/s, {world.size} x {run.plan.hardware}", highlight=False
    )
    rank_context.faults.start(world.rank)
    node = socket.gethostname()
    rank_context.activity.start(PREPARING)
    num_local_ranks = run.patient_world.all_gather(node).count(node)
    rank_context.activity.start(LOADING)
    with (
        contextlib.ExitStack() as stack,
        RunLog(request.run_dir, first_step + 1, world.is_first, partial(_print_of_rank, world.rank)) as log,
        open_progress(run.console, recipe.name, num_steps, first_step + 1) as progress,
        _make_loader(run, stream, targets, num_local_ranks) as loader,
    ):
        records = RunRecords(request.run_dir, progress, world.is_first)
        course = CourseWatch(run.position.course, records)
        saver = _make_saver(run, course)
        replanning = _make_replanning(run, reducer, records)
        stack.callback(replanning.close)
        parts = RunParts(
            rank_context,
            run.plan,
            index,
            targets,
            reducer,
            validation,
            saver,
            course,
            replanning,
            log,
            progress,
            records,
            run.claim,
            _elastic_hooks(run, records, stack),
        )
        loop = Loop(
            rank_context=rank_context,
            loader=loader,
            reducer=reducer,
            flags=lambda: RankFlags(
                run.stop.stop_requested, not saver.done, run.lock.is_lost, replanning.new_plan is not None
            ),
            memory_report=_memory_report(run),
            hooks=build_hooks(parts),
        )
        checkpoint = loop.run(first_step)
        rank_context.activity.start(ENDING)
        if checkpoint is None:
            records.write_state("done", num_steps)
        return checkpoint


def _memory_report(run: _RankRun) -> OutOfMemoryReport:
    """Return what explains this rank's lack of memory."""
    world = run.rank_context.world
    peak_gib = predicted_peak_gib(world.rank, run.plan.predicted.peak_memory_gib)
    return OutOfMemoryReport(world, run.rank_context.activity, run.index, peak_gib)


def _elastic_hooks(run: _RankRun, records: RunRecords, stack: contextlib.ExitStack) -> tuple[StepHook, ...]:
    """Return the hooks of an elastic run, on rank 0, which is the one that plans and logs; `stack` ends them."""
    request, world = run.request, run.rank_context.world
    if not request.elastic or not world.is_first:
        return ()
    fingerprint, hardware = recipe_fingerprint(request.recipe), request.hardware
    counts = rank_counts_ahead(world.size, run.address.ranks_per_node, may_grow=run.address.launcher != "mmtrain")
    missing = [n for n in counts if load_standby_plan(request.run_dir, fingerprint, n, hardware) is None]

    def planner_for(num_ranks: int) -> Callable[[], Plan]:
        return partial(
            request.planner,
            request.recipe,
            run.index.lengths,
            world_size=num_ranks,
            hardware=hardware,
            recipe_sha256=fingerprint,
        )

    standby = stack.enter_context(StandbyPlanning(missing, planner_for, records))
    return ResumeTime(run.chosen.last_step_s, records), standby


def _make_replanning(run: _RankRun, reducer: StepMetricsReducer, records: RunRecords) -> Replanning:
    """Return what plans again for this run when its costs have turned out to be others."""
    recipe, activity = run.request.recipe, run.rank_context.activity
    plan_with_costs = partial(run.request.replanner, recipe, run.index.lengths, present=run.plan)
    return Replanning(recipe.train.replan, plan_with_costs, reducer, run.rank_context.world, activity, records)


def _make_saver(run: _RankRun, course: CourseWatch) -> BackgroundSaver:
    """Return what saves this run's checkpoints, with everything beside the weights that a resumed run depends on."""
    state = {
        "facts": resume_facts(run.rank_context.recipe, run.index),
        SKIPPED_STATE: list(run.position.skipped_positions),
    }
    return BackgroundSaver(
        run.request.run_dir / CHECKPOINTS_FOLDER,
        SavedRank.of(run.rank_context),
        lambda: {**state, **course.state()},
        SavingRun(run.claim.run_id, run.claim.require),
    )


def _make_loader(run: _RankRun, stream: GroupStream, targets: StepTargets, num_local_ranks: int) -> Loader:
    """Return what prepares this rank's steps, from the first that it trains."""
    rank_context, position = run.rank_context, run.position
    first = StepRequest(
        position.first_step,
        rank_context.dp,
        rank_context.num_microbatches,
        rank_context.needs,
        targets,
        position.skipped_positions,
    )
    notify = partial(_print_of_rank, rank_context.world.rank)
    return Loader(run.index, stream, rank_context.recipe, first, num_local_ranks, notify)


def _print_of_rank(rank: int, text: str) -> None:
    """Print what concerns one rank, whichever it is: rank 0 may not know of it."""
    print(f"mmtrain: rank {rank}: {text}", file=sys.stderr, flush=True)
