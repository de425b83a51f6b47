import socket

import pytest

from mmtrain.errors import LaunchError
from mmtrain.runtime.world import Address, find_address, first_host, join


def test_a_single_rank_needs_no_address() -> None:
    assert find_address({}) is None
    assert find_address({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None, (
        "a batch script without srun is one process"
    )


def test_torchrun_variables() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "4321"}
    assert find_address(env) == Address(3, 8, 1, "node7", 4321, "torchrun")


def test_slurm_variables() -> None:
    env = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "16",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "gpu[003-006]",
        "SLURM_JOB_ID": "123456",
    }
    assert find_address(env) == Address(5, 16, 1, "gpu003", 20000 + 123456 % 20000, "slurm")


@pytest.mark.parametrize(
    ("env", "ranks_per_node"),
    [
        ({"RANK": "0", "WORLD_SIZE": "24", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({"RANK": "0", "WORLD_SIZE": "24"}, 1),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "20", "SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}, 8),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, 1),
    ],
)
def test_ranks_that_are_lost_together(env: dict[str, str], ranks_per_node: int) -> None:
    address = find_address(env)
    assert address is not None
    assert address.ranks_per_node == ranks_per_node


def test_torchrun_started_by_srun_wins() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "1"}
    address = find_address(env)
    assert address is not None
    assert (address.rank, address.world_size) == (0, 2)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[003-006,9],login1", "gpu003"),
        ("rack2-[7,9]-ib", "rack2-7-ib"),
        ("", None),
    ],
)
def test_first_host_of_a_node_list(nodes: str, host: str | None) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"RANK": "two"}, "RANK: 'two'"),
        ({"RANK": "4"}, "RANK: 4 found, but WORLD_SIZE is 4"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT: 99999"),
    ],
)
def test_unusable_variables_are_named(changes: dict[str, str], named: str) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1234"} | changes
    with pytest.raises(LaunchError, match=named):
        find_address(env)


def test_a_port_in_use_is_refused_at_once() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(LaunchError, match=f"MASTER_PORT: {port} cannot be used"):
            join(Address(0, 2, 0, "127.0.0.1", port, "torchrun"))
