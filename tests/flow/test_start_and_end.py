"""Ranks that are stopped where no watchdog looks yet, or any more: as they join, compare settings, and leave."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from mmtrain.program import Action
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.run_folder import read_run_state
from mmtrain.runtime.training.train_request import TrainRequest
from tests.distributed import fork_ranks
from tests.faults import WATCHDOG_S
from tests.flow.launched import train_arguments
from tests.flow.runs import NUM_STEPS, launch, launch_here, request_for
from tests.waiting import MAX_WAIT_S

pytestmark = pytest.mark.slow  # whole runs, which wait for a watch
WATCHED = f"train.watchdog_s={WATCHDOG_S}"
# Arguments: the module and the function at which the rank is stopped, then those of `mmtrain`.
STOPPED_RANK = """
import importlib, os, runpy, signal, sys
_, name_of_module, name, *rest = sys.argv
module = importlib.import_module(name_of_module)
call = getattr(module, name)
def stopped(*arguments, **options):
    os.kill(os.getpid(), signal.SIGSTOP)
    return call(*arguments, **options)
setattr(module, name, stopped)
sys.argv = ["mmtrain", *rest]
runpy.run_module("mmtrain", run_name="__main__")
"""


def _start(data: Path, run_dir: Path, rank: int, port: int, stopped_at: tuple[str, ...]) -> "subprocess.Popen[str]":
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | variables
    package, *arguments = train_arguments(data, run_dir, "--set", WATCHED)
    start = ["-c", STOPPED_RANK, *stopped_at] if stopped_at else ["-m", package]
    return subprocess.Popen([sys.executable, *start, *arguments], env=env, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("stopped_rank", [0, 1])
@pytest.mark.parametrize(
    "stopped_at",
    [("torch.distributed", "init_process_group"), ("mmtrain.runtime.training.rank_session", "require_consensus")],
)
def test_a_rank_that_is_stopped_as_it_joins_is_named(
    data: Path, tmp_path: Path, stopped_at: tuple[str, str], stopped_rank: int
) -> None:
    port = free_port()
    ranks = [_start(data, tmp_path, rank, port, stopped_at if rank == stopped_rank else ()) for rank in range(2)]
    stopped, other = ranks[stopped_rank], ranks[1 - stopped_rank]
    try:
        _, error = other.communicate(timeout=MAX_WAIT_S)
    finally:
        stopped.kill()
        stopped.communicate()
    assert other.returncode == 1
    assert f"rank {stopped_rank} came to MASTER_ADDR:MASTER_PORT 127.0.0.1:{port}, and gave no sign of life" in error


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang() -> None:
    threading.Event().wait()


def _launch_failing_at_the_end(
    rank: int, world_size: int, _: Path, request: TrainRequest, failing_rank: int, fail: Callable[[], None]
) -> tuple[int, str]:
    """Launch a run, one rank of which fails as it leaves the group of all ranks."""
    leave_group = dist.destroy_process_group

    def failing(*group: Any) -> None:
        if not group and dist.get_world_size() > 1 and dist.get_rank() == failing_rank:
            fail()
        leave_group(*group)

    dist.destroy_process_group = failing
    return launch_here(request)


@pytest.mark.parametrize("fail", [_stop, _hang])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_run_whose_rank_does_not_leave_ends_as_finished(
    data: Path, tmp_path: Path, failing_rank: int, fail: Callable[[], None]
) -> None:
    request = request_for(data, tmp_path, WATCHED)
    [outcome] = fork_ranks(1, _launch_failing_at_the_end, request, failing_rank, fail)
    assert outcome == (0, "")
    assert read_run_state(tmp_path) == {"status": "done", "step": NUM_STEPS, "error": None}


class StopWorkerHosts(FaultPoints):
    """Stops the processes that start loader workers, in the last step."""

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        if step == NUM_STEPS - 1:
            for child in psutil.Process().children():
                if "mmtrain.data.loading.worker_process" in child.cmdline():
                    child.suspend()


def test_a_run_whose_worker_hosts_are_stopped_in_the_end_is_finished(data: Path, tmp_path: Path) -> None:
    assert launch(request_for(data, tmp_path, WATCHED, "data.workers=1"), StopWorkerHosts()) == (0, "")
    assert read_run_state(tmp_path)["status"] == "done"
