"""Runs that torchrun and SLURM start: two launchers on this machine stand for two nodes."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mmtrain.report import read_metrics
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.resilience.failures import record_early_stop
from mmtrain.runtime.resilience.folder_lock import FolderLock
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, read_run_state, write_run_state
from mmtrain.runtime.training.train_request import TrainRequest
from tests.distributed import RanksFailed, fork_ranks
from tests.faults import FailAt
from tests.flow.launched import StartedProcesses, has_ended, slurm_task, train_arguments
from tests.flow.runs import NUM_STEPS, assert_same_end, request_for, run_all
from tests.waiting import MAX_WAIT_S, poll

SBATCH = Path(__file__).parents[2] / "scripts" / "train.sbatch"


def test_slurm_tasks_stop_together_when_one_is_signalled(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path)
    stopped = replace(request, faults=FailAt(1, 2, "signal", number=signal.SIGUSR1))
    assert fork_ranks(2, slurm_task, stopped, free_port()) == [75, 75]
    assert read_run_state(tmp_path) == {"status": "stopped", "step": 3, "error": None}
    assert fork_ranks(2, slurm_task, replace(request, resume=True), free_port()) == [0, 0]
    assert read_run_state(tmp_path)["status"] == "done"


def _restarted_rank(rank: int, size: int, folder: Path, request: TrainRequest, port: int) -> int:
    """Be what torchrun starts after a failure; return the exit code."""
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": "1", "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    return slurm_task(rank, size, folder, request, port)


@pytest.mark.slow
def test_what_torchrun_restarts_goes_on_unless_it_was_stopped(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path)
    with pytest.raises(RanksFailed):
        run_all(request, request, faults=FailAt(0, 3, "kill"))
    assert fork_ranks(2, _restarted_rank, request, free_port()) == [0, 0]
    assert read_run_state(tmp_path)["status"] == "done"
    assert [s["step"] for s in read_metrics(tmp_path)] == list(range(1, NUM_STEPS + 1))
    write_run_state(tmp_path, "stopped")
    assert fork_ranks(2, _restarted_rank, request, free_port()) == [75, 75]
    with FolderLock(tmp_path) as lock:
        record_early_stop(lock.claim(), 0, Activity())
    assert fork_ranks(2, _restarted_rank, request, free_port()) == [0, 0], "torchrun stops the ranks of an attempt so"


@pytest.mark.slow
def test_a_slurm_task_that_is_killed_is_resumed_and_a_folder_in_use_is_refused(
    data: Path, unbroken: Path, tmp_path: Path
) -> None:
    request = request_for(data, tmp_path)
    with pytest.raises(RanksFailed):
        fork_ranks(2, slurm_task, replace(request, faults=FailAt(1, 3, "kill")), free_port())
    resumed = replace(request, resume=True)
    with FolderLock(tmp_path) as lock:
        lock.claim()
        assert fork_ranks(2, slurm_task, resumed, free_port()) == [2, 2]
    assert fork_ranks(2, slurm_task, resumed, free_port()) == [0, 0]
    assert_same_end(tmp_path, unbroken)


def test_our_restarts_are_refused_under_other_launchers(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, max_restarts=1)
    assert fork_ranks(1, slurm_task, request, free_port()) == [2]


class _BatchScript:
    """Runs scripts/train.sbatch with programs in place of SLURM's that note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self._calls = folder / "calls"

    def run(self, code: int, *arguments: str, srun: str = "", **env: str) -> list[str]:
        """Run the script with an srun that does `srun` and ends with `code`; return the calls."""
        for name, end in (("srun", f"{srun}\nexit {code}"), ("scontrol", "echo node1; echo node2")):
            stub = self.folder / name
            call = f"{name} $* at $MASTER_ADDR"
            stub.write_text(f'#!/bin/bash\necho "{call}" >> {self._calls}\n{end}\n')
            stub.chmod(0o755)
        variables = {
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "MASTER_ADDR": "",
        }
        command = ["bash", SBATCH, "r.yaml", self.run_dir, *arguments]
        done = subprocess.run(command, env=variables | env, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        calls = self._calls.read_text().splitlines()
        self._calls.unlink()
        return calls

    def requeues(self, code: int, restarts: int = 0, srun: str = "") -> bool:
        return self.run(code, srun=srun, SLURM_RESTART_COUNT=str(restarts))[2:] != []


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (2, False), (75, True), (138, True)])
def test_the_batch_script_requeues_a_run_that_was_stopped(tmp_path: Path, code: int, requeued: bool) -> None:
    script = _BatchScript(tmp_path)
    for resume in ("", " --resume"):
        asked, started, *rest = script.run(code, "--set", "a=1")
        assert asked.startswith("scontrol show hostnames node[1-2]")
        assert started.endswith(f"mmtrain train r.yaml --run-dir {script.run_dir}{resume} --set a=1 at node1")
        assert rest == (["scontrol requeue 7 at node1"] if requeued else [])
        script.run_dir.mkdir(exist_ok=True)
        (script.run_dir / "recipe.yaml").touch()


