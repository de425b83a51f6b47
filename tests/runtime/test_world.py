import socket

import pytest
import torch.distributed as dist

from mmtrain.errors import LaunchError
from mmtrain.models.megatron import ParallelGroups
from mmtrain.runtime import world as world_module
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.world import (
    SLURM_PORTS,
    Address,
    device_index,
    find_address,
    find_launched_world,
    first_host,
    forget_launcher,
    has_agent_store,
    introduce_address,
    join,
    leave,
    limit_threads,
    prepare_allocator,
    reject_shared_devices,
)


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
    assert find_address(env) == Address(5, 16, 1, "gpu003", 20000 + 123456 % 12000, "slurm")


def test_jobs_and_steps_of_slurm_meet_apart_and_below_the_ports_of_connections() -> None:
    def place(job: int, step: int) -> tuple[int, str]:
        env = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        address = find_address(env)
        assert address is not None
        return address.port, address.job

    places = [place(job, step) for job in range(1_000_000, 1_000_050) for step in range(20)]
    assert len({port for port, _ in places}) == len({job for _, job in places}) == 1000
    assert all(port in SLURM_PORTS and port < 32768 for port, _ in places)


def test_what_was_taken_from_where_is_said_by_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    notes: list[str] = []
    for rank, size in ((0, 2), (1, 2), (0, 1)):
        address = find_address({"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "node7"})
        assert address is not None
        introduce_address(address, notes.append)
    two, one, unused = notes
    assert "2 ranks" in two
    assert two.endswith("(RANK=0, WORLD_SIZE=2, MASTER_ADDR=node7, no MASTER_PORT); they meet at node7:29500")
    assert one.endswith("(RANK=0, WORLD_SIZE=1, MASTER_ADDR=node7, no MASTER_PORT)")
    assert unused.startswith("this machine has 8 GPUs, and one is used")
    assert unused.endswith("unset RANK and WORLD_SIZE")


def test_variables_of_a_launcher_are_not_those_of_our_own() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "PMI_RANK")
    env = dict.fromkeys(names, "1")
    kept = {"SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "1", "MY_RANK": "3", "NCCL_DEBUG": "INFO"}
    env |= kept
    forget_launcher(env)
    assert env == kept
    ours = Address(0, 2, 0, "127.0.0.1", 1234, "mmtrain")
    assert not has_agent_store(ours, {"TORCHELASTIC_USE_AGENT_STORE": "True"})


def test_variables_of_one_process_do_not_keep_a_command_from_starting_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    assert find_launched_world(2, alone) is None
    assert "starting 2 ranks here, though RANK=0, WORLD_SIZE=1" in capsys.readouterr().err
    assert find_launched_world(1, alone) is not None
    assert find_launched_world(2, {"RANK": "0", "WORLD_SIZE": "4"}) is not None
    assert find_launched_world(2, {}) is None


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


def test_a_process_that_computed_a_model_alone_may_join_others() -> None:
    ParallelGroups.single()
    for _ in range(2):  # the second time without leaving, as after a run that failed
        world = join(Address(0, 1, 0, "127.0.0.1", free_port(), "mmtrain"))
        assert world.all_gather("here") == ["here"]
    leave()
    assert not dist.is_initialized()


def test_a_port_in_use_is_refused_at_once() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(LaunchError, match=f"MASTER_PORT: {port} cannot be used"):
            join(Address(0, 2, 0, "127.0.0.1", port, "torchrun"))


@pytest.mark.parametrize(
    ("env", "local_rank"),
    [
        ({"LOCAL_RANK": "2"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, 3),
        ({"SLURM_LOCALID": "1"}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 5),
        ({}, 13),
    ],
)
def test_launchers_that_set_no_local_rank_state_it_otherwise(env: dict[str, str], local_rank: int) -> None:
    address = find_address({"RANK": "13", "WORLD_SIZE": "16", **env})
    assert address is not None
    assert address.local_rank == local_rank


def test_a_process_takes_the_gpu_of_its_local_rank_or_the_only_one_that_it_sees() -> None:
    assert [device_index(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert device_index(3, 1) == 0, "srun --gpus-per-task=1 shows each task its own GPU"
    with pytest.raises(LaunchError, match="LOCAL_RANK: 4 found, but this machine has 4 GPUs"):
        device_index(4, 4)
    reject_shared_devices(["node1, a", "node1, b", "node2, c"])
    with pytest.raises(LaunchError, match="ranks 1 and 2 have the same GPU"):
        reject_shared_devices(["node1, a", "node1, b", "node1, b"])


def test_the_allocator_of_the_user_stays() -> None:
    for env in ({"PYTORCH_ALLOC_CONF": "x:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}):
        changed = dict(env)
        prepare_allocator(changed)
        assert changed == env
    env = {}
    prepare_allocator(env)
    assert env == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("launcher", "cores", "threads"), [("mmtrain", 16, 4), ("torchrun", 16, 8), ("slurm", 6, 6), ("slurm", 16, 8)]
)
def test_ranks_with_gpus_share_the_cores(
    launcher: str, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    limit_threads(Address(1, 4, 1, "x", 1234, launcher, ranks_per_node=2))
    assert chosen == [threads]


def test_the_store_of_ranks_on_one_machine_is_reached_from_it_alone() -> None:
    port = free_port()
    store = world_module._connect(Address(0, 1, 0, "127.0.0.1", port, "mmtrain"), is_master=True)
    try:
        store.set("key", "value")
        assert store.get("key") == b"value"
        with open("/proc/net/tcp", encoding="ascii") as file:
            listening = [line.split()[1] for line in file if line.split()[3] == "0A"]
        with open("/proc/net/tcp6", encoding="ascii") as file:
            listening += [line.split()[1] for line in file if line.split()[3] == "0A"]
        assert [place for place in listening if place.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    finally:
        del store
