"""Launchers of whole runs: `mmtrain train` itself, torchrun's agent, and a process that stands for SLURM's step daemon.

Each is a process of its own with two ranks as its children. All are forked, so that nothing is imported again.
"""

import ctypes
import os
import pty
import select
import signal
import uuid
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.resilience.lost_output import ignore_lost_output
from mmtrain.runtime.resilience.signals import STOP_SIGNALS
from mmtrain.runtime.training.train_request import TrainRequest
from tests.distributed import fork_ranks
from tests.faults import FailInEachPhase
from tests.flow.launched import become_slurm_task, slurm_task
from tests.flow.runs import launch_here

NUM_RANKS = 2
PR_SET_PDEATHSIG = 1
Launcher = Callable[..., list[int]]


def alone(request: TrainRequest) -> list[int]:
    """Run `mmtrain train`; return its exit code."""
    [code] = fork_ranks(1, _alone, request)
    return [code]


def torchrun(request: TrainRequest, max_restarts: int = 0) -> list[int]:
    """Run torchrun's agent with `mmtrain train`; return its exit code."""
    return fork_ranks(1, _agent, _torchrun_rank, request, max_restarts)


def torchrun_command(command: Callable[[], int], max_restarts: int = 0) -> list[int]:
    """Run torchrun's agent with processes that do this and exit with what it returns; return the agent's exit code."""
    return fork_ranks(1, _agent, _torchrun_process, command, max_restarts)


def slurm(request: TrainRequest) -> list[int]:
    """Run `mmtrain train` as the tasks of a SLURM step; return their exit codes, -9 for one that was killed."""
    [codes] = fork_ranks(1, _step_daemon, request)
    return list(codes)


def slurm_command(command: Callable[[], int], num_tasks: int = NUM_RANKS) -> list[int]:
    """Run processes that do this as the tasks of a SLURM step; return their exit codes, what `command` returns."""
    [codes] = fork_ranks(1, _step_daemon_of_command, command, num_tasks)
    return list(codes)


def in_terminal(request: TrainRequest, close_when: Callable[[], bool]) -> list[int]:
    """Run `mmtrain train` in a terminal, and close that once `close_when` returns True; return the exit code."""
    return fork_ranks(1, _terminal, request, close_when)


def _alone(_rank: int, _size: int, _folder: Path, request: TrainRequest) -> int:
    return launch_here(request)[0]


def _agent(
    _rank: int, _size: int, _folder: Path, process: Callable[[Any], None], argument: object, max_restarts: int
) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    warnings.simplefilter("default")
    config = LaunchConfig(  # as `torchrun --standalone` makes it
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=NUM_RANKS,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        start_method="fork",
    )
    try:
        elastic_launch(config, process)(argument)
    except (ChildFailedError, SignalException):
        return 1
    return 0


def _torchrun_process(command: Callable[[], int]) -> None:
    """Be a process that torchrun starts, which does this."""
    _forget_agent()
    code = _exit_code(command)
    if code:
        os._exit(code)


def _forget_agent() -> None:
    """Be a fresh process: without the agent's handlers, and not ended with the agent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _torchrun_rank(request: TrainRequest) -> None:
    """Be what torchrun starts for a run."""
    _forget_agent()
    code = _exit_code(lambda: launch_here(request)[0])
    faults = request.faults
    agent_ends = isinstance(faults, FailInEachPhase) and faults.kind == "signal launcher"
    if code or agent_ends:  # without collecting the result that a function returns
        os._exit(code)


def _step_daemon(_rank: int, _size: int, folder: Path, request: TrainRequest) -> list[int]:
    port = free_port()
    return _run_tasks([partial(slurm_task, rank, NUM_RANKS, folder, request, port) for rank in range(NUM_RANKS)])


def _step_daemon_of_command(
    _rank: int, _size: int, _folder: Path, command: Callable[[], int], num_tasks: int
) -> list[int]:
    port = free_port()
    return _run_tasks([partial(_slurm_process, rank, num_tasks, port, command) for rank in range(num_tasks)])


def _slurm_process(rank: int, num_tasks: int, port: int, command: Callable[[], int]) -> int:
    """Be a task that srun starts, which does this."""
    become_slurm_task(rank, num_tasks, port)
    return command()


def _run_tasks(tasks: list[Callable[[], int]]) -> list[int]:
    """Do each in a process of its own; return their exit codes."""
    pids: list[int] = []
    for task in tasks:
        pid = os.fork()
        if not pid:
            os._exit(_exit_code(task))
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _exit_code(train: Callable[[], int]) -> int:
    """Return the exit code of a process of its own that does this."""
    try:
        return train()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1


def _terminal(_rank: int, _size: int, _folder: Path, request: TrainRequest, close_when: Callable[[], bool]) -> int:
    pid, terminal = pty.fork()  # in a session of its own, whose terminal this is
    if not pid:
        ignore_lost_output()
        os._exit(launch_here(request)[0])
    while not close_when():
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 1 << 16)  # a terminal that nobody reads from blocks its writers
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
