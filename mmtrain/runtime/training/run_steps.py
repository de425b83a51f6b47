"""The steps of a run on one plan: everything that they need, and the loop."""

import contextlib
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mmtrain.balance import StepTargets
from mmtrain.checkpoint import SavingRun
from mmtrain.data import GroupStream, Loader, StepRequest
from mmtrain.data.index.sample_sources import SampleSources
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_memory import DeviceMemory
from mmtrain.recipe import recipe_fingerprint
from mmtrain.report import RunLog, open_progress
from mmtrain.runtime.execution.activity import ENDING, LOADING, PREPARING
from mmtrain.runtime.execution.checkpointing import BackgroundSaver, SavedRank
from mmtrain.runtime.execution.input_arena import copier_for
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.execution.step_prefetcher import StepPrefetcher
from mmtrain.runtime.resilience.out_of_memory import OutOfMemoryReport, predicted_peak_gib
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, RECORDED_COSTS_FILE
from mmtrain.runtime.training.choose_plan import ChosenPlan
from mmtrain.runtime.training.go_back import SKIPPED_STATE
from mmtrain.runtime.training.hooks.build_hooks import RunParts, build_hooks
from mmtrain.runtime.training.hooks.course import CourseWatch
from mmtrain.runtime.training.hooks.elastic import ResumeTime, StandbyPlanning
from mmtrain.runtime.training.hooks.held_out import Validation
from mmtrain.runtime.training.hooks.replanning import Replanning, share_recorded_costs
from mmtrain.runtime.training.loop import Loop
from mmtrain.runtime.training.plan_fit import limited_to_device, plan_that_fits
from mmtrain.runtime.training.rank_session import RankSession
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.standby_plans import load_standby_plan, rank_counts_ahead
from mmtrain.runtime.training.start_run import (
    RunPosition,
    resume_facts,
    share_step_targets,
)
from mmtrain.runtime.training.step_hook import StepHook
from mmtrain.runtime.training.step_metrics import RankFlags, StepMetricsReducer


@dataclass(frozen=True)
class RankRun:
    """A run on one rank, ready for its first step on a plan."""

    session: RankSession
    rank_context: RankContext
    chosen: ChosenPlan
    position: RunPosition
    device_memory: DeviceMemory  # of the smallest device, before anything was built on it

    @property
    def plan(self) -> Plan:
        """What this rank executes its part of."""
        return self.chosen.plan


def run_steps(run: RankRun) -> Path | None:
    """Open everything that steps need, and run the training loop; return the checkpoint of a stopped run."""
    session, rank_context = run.session, run.rank_context
    request, index = session.request, session.index
    recipe, world, num_steps = rank_context.recipe, rank_context.world, rank_context.recipe.train.steps
    stream = GroupStream.of(recipe, index)
    first_step = run.position.first_step
    targets = share_step_targets(session.patient_world, recipe, run.plan, index)
    reducer = _make_reducer(run, stream)
    validation = Validation(rank_context, recipe.train.validate_every) if recipe.train.validate_every else None
    of_peak = f"MFU is the share of {reducer.peak_flops:.3g} FLOP/s, {world.size} x {run.plan.hardware}"
    session.console.print(of_peak, highlight=False)
    session.stop.save_from_now_on()  # all ranks have come here, and the first step takes seconds
    rank_context.faults.start(world.rank)
    with (
        contextlib.ExitStack() as stack,
        RunLog(request.run_dir, first_step + 1, world.is_first, partial(_print_of_rank, world.rank)) as log,
        open_progress(session.console, recipe.name, num_steps, first_step + 1) as progress,
        _make_loader(run, stream, targets) as loader,
        _prefetch(run, loader, reducer.sources) as steps,
    ):
        records = RunRecords(request.run_dir, progress, world.is_first)
        course = CourseWatch(run.position.course, records)
        saver = _make_saver(run, course)
        replanning = _make_replanning(run, reducer, records)
        stack.callback(replanning.close)
        if validation is not None:
            stack.callback(validation.close)
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
            run.session.claim,
            _elastic_hooks(run, records, stack),
        )
        loop = Loop(
            rank_context=rank_context,
            steps=steps,
            reducer=reducer,
            flags=lambda: RankFlags(session.stop.stop_requested, not saver.done, session.lock.is_lost),
            memory_report=_memory_report(run),
            hooks=build_hooks(parts),
        )
        checkpoint = loop.run(first_step)
        rank_context.activity.start(ENDING)
        if checkpoint is None:
            records.write_state("done", num_steps)
        return checkpoint


