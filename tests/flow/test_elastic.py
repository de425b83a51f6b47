"""Runs that lose ranks for good and go on with those that are left, and grow again."""

import contextlib
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from mmtrain.checkpoint import find, latest, open_newest_good
from mmtrain.planning.artifact.plan_files import load_plan
from mmtrain.program import Action
from mmtrain.report import read_metrics
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, PLAN_FILE, read_run_state
from mmtrain.runtime.training.background_call import CALL_PROCESS_MODULE
from mmtrain.runtime.training.go_back import GoBack
from mmtrain.runtime.training.standby_plans import standby_plan_path
from mmtrain.runtime.training.train_request import TrainRequest
from tests.distributed import fork_ranks
from tests.faults import FailAt
from tests.flow.launched import StartedProcesses, slurm_task, train_arguments
from tests.flow.runs import SHARDED, assert_same_end, launch, launch_here, refuse, request_for, tensors
from tests.waiting import poll

NUM_STEPS = 16
SETTINGS = (f"train.steps={NUM_STEPS}", "train.checkpoint.every=2", "train.checkpoint.async_save=false")


class RankIsGone(FaultPoints):
    """Kills one rank in every start with more than `num_left` ranks.

    It does so once there are a plan for one rank fewer and a checkpoint of these ranks, so that their steps remain.
    """

    def __init__(self, rank: int, num_left: int, run_dir: Path) -> None:
        self.rank, self.num_left, self.run_dir = rank, num_left, run_dir

    def start(self, rank: int) -> None:
        """See `FaultPoints`."""
        self.is_here = rank == self.rank
        self.last_step: int | None = None

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        if not self.is_here or dist.get_world_size() <= self.num_left or step == self.last_step:
            return
        self.last_step = step
        if standby_plan_path(self.run_dir, dist.get_world_size() - 1).exists():
            if _num_ranks_of_newest_checkpoint(self.run_dir) == dist.get_world_size():
                os.kill(os.getpid(), signal.SIGKILL)
            return
        poll(lambda: not _is_planning(os.getppid()))  # rank 0 takes up the plan after this step


def _num_ranks_of_newest_checkpoint(run_dir: Path) -> int | None:
    """Return how many ranks wrote the newest checkpoint; None before the first."""
    newest = latest(run_dir / CHECKPOINTS_FOLDER)
    if newest is None:
        return None
    return len(list(newest.glob("rank-*.json")))