def test_the_batch_script_requeues_after_a_killed_task_but_not_twice_without_a_checkpoint(tmp_path: Path) -> None:
    script = _BatchScript(tmp_path)
    checkpoints = script.run_dir / CHECKPOINTS_FOLDER
    checkpoints.mkdir(parents=True)
    assert script.requeues(137)
    assert not script.requeues(137, restarts=1)
    assert script.requeues(137, restarts=1, srun=f"echo step-5 > {checkpoints}/latest")
    assert not script.requeues(137, restarts=2)
    assert script.requeues(75, restarts=9)


@pytest.mark.parametrize(
    ("env", "tasks"),
    [
        ({}, "--ntasks=2 --ntasks-per-node=1 --cpus-per-task=1"),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "64"}, "--ntasks=16 --ntasks-per-node=8 --cpus-per-task=8"),
        (
            {"SLURM_GPUS_PER_NODE": "h100:4", "SLURM_CPUS_ON_NODE": "6"},
            "--ntasks=8 --ntasks-per-node=4 --cpus-per-task=1",
        ),
        ({"SLURM_GPUS_PER_NODE": "0", "SLURM_CPUS_ON_NODE": "6"}, "--ntasks=2 --ntasks-per-node=1 --cpus-per-task=6"),
        (
            {"SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "64"},
            "--ntasks=4 --ntasks-per-node=2 --cpus-per-task=3",
        ),
        ({"RANKS_PER_NODE": "3", "SLURM_NTASKS_PER_NODE": "2"}, "--ntasks=6 --ntasks-per-node=3 --cpus-per-task=1"),
    ],
)
def test_the_batch_script_starts_a_task_for_each_gpu_with_its_share_of_the_cores(
    tmp_path: Path, env: dict[str, str], tasks: str
) -> None:
    _, started = _BatchScript(tmp_path).run(0, **env)
    assert f" {tasks} mmtrain train" in started


def test_the_batch_script_puts_the_number_in_an_array_where_it_is_asked_for(tmp_path: Path) -> None:
    script = _BatchScript(tmp_path)
    assert script.run(0, "--set", "train.seed=%a", SLURM_ARRAY_TASK_ID="3")[1].endswith(" train.seed=3 at node1")
    assert script.run(0, "--set", "train.seed=%a")[1].endswith(" train.seed=%a at node1")