def _make_reducer(run: RankRun, stream: GroupStream) -> StepMetricsReducer:
    """Return what makes metrics of steps, by source if there are several. All ranks call this together."""
    recorded = share_recorded_costs(run.session.patient_world, run.session.request)
    sources = run.session.index.sources
    if sources is not None and len(sources.names) == 1:
        sources = None
    skipped = run.position.skipped_positions
    return StepMetricsReducer(run.rank_context, stream, run.plan.hardware, skipped, recorded, sources)


def _memory_report(run: RankRun) -> OutOfMemoryReport:
    """Return what explains this rank's lack of memory."""
    world = run.rank_context.world
    peak_gib = predicted_peak_gib(world.rank, run.plan.predicted.peak_memory_gib)
    return OutOfMemoryReport(world, run.rank_context.activity, run.session.index, peak_gib)


def _elastic_hooks(run: RankRun, records: RunRecords, stack: contextlib.ExitStack) -> tuple[StepHook, ...]:
    """Return the hooks of an elastic run, on rank 0, which is the one that plans and logs; `stack` ends them."""
    request, world = run.session.request, run.rank_context.world
    if not request.elastic or not world.is_first:
        return ()
    fingerprint, hardware = recipe_fingerprint(request.recipe), request.hardware
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

    standby = stack.enter_context(StandbyPlanning(missing, planner_for, records))
    return ResumeTime(run.chosen.last_step_s, records), standby


def _make_replanning(run: RankRun, reducer: StepMetricsReducer, records: RunRecords) -> Replanning:
    """Return what plans again for this run when its costs have turned out to be others."""
    request, activity = run.session.request, run.rank_context.activity
    recipe = request.recipe
    limited = limited_to_device(recipe, run.plan.hardware, run.device_memory)
    replanner = partial(request.replanner, limited, run.session.index.lengths, present=run.plan)
    plan_with_costs = partial(plan_that_fits, recipe, run.device_memory, replanner)
    replanning = Replanning(
        plan_with_costs,
        reducer,
        run.rank_context.world,
        activity,
        records,
    )
    has_recorded_costs = request.resume and (request.run_dir / RECORDED_COSTS_FILE).exists()
    if records.is_first and has_recorded_costs and recipe.train.replan != "off":
        replanning.plan_with_recorded_costs()
    return replanning


def _make_saver(run: RankRun, course: CourseWatch) -> BackgroundSaver:
    """Return what saves this run's checkpoints, with everything beside the weights that a resumed run depends on."""
    state = {
        "facts": resume_facts(run.rank_context.recipe, run.session.index),
        SKIPPED_STATE: list(run.position.skipped_positions),
    }
    return BackgroundSaver(
        run.session.request.run_dir / CHECKPOINTS_FOLDER,
        SavedRank.of(run.rank_context),
        lambda: {**state, **course.state()},
        SavingRun(run.session.claim.run_id, run.session.claim.require),
    )


def _make_loader(run: RankRun, stream: GroupStream, targets: StepTargets) -> Loader:
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
        targets,
        position.skipped_positions,
    )
    notify = partial(_print_of_rank, rank_context.world.rank)
    return Loader(run.session.index, stream, rank_context.recipe, first, num_local_ranks, notify)


def _prefetch(run: RankRun, loader: Loader, sources: SampleSources | None) -> StepPrefetcher:
    """Return what brings this rank's steps to the device, with the sources of their samples if there are several."""
    rank_context = run.rank_context
    explain = partial(_memory_report(run).to_input_error, needs=rank_context.needs)
    copier = copier_for(rank_context.world.device)
    is_ahead = rank_context.recipe.data.prefetch > 0
    host_input = partial(rank_context.host_input, sources=sources)
    return StepPrefetcher(loader, host_input, copier, is_ahead, stop=loader.close, explain=explain)


def _print_of_rank(rank: int, text: str) -> None:
    """Print what concerns one rank, whichever it is: rank 0 may not know of it."""
    print(f"mmtrain: rank {rank}: {text}", file=sys.stderr, flush=True)
