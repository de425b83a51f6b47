"""Start the ranks of a run on this machine, and start them again after a failure: with fewer if some are gone."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from mmtrain.checkpoint import find
from mmtrain.errors import RankDied, RunError
from mmtrain.runtime.resilience.failures import explain_failures, read_failures
from mmtrain.runtime.resilience.folder_lock import FolderKeeper, may_be_owned
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, RECIPE_FILE, RUN_STATE_FILE, read_run_state, write_run_state
from mmtrain.runtime.training.standby_plans import standby_plan_path
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import Address
from mmtrain.system_errors import describe_os_error

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
ROOM_PATIENCE_S = 3600.0  # with a disk that is full, before the launcher gives up
ROOM_POLL_S = 5.0
MORE_FOR_RANK_0_S = 3.0  # than it waits for the others at the end of a run, before it names those that do not come
DEVICE_TEST_TIMEOUT_S = 60.0  # importing torch and creating a context takes seconds; a broken device may hang
# Memory, a kernel and a copy back: what a device that has fallen off the bus, or needs a reset, does not do.
# No assert: PYTHONOPTIMIZE would strip it.
DEVICE_TEST = "import sys, torch; sys.exit(torch.ones(1 << 20, device='cuda').sum().item() != 1 << 20)"


def launch_with_restarts(request: TrainRequest, train_rank: Callable[[TrainRequest, Address], None]) -> None:
    """Start the ranks; after a failure start them again from the newest good checkpoint, as often as allowed.

    No other run can take the folder between two starts.
    """
    with FolderKeeper(request.run_dir) as keeper:
        if request.max_restarts:
            request = replace(request, restarting_launcher=keeper.identity)
        _launch(request, train_rank)


def _launch(request: TrainRequest, train_rank: Callable[[TrainRequest, Address], None]) -> None:
    # The ranks refuse a folder with checkpoints of another run; a restart must not turn that into resuming it.
    holds_other_run = not request.resume and bool(find(request.run_dir / CHECKPOINTS_FOLDER))
    num_restarts_left = 0 if holds_other_run else request.max_restarts
    losses = LossMonitor(request.ranks, given_devices() if request.elastic else ())
    while True:
        try:
            watchdog_s = request.recipe.train.watchdog_s
            end_limit_s = watchdog_s + MORE_FOR_RANK_0_S if watchdog_s else None
            return launch_local(request.ranks, partial(train_rank, request), True, end_limit_s)
        except RunError as launch_error:
            error = _root_cause(request, launch_error)
            num_usable = request.ranks
            if request.elastic:
                num_usable = losses.count_usable(request.ranks, launch_error, _num_saved_steps(request))
        if not num_restarts_left or not num_usable or not (request.run_dir / RECIPE_FILE).exists():
            raise error
        num_restarts_left -= 1
        if not await_room(request.run_dir, str(error)):
            raise error
        print(
            f"mmtrain: {error}\nmmtrain: starting again, {num_restarts_left} restarts left after this", file=sys.stderr
        )
        if num_usable != request.ranks:
            num_ranks = _planned_ranks(request, num_usable)
            ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
            print(f"mmtrain: {losses.reason}: starting {ranks} instead of {request.ranks}", file=sys.stderr)
            request = replace(request, ranks=num_ranks)
        request = replace(request, resume=True, go_back=None, force_unlock=False)


@dataclass
class LossMonitor:
    """Decides how many ranks can be started after a failure, of `num_ranks` at most.

    A GPU is tried out, so that one that has recovered is used again. On CPU nothing can be tried out: a rank counts as
    gone if it was the first to die in two starts in a row, with no checkpoint in between, and without a word both
    times; a rank that raises an error is wrong and not gone.
    """

    num_ranks: int
    devices: tuple[str, ...]  # GPUs that the run was given; none on CPU
    reason: str = ""  # why there are other ranks than before
    _last_death: tuple[int, int] | None = None  # rank, and steps that were saved

    def count_usable(self, num_started: int, error: RunError, num_saved_steps: int) -> int:
        """Return with how many ranks to start again after `error` ended `num_started` ranks; 0 if none is left."""
        if self.devices:
            usable = find_usable_devices(self.devices)
            os.environ[VISIBLE_DEVICES] = ",".join(usable)  # of the ranks that are started from now on
            self.reason = f"{len(usable)} of {len(self.devices)} GPUs can be used"
            return min(len(usable), self.num_ranks)
        death = (error.rank, num_saved_steps) if isinstance(error, RankDied) else None
        is_gone = death is not None and death == self._last_death
        self._last_death = None if is_gone else death
        if death is None or not is_gone:
            return num_started
        self.reason = f"rank {death[0]} died again before the next checkpoint and counts as gone for good"
        return num_started - 1


def _planned_ranks(request: TrainRequest, num_usable: int) -> int:
    """Return the largest number of usable ranks for which a plan was made ahead; all of them where there is none."""
    counts = range(num_usable, 0, -1)
    return next((count for count in counts if standby_plan_path(request.run_dir, count).exists()), num_usable)


def _num_saved_steps(request: TrainRequest) -> int:
    """Return the steps that a restart would not repeat."""
    steps: int = read_run_state(request.run_dir).get("step", 0)
    return steps


def _root_cause(request: TrainRequest, error: RunError) -> RunError:
    """Return what the ranks reported of a run that hung, else what the launcher saw; write it to the run's state.

    All our ranks have ended. A run that owns the folder now is another one, which wrote what lies there.
    """
    if may_be_owned(request.run_dir):
        return error
    failures = read_failures(request.run_dir)
    if any(f.kind == "hang" for f in failures):
        error = RunError(explain_failures(failures, request.ranks))
    if read_run_state(request.run_dir).get("status") in ("running", "failed"):
        with contextlib.suppress(OSError):  # a full disk must hide neither the failure nor the restart that is due
            write_run_state(request.run_dir, "failed", error=str(error))
    return error


def await_room(
    run_dir: Path,
    error: str,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait until the run's folder can be written, as a restart must; return whether it can.

    `error` is what ended the run. It is written to the run's state. A disk that is full would else use up all restarts
    in seconds.
    """
    if may_be_owned(run_dir):  # by another run: the ranks will say so
        return True
    start_s = clock()
    is_waiting = False
    while True:
        try:
            write_run_state(run_dir, "failed", error=error)
        except OSError as full:
            if clock() - start_s >= ROOM_PATIENCE_S:
                return False
            if not is_waiting:
                why = describe_os_error(full, run_dir / RUN_STATE_FILE)
                print(
                    f"mmtrain: {error}\nmmtrain: {why}. The ranks are started again once that works, if it does within "
                    f"{ROOM_PATIENCE_S:g} s",
                    file=sys.stderr,
                )
                is_waiting = True
            sleep(ROOM_POLL_S)
        else:
            return True


def given_devices(env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them; empty without GPUs."""
    if not torch.cuda.is_available():
        return ()
    names = env.get(VISIBLE_DEVICES)
    return tuple(map(str, range(torch.cuda.device_count()))) if names is None else tuple(names.split(","))


def find_usable_devices(names: Sequence[str], device_test: str = DEVICE_TEST) -> tuple[str, ...]:
    """Try out each GPU in a process of its own and return those that work, in the same order.

    A broken device can hang or end the process that uses it, and the launcher must keep no device in use.
    """
    tests = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", device_test],
            env=os.environ | {VISIBLE_DEVICES: name},
            stderr=subprocess.DEVNULL,  # a traceback for each broken device would hide the failure of the run
        )
        for name in names
    ]
    return tuple(name for name, test in zip(names, tests, strict=True) if _succeeds(test))


def _succeeds(test: "subprocess.Popen[bytes]") -> bool:
    try:
        return test.wait(DEVICE_TEST_TIMEOUT_S) == 0
    except subprocess.TimeoutExpired:
        test.kill()  # not waited for: a process that hangs in a driver does not end before the driver answers
        return False