def _torchrun(data: Path, run_dir: Path, *options: str) -> StartedProcesses:
    """Two agents, one rank each, that stand for two nodes."""
    port = free_port()
    meet = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    mine = ["-m", *train_arguments(data, run_dir, *options)]
    return StartedProcesses(*([*meet, f"--master-port={port}", f"--node-rank={rank}", *mine] for rank in range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_two_torchrun_nodes_stop_when_one_is_signalled_and_go_on_later(
    data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with _torchrun(data, tmp_path, "--set", "train.steps=2000", "--set", "train.checkpoint.every=0") as nodes:
        poll(lambda: len(read_metrics(tmp_path)) >= 2)
        ranks = nodes.offspring()
        nodes.processes[1].send_signal(number)
        assert all(nodes.wait()), "torchrun counts ranks that stopped as failed"
        assert psutil.wait_procs(ranks, MAX_WAIT_S)[1] == []
    state = read_run_state(tmp_path)
    assert state["status"] == "stopped"
    assert len(read_metrics(tmp_path)) == state["step"] < 2000
    with _torchrun(data, tmp_path, "--set", f"train.steps={state['step'] + 2}", "--resume") as nodes:
        assert nodes.wait() == [0, 0]
    assert read_run_state(tmp_path) == {"status": "done", "step": state["step"] + 2, "error": None}
    assert [s["step"] for s in read_metrics(tmp_path)] == list(range(1, state["step"] + 3))


@pytest.mark.slow
def test_torchrun_restarts_a_run_from_its_newest_checkpoint(data: Path, tmp_path: Path) -> None:
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m"]
    with StartedProcesses([*command, *train_arguments(data, tmp_path, "--set", "train.steps=40")]) as started:
        poll(lambda: any((tmp_path / CHECKPOINTS_FOLDER).glob("step-*")))
        started.offspring()[0].kill()
        assert started.wait() == [0]
    assert read_run_state(tmp_path) == {"status": "done", "step": 40, "error": None}
    assert [s["step"] for s in read_metrics(tmp_path)] == list(range(1, 41))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_no_process_is_left_after_the_save(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    with StartedProcesses(
        train_arguments(data, tmp_path, "--set", "train.steps=2000", "--set", "train.checkpoint.every=0")
    ) as started:
        poll(lambda: len(read_metrics(tmp_path)) >= 2)
        ranks = started.offspring()
        assert len(ranks) >= 2
        started.processes[0].send_signal(number)
        assert started.wait() == [75]
        assert psutil.wait_procs(ranks, MAX_WAIT_S)[1] == []
    assert read_run_state(tmp_path)["status"] == "stopped"


@pytest.mark.slow
def test_a_closed_terminal_saves(data: Path, tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", *train_arguments(data, tmp_path, "--set", "train.steps=2000")]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    # A session of its own, whose terminal is the one that is closed below.
    session = (
        f"import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, {command})"
    )
    with psutil.Popen(
        [sys.executable, "-c", session], stdin=end, stdout=end, stderr=end, env=env, start_new_session=True
    ) as run:
        os.close(end)
        os.set_blocking(terminal, False)

        def has_trained() -> bool:
            with contextlib.suppress(BlockingIOError):
                os.read(terminal, 1 << 16)  # a terminal that nobody reads from blocks its writers
            return len(read_metrics(tmp_path)) >= 2

        poll(has_trained)
        os.close(terminal)
        assert run.wait(MAX_WAIT_S) == 75
    state = read_run_state(tmp_path)
    assert state["status"] == "stopped"
    assert len(read_metrics(tmp_path)) == state["step"] < 2000


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_ranks_of_a_torchrun_agent_that_was_ended_save_and_stop(
    data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    with StartedProcesses([*command, *train_arguments(data, tmp_path, "--set", "train.steps=2000")]) as started:
        poll(lambda: len(read_metrics(tmp_path)) >= 2)
        ranks = started.offspring()
        started.processes[0].send_signal(number)
        poll(lambda: all(has_ended(process) for process in ranks))
    state = read_run_state(tmp_path)
    assert state["status"] == "stopped"
    assert len(read_metrics(tmp_path)) == state["step"] < 2000
    with StartedProcesses(
        [*command, *train_arguments(data, tmp_path, "--set", f"train.steps={state['step'] + 2}", "--resume")]
    ) as again:
        assert again.wait() == [0]
    assert read_run_state(tmp_path) == {"status": "done", "step": state["step"] + 2, "error": None}


@pytest.mark.slow
def test_a_slurm_task_whose_step_daemon_is_gone_saves_and_stops(data: Path, tmp_path: Path) -> None:
    settings = ["--set", "train.steps=2000", "--set", "parallel.placement=unified"]
    task = [sys.executable, "-m", *train_arguments(data, tmp_path, *settings)]
    variables = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "localhost"}
    env = os.environ | variables | {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    daemon = psutil.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({task})"], env=env)
    try:
        poll(lambda: len(read_metrics(tmp_path)) >= 2)
        [rank, *_] = daemon.children(recursive=True)
        daemon.kill()
        poll(lambda: has_ended(rank))
    finally:
        daemon.kill()
        daemon.wait()
    assert read_run_state(tmp_path)["status"] == "stopped"
