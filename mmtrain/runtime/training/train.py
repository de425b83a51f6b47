"""`mmtrain train`: a run from its recipe to the trained model."""

import contextlib
from dataclasses import replace
from pathlib import Path

from mmtrain.data.stream.count_steps import estimate_epoch, with_counted_steps
from mmtrain.errors import LaunchError, StateCorrupted, StoppedAndSaved
from mmtrain.planning.artifact.plan import Plan
from mmtrain.recipe import Recipe
from mmtrain.redaction import Redactor
from mmtrain.report import read_metrics
from mmtrain.report.epoch_text import epoch_text
from mmtrain.report.runlog import run_summary
from mmtrain.report.trackers import require_trackers
from mmtrain.runtime.evaluation.metrics import find_metrics
from mmtrain.runtime.execution.activity import AWAITING_PLAN, PLANNING
from mmtrain.runtime.execution.precision import set_determinism
from mmtrain.runtime.execution.process_groups import release_groups
from mmtrain.runtime.resilience.failures import is_stopped_early, lost_peers_named
from mmtrain.runtime.resilience.launch import LauncherMonitor, free_port, has_watching_launcher
from mmtrain.runtime.resilience.run_end import leave_in_time
from mmtrain.runtime.resilience.signals import StopSignalListener
from mmtrain.runtime.run_folder import read_run_state
from mmtrain.runtime.training.choose_plan import ChosenPlan, choose_plan
from mmtrain.runtime.training.export_checkpoint import require_exportable
from mmtrain.runtime.training.hooks.plugin_hooks import find_hooks
from mmtrain.runtime.training.local_restarts import launch_with_restarts
from mmtrain.runtime.training.open_loop import open_loop
from mmtrain.runtime.training.rank_run import build_run
from mmtrain.runtime.training.rank_session import RankSession, open_session
from mmtrain.runtime.training.start_weights import (
    check_start_weights,
)
from mmtrain.runtime.training.switch_plan import free_unused_memory
from mmtrain.runtime.training.tracked_run import require_no_credentials
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import (
    Address,
    find_address,
    has_agent_store,
    introduce_address,
    join,
    limit_threads,
    way_to_start_own_ranks,
)

MAX_RESTORES = 3  # in a row without a check that passed later: then the fault is not one of a moment


def start_training(request: TrainRequest) -> None:
    """Train in the processes that a launcher has started, or start our own.

    Raises UserError for wrong input and RunError where the run breaks; both name what and where.
    """
    if not request.resume:
        check_start_weights(request.recipe)  # report weights that do not fit before anything starts
    if request.recipe.train.checkpoint.hf_every:
        require_exportable(request.recipe)
    require_trackers(request.recipe.train.loggers)
    require_no_credentials(request.recipe, Redactor())
    find_hooks(request.recipe.train.hooks)
    find_metrics(request.recipe.train.metrics)
    address = find_address()
    if address is not None:
        introduce_address(address)
        if request.max_restarts:
            raise LaunchError(
                f"--max-restarts: {request.max_restarts} found, but {address.launcher} started these processes "
                f"({address.origin}) and must restart them (torchrun --max-restarts, sbatch --requeue with --resume); "
                f"leave it out here, or {way_to_start_own_ranks(address)}"
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
        if has_agent_store(address):
            raise LaunchError(
                "--elastic: torchrun lets the ranks meet in a store that nodes which come later cannot find. Start "
                "torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment and with --rdzv-backend=c10d, "
                "on every node"
            )
        return replace(request, resume=True, may_be_new=not request.resume)
    if not address.attempt:
        return request
    is_stopped = read_run_state(request.run_dir).get("status") == "stopped"
    if is_stopped and not is_stopped_early(request.run_dir):  # early, torchrun itself may have sent the signal
        raise StoppedAndSaved("stopped by a signal before this restart, which torchrun counts as a failure")
    return replace(request, resume=True, go_back=None, force_unlock=False)


def require_started_ranks(recipe: Recipe, num_started: int, elastic: bool) -> None:
    """Raise LaunchError if a run cannot train with the number of processes that were started."""
    num_ranks, max_gpus = recipe.cluster.ranks, recipe.parallel.max_gpus
    may_differ = elastic or (max_gpus is not None and num_started <= max_gpus)
    if num_ranks is not None and num_started != num_ranks and not may_differ:
        raise LaunchError(
            f"cluster.ranks: {num_ranks} in the recipe, but {num_started} processes were started; "
            "start as many, leave cluster.ranks out to take what the launcher starts, or add --elastic"
        )


def train_rank(request: TrainRequest, address: Address) -> None:
    """Train as one rank of the run. Raises StoppedAndSaved when a signal stopped the run before its last step."""
    require_started_ranks(request.recipe, address.world_size, request.elastic)
    limit_threads(address)
    set_determinism(request.recipe.train.deterministic)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lost_peers_named(address))
        stop = stack.enter_context(StopSignalListener(has_nothing_to_save=True))
        if has_watching_launcher(address):
            stack.enter_context(LauncherMonitor(address.rank))
        watchdog_s = request.recipe.train.watchdog_s
        with open_session(request, address, join(address, watch_s=watchdog_s), stop) as session:
            session.activity.start(PLANNING if session.world.is_first else AWAITING_PLAN)
            chosen = choose_plan(request, session.patient_world, session.index)
            session = replace(session, request=replace(session.request, chosen_plan=chosen.plan))
            session = _with_counted_steps(session, chosen.plan)
            checkpoint = train_on_plan(session, chosen)
            if checkpoint is None and session.world.is_first:
                _print_summary(session, chosen)
        leave_in_time(session.world, watchdog_s, StoppedAndSaved.exit_code if checkpoint else 0)
    if checkpoint:
        raise StoppedAndSaved(f"stopped by a signal and saved {checkpoint}; {_how_to_go_on(request, address)}")


