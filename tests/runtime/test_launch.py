import gc
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from mmtrain.errors import LaunchError, MmtrainError, PlanError, StoppedAndSaved
from mmtrain.models.megatron import ParallelGroups
from mmtrain.runtime.resilience.launch import _first_failure, _RankExit, free_port, launch_local
from mmtrain.runtime.world import Address, join, leave
from tests.distributed import fork_ranks


def _sum_of_ranks(address: Address) -> None:
    world = join(address)
    assert world.all_gather(world.rank) == [0, 1, 2]
    leave()


def _rank_one_is_wrong(address: Address) -> None:
    join(address)
    if address.rank == 1:
        raise PlanError("plan.units.llm.tp: 3 found")
    dist.barrier()  # rank 0 waits for a peer that has failed


def _rank_one_is_killed(address: Address) -> None:
    join(address)
    if address.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _interrupts_twice(address: Address) -> None:
    """Send the launcher two interrupts; ranks hold signals back until a run listens, so they can be waited for."""
    if address.rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
        signal.sigwait({signal.SIGTERM})
        os.kill(os.getppid(), signal.SIGINT)
    threading.Event().wait()


def _stops_when_asked(address: Address) -> None:
    if address.rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    signal.sigwait({signal.SIGTERM})
    raise StoppedAndSaved("saved")


def _launch(
    _rank: int, _size: int, _folder: Path, num_ranks: int, target: Callable[[Address], None], saves_on_stop: bool
) -> str:
    try:
        launch_local(num_ranks, target, saves_on_stop)
    except MmtrainError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def _outcome(num_ranks: int, target: Callable[[Address], None], saves_on_stop: bool = True) -> str:
    """Launch from a fresh process: one that has run a backward, as pytest's own may have, cannot be forked."""
    [outcome] = fork_ranks(1, _launch, num_ranks, target, saves_on_stop)
    return str(outcome)


def test_ranks_meet() -> None:
    assert _outcome(3, _sum_of_ranks) == ""


def _leave_a_group_to_the_collector(rank: int, size: int, folder: Path) -> str:
    join(Address(0, 1, 0, "127.0.0.1", free_port(), "before"))
    left_over: list[object] = [dist.new_group([0])]
    left_over.append(left_over)  # a cycle: only the collector frees it
    leave()
    gc.disable()
    del left_over
    try:
        return _launch(rank, size, folder, 2, _collects, True)
    finally:
        gc.enable()


def _collects(address: Address) -> None:
    gc.collect()


def _compute_alone_before_each_launch(rank: int, size: int, folder: Path) -> list[str]:
    outcomes = []
    for _ in range(2):
        ParallelGroups.single()  # as `chat` does, and `evaluate` with one rank
        outcomes.append(_launch(rank, size, folder, 3, _sum_of_ranks, True))
    return outcomes


def test_ranks_meet_after_their_launcher_has_computed_a_model_alone() -> None:
    assert fork_ranks(1, _compute_alone_before_each_launch) == [["", ""]]


def test_ranks_meet_at_a_port_that_no_connection_is_given() -> None:
    ports = {free_port() for _ in range(20)}
    lines = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first_of_connections = int(lines.read_text(encoding="utf-8").split()[0]) if lines.exists() else 49_152
    assert max(ports) < first_of_connections
    assert len(ports) > 1, "two runs that start together would meet"


def test_no_free_port_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr("mmtrain.runtime.resilience.launch._PORTS", range(port, port + 1))
        monkeypatch.setattr("mmtrain.runtime.resilience.launch._MAX_PORTS_TRIED", 1)
        with pytest.raises(LaunchError, match=f"1 of the ports {port} to {port} are taken"):
            free_port()


def test_ranks_do_not_collect_a_process_group_of_the_launcher() -> None:
    assert fork_ranks(1, _leave_a_group_to_the_collector) == [""]


def test_the_first_failure_is_raised_and_the_others_are_ended() -> None:
    assert _outcome(2, _rank_one_is_wrong).startswith("UserError: plan.units.llm.tp: 3 found")


def test_a_second_interrupt_ends_all_ranks_at_once() -> None:
    assert _outcome(2, _interrupts_twice) == "RunError: interrupted twice: all ranks were ended without saving"


def test_a_signal_is_passed_on_and_every_rank_may_finish() -> None:
    assert _outcome(3, _stops_when_asked) == "StoppedAndSaved: saved"


def test_a_rank_that_torch_ended_did_not_fail_first() -> None:
    """NCCL's watchdog ends the peers of a rank that failed by SIGABRT."""
    aborted = _RankExit(0, -signal.SIGABRT, "rank 0 was killed by SIGABRT", secondary=True)
    failed = _RankExit(1, 1, "rank 1 failed: ValueError: x", secondary=False)
    killed = _RankExit(2, -signal.SIGKILL, "rank 2 was killed by SIGKILL", secondary=False)
    assert str(_first_failure([aborted, failed])) == "rank 1 failed: ValueError: x; secondary: rank 0 lost a peer"
    assert str(_first_failure([aborted, failed, killed])).startswith("rank 2 was killed by SIGKILL")
    assert str(_first_failure([aborted])) == "rank 0 was killed by SIGABRT"


def test_ranks_that_lost_one_that_a_signal_stopped_have_not_failed() -> None:
    lost = _RankExit(0, 1, "rank 0 failed: RuntimeError: Connection closed by peer", True)
    stopped = _RankExit(1, 75, "stopped by a signal before the first step", False)
    wrong = _RankExit(2, 1, "rank 2 failed: ValueError: x", False)
    assert isinstance(_first_failure([lost, stopped]), StoppedAndSaved)
    assert str(_first_failure([lost, stopped])) == stopped.message
    assert str(_first_failure([lost, stopped, wrong])).startswith("rank 2 failed: ValueError: x")


def test_a_killed_rank_is_named() -> None:
    assert "RankDied: rank 1 was killed by SIGKILL" in _outcome(2, _rank_one_is_killed)


def test_ranks_that_have_nothing_to_save_end_at_once() -> None:
    assert _outcome(2, _stops_when_asked, saves_on_stop=False) == "EndedBySignal: ended by SIGTERM"


def _hangs_up(address: Address) -> None:
    if address.rank == 0:
        os.kill(os.getpid(), signal.SIGHUP)
    raise StoppedAndSaved(f"rank {address.rank} goes on")


def _launch_under_nohup(rank: int, size: int, folder: Path) -> str:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return _launch(rank, size, folder, 1, _hangs_up, True)


def test_what_nohup_ignores_stays_ignored_in_the_ranks() -> None:
    assert fork_ranks(1, _launch_under_nohup) == ["StoppedAndSaved: rank 0 goes on"]
