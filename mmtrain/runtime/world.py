"""Join the ranks of a run: find this process's rank, and choose between CPU with gloo and CUDA with NCCL."""

import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from mmtrain.costs import preset_for_device
from mmtrain.errors import LaunchError, MmtrainError
from mmtrain.runtime.gloo_threads import calm_gloo_threads

T = TypeVar("T")
RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
PATIENT_TIMEOUT = timedelta(days=365)  # gloo has no setting for none
# Of torch's CUDA allocator. Every microbatch has another number of tokens, so block sizes hardly ever repeat, and
# segments of fixed size would fill with gaps.
ALLOCATOR_SETTINGS = "expandable_segments:True"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second one is its former name
# This process's index among those of its machine, as torchrun, Open MPI, Intel MPI and MPICH, and srun state it.
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


@dataclass(frozen=True)
class Address:
    """This process's rank, the world's size, and where rank 0 listens."""

    rank: int
    world_size: int
    local_rank: int
    master: str
    port: int
    launcher: str  # `torchrun` (or anything else that sets its variables), `slurm` or `mmtrain`
    attempt: int = 0  # restarts by torchrun so far
    ranks_per_node: int = 1  # that are lost together; of our own launcher, whose ranks share one node, each by itself

    @property
    def ranks_here(self) -> int:
        """The number of ranks that share this machine's cores, as far as the launcher says."""
        return self.world_size if self.launcher == "mmtrain" else self.ranks_per_node


@dataclass(frozen=True)
class World:
    """All ranks of a run, joined in torch's default process group."""

    rank: int
    size: int
    device: torch.device
    # By which background threads exchange small values, while collectives are the main thread's; None for one rank.
    store: Store | None = field(default=None, repr=False, compare=False)
    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)  # of objects; None: the default

    @property
    def is_first(self) -> bool:
        """True on the rank that plans, logs and prints."""
        return self.rank == 0

    def without_timeout(self) -> "World":
        """Return the same ranks with a group for objects in which they wait for each other without a limit.

        All ranks call this together. What waits there must be watched otherwise, as the watchdog does.
        """
        if self.size == 1:
            return self
        patient = replace(self, group=dist.new_group(backend="gloo", timeout=PATIENT_TIMEOUT))
        calm_gloo_threads()
        return patient

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def all_gather(self, value: object) -> list[object]:
        """Collect one small picklable object from every rank, on every rank, in rank order."""
        if self.size == 1:
            return [value]
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_to_first(self, value: object) -> list[object]:
        """Collect one picklable object from every rank on rank 0, in rank order; other ranks get an empty list."""
        if self.size == 1:
            return [value]
        values: list[object] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values)
        return values or []

    def all_reduce(self, value: float) -> float:
        """Return the sum of one number over all ranks."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(total)
        return float(total)

    def on_first(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0 and return its picklable result on every rank; if it fails, every rank raises the same.

        A failure known to rank 0 alone would leave the others waiting in the next collective.
        """
        outcome: tuple[T | None, tuple[type[MmtrainError], str] | None] = (None, None)
        if self.is_first:
            try:
                outcome = (work(), None)
            except MmtrainError as e:
                outcome = (None, (type(e), str(e)))
        result, failure = cast(tuple[T, tuple[type[MmtrainError], str] | None], self.broadcast(outcome))
        if failure:
            error_type, message = failure
            raise error_type(message)
        return result

    def broadcast(self, value: object) -> object:
        """Return rank 0's small picklable object on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]


def torch_seed(seed: int) -> int:
    """Return the seed of torch's global generators in a run with `train.seed`: the same stream on all ranks.

    Ranks that hold the same piece of a model must draw the same numbers. Weights have generators of their own, by name.
    """
    return zlib.crc32(f"{seed}:torch".encode())


def detect_hardware() -> str:
    """Return the hardware preset of this machine; PlanError for a GPU without one."""
    prepare_allocator()  # asking for a device's name starts CUDA
    return preset_for_device(torch.cuda.get_device_name(0) if torch.cuda.is_available() else None)


def find_address(env: Mapping[str, str] = os.environ) -> Address | None:
    """Read this process's rank from a launcher's variables; None if no launcher started it.

    torchrun's variables win over SLURM's, since torchrun is also started by srun, one for each node.
    """
    if "WORLD_SIZE" in env and "RANK" in env:
        values = {key: _int(env, key) for key in ("RANK", "WORLD_SIZE")}
        local = next((_int(env, name) for name in LOCAL_RANK_VARIABLES if name in env), None)
        port = _int(env, "MASTER_PORT") if "MASTER_PORT" in env else 29500
        attempt = _int(env, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in env else 0
        master = env.get("MASTER_ADDR", "127.0.0.1")
        per_node = _int(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else 1
        rank, size = values["RANK"], values["WORLD_SIZE"]
        if local is None:  # launchers fill one node after another
            local = rank % per_node if "LOCAL_WORLD_SIZE" in env else rank
        return _checked(Address(rank, size, local, master, port, "torchrun", attempt, per_node))
    # Only srun sets the step's size: in a batch script without srun, mmtrain is one process, not all tasks.
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
        master = env.get("MASTER_ADDR") or first_host(nodes) or "127.0.0.1"
        # Two jobs on one node need different ports, and all tasks of a job must choose the same without communicating.
        port = _int(env, "MASTER_PORT") if "MASTER_PORT" in env else 20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000
        local = _int(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else 0
        size = _int(env, "SLURM_STEP_NUM_TASKS")
        # `8(x2),4`: eight tasks on each of two nodes, and four on the next.
        tasks_per_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
        per_node = int(tasks_per_node.group()) if tasks_per_node else 1
        address = Address(_int(env, "SLURM_PROCID"), size, local, master, port, "slurm", ranks_per_node=per_node)
        return _checked(address)
    return None


def first_host(nodelist: str) -> str | None:
    """Return the first host of a SLURM node list: `gpu003` of `gpu[003-006,9],login1`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodelist)
    return "".join(part or "" for part in match.groups()) if match else None