def _how_to_go_on(request: TrainRequest, address: Address) -> str:
    """Say how to continue a stopped run: by the command to paste, if no launcher's command belongs around it."""
    if request.resume_command is None:
        return "continue it with `resume=True`"
    if address.launcher != "mmtrain":
        return f"start it under {address.launcher} as before, with --resume"
    return f"continue with:\n  {request.resume_command}"


def _with_counted_steps(session: RankSession, plan: Plan) -> RankSession:
    """Return the session of a recipe that states epochs with the number of its steps, which rank 0 counts.

    It says what an epoch and the run are.
    """
    recipe, index = session.request.recipe, session.index

    def count() -> int:
        return with_counted_steps(recipe, index).train.num_steps

    num_steps: int = session.patient_world.on_first(count) if recipe.train.steps is None else recipe.train.steps
    if session.world.is_first:
        epoch = estimate_epoch(recipe, index.lengths)
        text = epoch_text(epoch.steps, epoch.samples_per_step, num_steps, plan.predicted.step_time_s)
        session.console.print(text, highlight=False, soft_wrap=True)
    return replace(session, request=replace(session.request, num_steps=num_steps))


def _print_summary(session: RankSession, chosen: ChosenPlan) -> None:
    summary = run_summary(chosen.plan, session.request.recipe.cluster, read_metrics(session.request.run_dir))
    if summary:
        session.console.print(summary, highlight=False, soft_wrap=True)


def train_on_plan(session: RankSession, chosen: ChosenPlan) -> Path | None:
    """Train on the plan, from the first step or from the newest checkpoint of a run that goes on.

    Return the checkpoint of a run that a signal stopped. Nothing is left of the plan: the session can train on another
    one, see `switch_plan`.

    With `train.on_corruption: restore` all ranks go back to the newest checkpoint where state changed by itself; they
    find that in the same step. Raises StateCorrupted if the run is to stop then, or does not get further in
    `MAX_RESTORES` attempts.
    """
    checked_step, num_restores = 0, 0
    while True:
        run = build_run(session, chosen)
        groups, corruption = run.rank_context.transport.groups, None
        checkpoint: Path | None = None
        try:
            with contextlib.ExitStack() as stack:  # no name holds the loop, and with it the model
                checkpoint = stack.enter_context(open_loop(run)).run(run.position.first_step)
        except StateCorrupted as error:
            corruption = error.with_traceback(None)  # which would keep the model
        release_groups(groups)
        if corruption is None:
            return checkpoint
        has_advanced = corruption.checked_step > checked_step
        checked_step, num_restores = corruption.checked_step, 1 if has_advanced else num_restores + 1
        if session.request.recipe.train.on_corruption == "stop" or num_restores > MAX_RESTORES:
            raise corruption
        session.console.print(f"{corruption}. Going back to it", style="red", highlight=False, soft_wrap=True)
        del run, stack
        free_unused_memory()
        session = replace(session, request=replace(session.request, resume=True, go_back=None))
