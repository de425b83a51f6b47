"""Ranks that wait for others hear signals, and ranks of our own ignore what other launchers have left."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mmtrain.runtime.resilience.launch import free_port
from tests.flow.launched import train_arguments
from tests.waiting import MAX_WAIT_S, poll

DEMO_RECIPE = str(Path(__file__).parents[2] / "recipes" / "demo.yaml")
pytestmark = pytest.mark.slow  # each imports torch in a process of its own


def _start(data: Path, run_dir: Path, **variables: str) -> "subprocess.Popen[str]":
    return _start_command(train_arguments(data, run_dir), variables)


def _start_command(arguments: list[str], variables: dict[str, str]) -> "subprocess.Popen[str]":
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen([sys.executable, "-m", *arguments], env=env, stderr=subprocess.PIPE, text=True)


def _is_listening(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_first_rank_that_waits_for_others(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    port = free_port()
    with _start(data, tmp_path, RANK="0", WORLD_SIZE="2", MASTER_PORT=str(port)) as rank:
        poll(lambda: _is_listening(port))
        rank.send_signal(number)
        assert rank.wait(MAX_WAIT_S) == 75
        assert rank.stderr is not None
        first, *_, last = rank.stderr.read().splitlines()
    assert re.search(rf"2 ranks, .*RANK=0, WORLD_SIZE=2, no MASTER_ADDR, MASTER_PORT={port}", first)
    assert last.startswith(f"mmtrain: stopped by {number.name} before the first step")


def test_a_signal_ends_a_rank_that_waits_for_the_first_in_cpp(data: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # which never says what a store would
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(listener.getsockname()[1])}
        with _start(data, tmp_path, **variables) as rank:
            connections = [listener.accept()[0] for _ in range(2)]  # a probe, and torch's store
            rank.send_signal(signal.SIGTERM)
            assert rank.wait(MAX_WAIT_S) == 75
            for connection in connections:
                connection.close()


def test_our_own_ranks_ignore_what_other_launchers_left(data: Path, tmp_path: Path) -> None:
    left = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "RANK": "5",  # without WORLD_SIZE
        "LOCAL_RANK": "5",
        "MASTER_ADDR": "no.such.host.invalid",
        "MASTER_PORT": "1",
    }
    with _start(data, tmp_path, **left) as run:
        _, error = run.communicate(timeout=MAX_WAIT_S)
    assert run.returncode == 0, error


def test_evaluate_starts_its_ranks_where_variables_name_one_process(data: Path, tmp_path: Path) -> None:
    with _start(data, tmp_path) as run:
        _, error = run.communicate(timeout=MAX_WAIT_S)
        assert run.returncode == 0, error
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "mmtrain", "evaluate", str(tmp_path), "--ranks", "2", "--limit", "2"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "starting 2 ranks here, though RANK=0, WORLD_SIZE=1" in done.stderr


def test_a_rank_whose_first_rank_leaves_says_so_in_one_line(data: Path, tmp_path: Path) -> None:
    port = str(free_port())
    with (
        _start(data, tmp_path, RANK="0", WORLD_SIZE="3", MASTER_PORT=port) as first,
        _start(data, tmp_path, RANK="1", WORLD_SIZE="3", MASTER_PORT=port) as second,
    ):
        poll(lambda: _num_connections(second.pid, int(port)) > 0)
        first.kill()
        _, error = second.communicate(timeout=MAX_WAIT_S)
    assert second.returncode == 2
    [line] = error.splitlines()
    assert "rank 1 of 3" in line


# A rank that ends when all have met, before it does anything with the others.
LEAVING_RANK = "from mmtrain.runtime.world import find_address, join; join(find_address()); import os; os._exit(1)"


@pytest.mark.parametrize("command", ["train", "profile"])
def test_a_rank_that_loses_another_one_at_once_says_so_in_one_line(data: Path, tmp_path: Path, command: str) -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    env = os.environ | variables | {"RANK": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    arguments = {
        "train": train_arguments(data, tmp_path),
        "profile": ["mmtrain", "profile", DEMO_RECIPE, "--out", str(tmp_path / "costs.json")],
    }
    with (
        _start_command(arguments[command], variables | {"RANK": "0"}) as first,
        subprocess.Popen([sys.executable, "-c", LEAVING_RANK], env=env, stderr=subprocess.DEVNULL),
    ):
        _, error = first.communicate(timeout=MAX_WAIT_S)
    assert first.returncode == 1
    assert "Traceback" not in error
    assert "rank 0 of 2 lost the connection to another rank" in error.splitlines()[-1]


def _num_connections(pid: int, port: int) -> int:
    connections = psutil.Process(pid).net_connections("tcp")
    return sum(c.status == psutil.CONN_ESTABLISHED and c.raddr and c.raddr.port == port for c in connections)