@dataclass
class _MeetingPoint:
    """The store in which the ranks of a launcher meet, and how often they have met there."""

    store: TCPStore
    num_meetings: int = 0


# By address. A process that trains one run after another joins again and again, at a port that stays the same: a new
# store there would be found by some ranks only, while others are still in the old one.
_meeting_points: dict[Address, _MeetingPoint] = {}


def prepare_allocator(env: MutableMapping[str, str] = os.environ) -> None:
    """Choose settings of torch's CUDA allocator before CUDA starts, unless the user has chosen others."""
    if not any(name in env for name in ALLOCATOR_VARIABLES):
        env[ALLOCATOR_VARIABLES[0]] = ALLOCATOR_SETTINGS


def device_index(local_rank: int, num_devices: int) -> int:
    """Return which of the visible GPUs is this process's own.

    A launcher may show each process one GPU only (`srun --gpus-per-task=1`). Whether processes share that GPU is
    found out when they have met (`reject_shared_devices`).

    Raises LaunchError for a process without a GPU.
    """
    if num_devices == 1:
        return 0
    if local_rank >= num_devices:
        raise LaunchError(
            f"LOCAL_RANK: {local_rank} found, but this machine has {num_devices} GPUs; start at most one process per "
            f"GPU, and let the launcher set LOCAL_RANK (or {', '.join(LOCAL_RANK_VARIABLES[1:])}) on each node"
        )
    return local_rank


def reject_shared_devices(devices: Sequence[object]) -> None:
    """Raise LaunchError if two ranks have the same GPU; `devices` are the ranks' own, by rank."""
    rank_of: dict[object, int] = {}
    for rank, device in enumerate(devices):
        first = rank_of.setdefault(device, rank)
        if first != rank:
            raise LaunchError(
                f"ranks {first} and {rank} have the same GPU ({device}), and NCCL needs one for each; start at most "
                "one process per GPU, or let the launcher show each process a GPU of its own"
            )


