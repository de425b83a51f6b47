"""Processes that torchrun, SLURM or a user would start, on this machine."""

import contextlib
import os
import sys
from pathlib import Path

import psutil

from mmtrain.errors import MmtrainError
from mmtrain.runtime.training.train import start_training
from mmtrain.runtime.training.train_request import TrainRequest
from tests.flow.runs import RECIPE, SMALL
from tests.waiting import MAX_WAIT_S


def become_slurm_task(rank: int, size: int, port: int) -> None:
    """Set the variables by which srun tells a task its place."""
    os.environ |= {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def slurm_task(rank: int, size: int, _: Path, request: TrainRequest, port: int) -> int:
    """Be what srun starts as one task; return the exit code."""
    become_slurm_task(rank, size, port)
    try:
        start_training(request)
    except MmtrainError as e:
        return e.exit_code
    return 0


def train_arguments(data: Path, run_dir: Path, *options: str) -> list[str]:
    """Arguments of `python -m` that train the small demo."""
    settings = [
        *SMALL,
        f"data.sources.0.path={data}/train.json",
        f"data.validation.0.path={data}/heldout.json",
        f"data.tokenizer={data}/tokenizer.json",
    ]
    changes = (part for setting in settings for part in ("--set", setting))
    return ["mmtrain", "train", str(RECIPE), "--run-dir", str(run_dir), *changes, *options]


class StartedProcesses:
    """Processes with these arguments of `python -m`, and none of their offspring left behind."""

    def __init__(self, *arguments: list[str], **variables: str) -> None:
        self.env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}
        self.env |= variables
        self.processes: list[psutil.Popen] = []
        for one_process in arguments:
            self.start(one_process)

    def start(self, arguments: list[str]) -> None:
        self.processes.append(psutil.Popen([sys.executable, "-m", *arguments], env=self.env))

    def __enter__(self) -> "StartedProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.offspring(), *self.processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self.processes:
            process.wait()

    def offspring(self) -> list[psutil.Process]:
        return [child for p in self.processes if p.poll() is None for child in p.children(recursive=True)]

    def wait(self) -> list[int]:
        return [process.wait(MAX_WAIT_S) for process in self.processes]


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended; in a container nobody may collect what an orphan leaves."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