def _is_planning(launcher_pid: int) -> bool:
    """Return whether a rank of this launcher makes a plan in the background."""
    for process in psutil.Process(launcher_pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if CALL_PROCESS_MODULE in process.cmdline():
                return True
    return False


def _launch_printing(rank: int, size: int, folder: Path, request: TrainRequest, output: Path) -> tuple[int, str]:
    """Launch with the output of all processes in a file."""
    number = os.open(output, os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(number, stream)
    return launch_here(request)


@pytest.fixture(scope="module")
def unbroken_three(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "three"
    assert launch(request_for(data, run_dir, *SETTINGS, ranks=3)) == (0, "")
    return run_dir


def assert_same_course(run_dir: Path, reference: Path) -> None:
    """Assert that two runs trained the same, whatever their plans were: to the rounding of fp32."""
    losses, expected = ([step["loss"] for step in read_metrics(run)] for run in (run_dir, reference))
    assert losses == pytest.approx(expected, rel=1e-5)
    checkpoint, end = (open_newest_good(run / CHECKPOINTS_FOLDER, refuse) for run in (run_dir, reference))
    weights, expected_weights = (_flat(tensors(opened)) for opened in (checkpoint, end))
    difference = torch.linalg.vector_norm(weights - expected_weights) / torch.linalg.vector_norm(expected_weights)
    # AdamW divides gradients that are nothing but rounding (as those of the keys' biases) by their own size.
    assert float(difference) < 1e-4


def _flat(named: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([named[name].flatten().double() for name in sorted(named) if "#" not in name])


def ranks_of_steps(run_dir: Path) -> list[int]:
    steps: list[dict[str, Any]] = read_metrics(run_dir)
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    return [step["ranks"] for step in steps]


@pytest.mark.slow
def test_a_run_goes_on_without_ranks_that_are_gone_for_good(data: Path, unbroken_three: Path, tmp_path: Path) -> None:
    changes = (*SETTINGS, "parallel.placement=auto")
    request = request_for(data, tmp_path, *changes, ranks=3, max_restarts=4, elastic=True)
    [outcome] = fork_ranks(1, _launch_printing, replace(request, faults=RankIsGone(1, 1, tmp_path)), tmp_path / "text")
    assert outcome == (0, "")
    ranks = ranks_of_steps(tmp_path)
    assert ranks == sorted(ranks, reverse=True)
    assert set(ranks) == {3, 2, 1}
    plans = {num_ranks: load_plan(standby_plan_path(tmp_path, num_ranks)) for num_ranks in (3, 2, 1)}
    assert load_plan(tmp_path / PLAN_FILE) == plans[1]
    assert plans[3].placement != plans[2].placement, "another plan, and not only fewer replicas"
    assert_same_course(tmp_path, unbroken_three)
    assert read_run_state(tmp_path) == {"status": "done", "step": NUM_STEPS, "error": None}
    printed = (tmp_path / "text").read_text(encoding="utf-8")
    assert "a plan for 2 ranks is ready" in printed
    assert "rank 1 died again before the next checkpoint and counts as gone for good: starting 2 ranks" in printed
    assert "ranks: 3 -> 2" in printed
    assert [step["ranks"] for step in read_metrics(tmp_path) if "resume_s" in step] == [2, 1]


@pytest.mark.slow
def test_a_run_that_keeps_gathered_weights_goes_on_with_fewer_ranks(
    data: Path, unbroken_three: Path, tmp_path: Path
) -> None:
    changes = (*SETTINGS, *SHARDED, "parallel.zero=2")
    request = request_for(data, tmp_path, *changes, ranks=2, max_restarts=4, elastic=True)
    assert launch(request, faults=RankIsGone(1, 1, tmp_path)) == (0, "")
    assert set(ranks_of_steps(tmp_path)) == {2, 1}
    for num_ranks in (2, 1):
        chosen = load_plan(standby_plan_path(tmp_path, num_ranks))
        assert (chosen.placement, chosen.shard, chosen.keeps_weights) == ("replicated", num_ranks, True)
    assert_same_course(tmp_path, unbroken_three)


# More steps than any machine takes before the plan for two ranks is there, which is made at a low priority beside them.
SLOW_STEPS = ("train.global_batch=32", "train.optimizer.lr=1e-5", "train.steps=20000", "train.checkpoint.every=5")


def _agent(port: int, data: Path, run_dir: Path) -> list[str]:
    """Arguments of torchrun's agent on one of two or three nodes."""
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic"]
    # Agents give a node up after ten seconds: a busy machine may keep one from its sign of life for two or three.
    short = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=5"
    torchrun = ["torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", *meet, short, "--max-restarts=5"]
    changes = (part for setting in SLOW_STEPS for part in ("--set", setting))
    return [*torchrun, "-m", *train_arguments(data, run_dir, *changes, "--elastic")]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lost", [pytest.param("agent", marks=pytest.mark.long), "node"])
def test_a_run_under_torchrun_shrinks_when_a_node_is_gone_and_grows_when_one_comes(
    data: Path, tmp_path: Path, lost: str
) -> None:
    run_dir, port = tmp_path / "run", free_port()

    def trains_on(num_ranks: int) -> bool:
        newest = [step.get("ranks") for step in read_metrics(run_dir)][-3:]
        return newest == [num_ranks] * 3

    def restarts() -> list[int]:
        return [step["ranks"] for step in read_metrics(run_dir) if "resume_s" in step]

    def has_checkpoint() -> bool:
        return bool(find(run_dir / CHECKPOINTS_FOLDER))

    with StartedProcesses(_agent(port, data, run_dir), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as nodes:
        poll(lambda: has_listener(port))  # the first agent holds the rendezvous, and stays
        nodes.start(_agent(port, data, run_dir))
        nodes.start(_agent(port, data, run_dir))
        poll(lambda: trains_on(3) and standby_plan_path(run_dir, 2).exists() and has_checkpoint())
        restarts_before = restarts()  # the run may have started on two nodes, if the third came late
        gone = nodes.processes[2]
        for process in [gone, *(gone.children() if lost == "node" else ())]:
            process.kill()
        poll(lambda: trains_on(2))
        nodes.start(_agent(port, data, run_dir))
        poll(lambda: trains_on(3))
        for number in (0, 1, 3):
            nodes.processes[number].send_signal(signal.SIGTERM)
        nodes.wait()
    assert load_plan(run_dir / PLAN_FILE) == load_plan(standby_plan_path(run_dir, 3))
    steps = read_metrics(run_dir)
    assert read_run_state(run_dir)["status"] == "stopped"
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert restarts() == [*restarts_before, 2, 3]
    reference = request_for(data, tmp_path / "unbroken", *SLOW_STEPS)
    stopped_there = replace(reference, faults=FailAt(0, len(steps) - 1, "signal"))
    [(code, _)] = fork_ranks(1, _launch_printing, stopped_there, tmp_path / "text")
    assert code == 75
    expected = [step["loss"] for step in read_metrics(tmp_path / "unbroken")]
    assert [step["loss"] for step in steps] == pytest.approx(expected, rel=1e-5)


def has_listener(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _refused_by_torchrun(rank: int, size: int, folder: Path, request: TrainRequest, store_of_agent: str) -> str:
    """Be a rank that torchrun starts; return the error."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": store_of_agent}
    return launch_here(request)[1]


def test_what_an_elastic_run_cannot_do_under_torchrun_is_refused(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, elastic=True)
    [message] = fork_ranks(1, _refused_by_torchrun, request, "True")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in message
    [message] = fork_ranks(1, _refused_by_torchrun, replace(request, go_back=GoBack(4)), "False")
    assert message.startswith("--resume-from: with --elastic")


@pytest.mark.slow
def test_a_requeued_slurm_job_may_have_fewer_or_more_tasks(data: Path, unbroken: Path, tmp_path: Path) -> None:
    # The number of ranks that a recipe names binds a run that is not elastic.
    request = request_for(data, tmp_path, "cluster.ranks=3", elastic=True)
    resumed = replace(request, resume=True)
    starts = [
        (3, replace(request, faults=FailAt(1, 1, "signal")), 75),
        (2, replace(resumed, faults=FailAt(1, 3, "signal")), 75),
        (3, resumed, 0),
    ]
    for num_tasks, one_start, code in starts:
        assert fork_ranks(num_tasks, slurm_task, one_start, free_port()) == [code] * num_tasks
    steps = read_metrics(tmp_path)
    assert [step["ranks"] for step in steps] == [3, 3, 2, 2, 3, 3]
    assert [step["loss"] for step in steps] == pytest.approx([s["loss"] for s in read_metrics(unbroken)], rel=1e-5)
    assert fork_ranks(2, slurm_task, replace(resumed, elastic=False), free_port()) == [2, 2]


@pytest.mark.slow
def test_a_rank_that_vanishes_without_a_word_is_noticed_long_before_a_hang(
    data: Path, unbroken: Path, tmp_path: Path
) -> None:
    # Stopped, its connections stay open: so a lost node looks from afar on a network that does not report it.
    fault = FailAt(1, 3, "stop", once=tmp_path / "once")
    request = request_for(data, tmp_path / "run", "train.watchdog_s=500", elastic=True, max_restarts=1)
    assert launch(request, fault) == (0, ""), "within the time of a test, which is far below train.watchdog_s"
    assert_same_end(tmp_path / "run", unbroken)