def join(address: Address) -> World:
    """Join the default process group; after `leave`, the same ranks may join again.

    Raises LaunchError when the port cannot be used, a rank does not arrive in time, or two ranks have one GPU.
    """
    prepare_allocator()
    cuda = torch.cuda.is_available()
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", device_index(address.local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    if address.rank == 0 and address not in _meeting_points:
        _require_bindable(address)
    try:
        if address not in _meeting_points:
            _meeting_points[address] = _MeetingPoint(_connect(address, is_master=_hosts_store(address)))
        meeting_point = _meeting_points[address]
        meeting_point.num_meetings += 1
        prefix = _store_prefix(address, meeting_point.num_meetings)
        dist.init_process_group(
            # Objects go over gloo: NCCL would pickle them through the memory of GPUs.
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=PrefixStore(prefix, meeting_point.store),
            rank=address.rank,
            world_size=address.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    except (RuntimeError, ValueError) as e:
        raise LaunchError(
            f"rank {address.rank} of {address.world_size} could not join at MASTER_ADDR:MASTER_PORT "
            f"{address.master}:{address.port}: {str(e).splitlines()[0]}. Check that the port is free on the first "
            "node, that every node reaches it, and that all ranks were started"
        ) from e
    calm_gloo_threads()
    world = World(address.rank, address.world_size, device, _second_client(address, prefix))
    if cuda:
        uuid = torch.cuda.get_device_properties(device).uuid
        reject_shared_devices(world.all_gather(f"{socket.gethostname()}, {uuid}"))
    return world


def _connect(address: Address, is_master: bool) -> TCPStore:
    """Connect to the store of the ranks; `is_master`: make it."""
    return TCPStore(
        address.master,
        address.port,
        address.world_size,
        is_master=is_master,
        timeout=RENDEZVOUS_TIMEOUT,
        wait_for_workers=False,
    )


def _second_client(address: Address, prefix: str) -> Store | None:
    """Connect to the store again: a wait of the main thread blocks torch's own client, lock included."""
    if address.world_size == 1:
        return None
    return PrefixStore(f"{prefix}/threads", _connect(address, is_master=False))


def limit_threads(address: Address) -> None:
    """Keep torch's CPU threads of this rank from fighting those of the other ranks of its machine.

    Without a GPU a rank is one core. Beside a GPU it has its share of the cores, for tables and copies.
    """
    num_threads = 1
    if torch.cuda.is_available():
        num_cores = len(os.sched_getaffinity(0))
        # srun binds each task to cores of its own; every other launcher leaves all cores to all ranks.
        is_bound = address.launcher == "slurm" and num_cores < (os.cpu_count() or 1)
        num_threads = max(1, num_cores if is_bound else num_cores // address.ranks_here)
    # OMP_NUM_THREADS may say less. It is set anyway: a forked process replaces torch's pool of threads at first use,
    # and if two threads use it first at the same time, one finds none ("Invalid thread pool", torch 2.13).
    torch.set_num_threads(min(num_threads, torch.get_num_threads()))


def leave() -> None:
    """Leave the default process group, if joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def has_agent_store(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the ranks meet in a store of torchrun's agent, which already listens at MASTER_PORT."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _hosts_store(address: Address) -> bool:
    return address.rank == 0 and not has_agent_store()


def _store_prefix(address: Address, meeting: int) -> str:
    """Return what keeps the keys of one meeting of the ranks apart from those of another.

    The store of torchrun's agent outlives a failed attempt and still holds the addresses of its ranks. A store of our
    own is new in each start; agents that joined at different times count attempts differently. `meeting` counts in one
    start.
    """
    return f"mmtrain/{address.attempt}/{meeting}" if has_agent_store() else f"mmtrain/{meeting}"


def _require_bindable(address: Address) -> None:
    """Raise LaunchError for a port that another process uses, instead of hanging until a timeout."""
    if not _hosts_store(address) or address.launcher == "mmtrain":
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", address.port))
        except OSError as e:
            raise LaunchError(
                f"MASTER_PORT: {address.port} cannot be used on this node ({e.strerror}); choose a free port above 1023"
            ) from e


def _int(env: Mapping[str, str], key: str) -> int:
    try:
        return int(env[key])
    except ValueError:
        raise LaunchError(f"{key}: {env[key]!r} found, a whole number is needed") from None


def _checked(address: Address) -> Address:
    if not 0 <= address.rank < address.world_size:
        raise LaunchError(f"RANK: {address.rank} found, but WORLD_SIZE is {address.world_size}; allowed: 0 to size - 1")
    if not 0 < address.port < 65536:
        raise LaunchError(f"MASTER_PORT: {address.port} found; allowed: 1 to 65535")
    return address
