"""What a rank opens before it trains, and keeps for a whole run: the run's folder, its watchers and its data."""

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from mmtrain.checkpoint import SavingRun
from mmtrain.costs.find_hardware import is_same_hardware, slowest_hardware
from mmtrain.data import DataIndex, build_index
from mmtrain.durable_files import disk_errors_named
from mmtrain.report.console import Console
from mmtrain.runtime.execution.activity import FETCHING, INDEXING, Activity
from mmtrain.runtime.execution.checkpointing import checkpoint_ranks
from mmtrain.runtime.execution.recorder import StepRecorder, clock_for
from mmtrain.runtime.rendezvous import print_note
from mmtrain.runtime.resilience.config_consensus import require_consensus
from mmtrain.runtime.resilience.failures import record_early_stop, report_failures
from mmtrain.runtime.resilience.folder_lock import ELASTIC_LEASE, FolderLock
from mmtrain.runtime.resilience.signals import StopSignalListener
from mmtrain.runtime.resilience.stopped_process import killed_if_stopped
from mmtrain.runtime.resilience.watchdog import LOST_RANK_SILENCE_S, Watchdog
from mmtrain.runtime.run_owner import FolderClaim
from mmtrain.runtime.training.start_run import claim_run_folder
from mmtrain.runtime.training.stored_runs import fetch_run
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import Address, World, detect_hardware


@dataclass(frozen=True)
class RankSession:
    """What a rank keeps for a whole run, whatever its plan."""

    request: TrainRequest
    address: Address
    world: World
    patient_world: World  # for waits in which other ranks may take any time
    activity: Activity
    index: DataIndex
    console: Console
    stop: StopSignalListener
    claim: FolderClaim
    lock: FolderLock


@contextlib.contextmanager
def open_session(
    request: TrainRequest, address: Address, world: World, stop: StopSignalListener
) -> Iterator[RankSession]:
    """Take the run's folder, watch the run, and read the index of its data; all ranks call this together.

    A failure inside is reported in the run's folder. Raises RunError where ranks have other settings or data.
    """
    with world.start_watch or contextlib.nullcontext(), _open_session(request, address, world, stop) as session:
        yield session


@contextlib.contextmanager
def _open_session(
    request: TrainRequest, address: Address, world: World, stop: StopSignalListener
) -> Iterator[RankSession]:
    """See `open_session`; the watchdog takes the place of the watch over the start."""
    recipe = request.recipe
    require_consensus(world, {"recipe": recipe.model_dump(mode="json"), "torch": torch.__version__})
    request = with_common_hardware(request, world)
    if recipe.train.watchdog_s:  # which is not misled by ranks that wait for storage, as torch's timeouts would be
        world = world.waiting_for(recipe.data.storage_patience_s + 2 * recipe.train.watchdog_s)
    activity = Activity(recorder=StepRecorder(clock_for(world.device)))
    notify = partial(print, flush=True)
    lease = ELASTIC_LEASE if request.elastic else None
    # Rank 0 takes the folder for all.
    with FolderLock(request.run_dir, notify, lease, launcher=request.restarting_launcher) as lock:
        claim = world.on_first(lambda: claim_run_folder(request, lock))
        stop.last_act = partial(record_early_stop, claim, world.rank, activity)
        with (
            report_failures(claim, world.rank, activity, _hosts_to_name(address, world)),
            Watchdog(
                activity,
                recipe.train.watchdog_s,
                request.run_dir,
                world,
                may_write=claim.is_held,
                silence_limit_s=LOST_RANK_SILENCE_S if request.elastic else None,
            ),
            disk_errors_named(request.run_dir),
            killed_if_stopped(LOST_RANK_SILENCE_S) if request.elastic else contextlib.nullcontext(),
        ):
            if world.start_watch is not None:
                world.start_watch.close()
            patient_world = world.without_timeout()
            fetch_stored(request, claim, patient_world, activity)
            activity.start(INDEXING)
            index = build_index(recipe, notify=notify)  # one rank reads the data, and prints
            require_consensus(
                patient_world, {"data": {"samples": len(index.samples), "fingerprint": index.fingerprint}}
            )
            console = Console(quiet=not world.is_first)
            yield RankSession(request, address, world, patient_world, activity, index, console, stop, claim, lock)


def fetch_stored(request: TrainRequest, claim: FolderClaim, world: World, activity: Activity) -> None:
    """Fetch what a run that goes on has in its object store and not in its folder; all ranks call this together."""
    if not request.resume or request.go_back is not None or request.recipe.train.checkpoint.remote is None:
        return
    activity.start(FETCHING)
    activity.files.start()
    ranks = checkpoint_ranks(world, activity.files)
    run = SavingRun(claim.run_id, claim.require)
    fetch_run(request.recipe, request.run_dir, ranks, run, notify=print_note, progress=activity.files.advance)


def with_common_hardware(request: TrainRequest, world: World) -> TrainRequest:
    """Return the request with one hardware for all ranks: the slowest of theirs, where the recipe leaves it open.

    All ranks call this together. The first says on stderr if their GPUs are of several kinds.

    Raises:
        PlanError: the GPUs differ so much that the fast ones would wait most of the time.
    """
    if request.recipe.cluster.hardware != "auto" or world.size == 1:
        return request
    of_ranks = cast(list[tuple[str, str]], world.all_gather((request.hardware, detect_hardware(world.device))))
    first, names = of_ranks[0][0], [name for _, name in of_ranks]
    if all(is_same_hardware(name, first) for name in names):
        return replace(request, hardware=first)
    slowest = slowest_hardware(names)
    if world.is_first:
        counts = ", ".join(f"{number} x {name}" for name, number in Counter(names).items())
        print_note(
            f"the ranks have GPUs of several kinds ({counts}); all are planned as {slowest}, the slowest, and with the "
            "memory of the smallest. The others wait for it"
        )
    return replace(request, hardware=slowest, mixed_devices=True)


def _hosts_to_name(address: Address, world: World) -> list[str]:
    """Return the machine of each rank, for errors; none where our own launcher sees which rank has ended."""
    return [] if address.launcher == "mmtrain" else [str(host) for host in world.all_gather(socket.gethostname())]
