"""Join the ranks of a run: find this process's rank, and choose between CPU with gloo and CUDA with NCCL."""

import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from mmtrain.costs.find_hardware import preset_for_device, slowest_hardware
from mmtrain.errors import LaunchError, MmtrainError
from mmtrain.machine_limits import num_available_cores
from mmtrain.runtime.device_rates import hardware_of_gpu
from mmtrain.runtime.gloo_threads import calm_gloo_threads
from mmtrain.runtime.heartbeats import StartWatch
from mmtrain.runtime.rendezvous import (
    RENDEZVOUS_LIMIT_S,
    MeetingPlace,
    Patience,
    await_all_ranks,
    noting_progress,
    print_note,
    reach_first_rank,
)
from mmtrain.system_calls import num_scheduled_cores

T = TypeVar("T")
RENDEZVOUS_TIMEOUT = timedelta(seconds=RENDEZVOUS_LIMIT_S)
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
PATIENT_TIMEOUT = timedelta(days=365)  # gloo has no setting for none
# Of torch's CUDA allocator. Every microbatch has another number of tokens, so block sizes hardly ever repeat, and
# segments of fixed size would fill with gaps.
ALLOCATOR_SETTINGS = "expandable_segments:True"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second one is its former name
# This process's index among those of its machine, as torchrun, Open MPI, Intel MPI and MPICH, and srun state it.
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
# With which other launchers tell a process its place; a launcher of our own does so otherwise.
LAUNCHER_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_(RANK|NAME|WORLD_SIZE)|MASTER_ADDR"
    r"|MASTER_PORT|TORCHELASTIC_\w+|SLURM_(PROCID|LOCALID|STEP_NUM_TASKS)|OMPI_COMM_WORLD_\w+|MPI_LOCALRANKID|PMI_\w+)"
)
_LOOPBACK = ("127.0.0.1", "localhost")
_STORE_BACKLOG = 2048  # connections that wait: all ranks of a machine come at once
_LAUNCHER_NAMES = {"torchrun": "torchrun, or what sets its variables", "slurm": "srun"}
# Where jobs of SLURM meet: below the ports that Linux gives to connections, which start at 32768.
SLURM_PORTS = range(20_000, 32_000)
PORTS_BETWEEN_STEPS = 601  # of one job: more than there are between jobs that run at the same time on one node


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
    origin: str = field(default="", compare=False)  # the variables that say so, with their values
    job: str = field(default="", compare=False)  # as the launcher calls it; two of one machine differ
    has_store: bool = False  # another process holds the store in which the ranks meet: the one that started rank 0

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
    collective_timeout: timedelta | None = field(default=None, repr=False, compare=False)  # None: torch's own
    start_watch: StartWatch | None = field(default=None, repr=False, compare=False)  # to be closed by who joined

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

    def waiting_for(self, seconds: float) -> "World":
        """Return the same ranks with collectives that wait for a rank for `seconds`, where that is longer than usual.

        All ranks call this together. The watchdog tells sooner which rank is stuck.
        """
        timeout = timedelta(seconds=seconds)
        if self.size == 1 or timeout <= COLLECTIVE_TIMEOUT:
            return self
        _set_group_timeout(timeout)
        return replace(self, collective_timeout=timeout)

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


def detect_hardware(device: torch.device | None = None) -> str:
    """Return the hardware of a device, or of this machine: its slowest GPU, or `cpu-core` without one.

    A GPU that no preset describes is measured, once in a process, and the first rank says so on stderr. A process that
    a launcher started looks at its own GPU alone, since the other ranks look at theirs at the same time.

    Raises:
        PlanError: the GPUs of the machine differ too much, or an unknown one has no memory left to measure it.
    """
    prepare_allocator()  # asking for a device's name starts CUDA
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return str(preset_for_device(None))
    num_devices, address = torch.cuda.device_count(), find_address()
    indices = range(num_devices)
    if device is not None:
        indices = range(device.index or 0, (device.index or 0) + 1)
    elif address is not None:
        own = device_index(address.local_rank, num_devices)
        indices = range(own, own + 1)
    is_first = address is None or address.rank == 0
    return slowest_hardware([hardware_of_gpu(index, is_first) for index in indices])


def find_address(env: Mapping[str, str] = os.environ) -> Address | None:
    """Read this process's rank from a launcher's variables; None if no launcher started it.

    torchrun's variables win over SLURM's, since torchrun is also started by srun, one for each node.
    """
    if "WORLD_SIZE" in env and "RANK" in env:
        return _checked(_torchrun_address(env))
    # Only srun sets the step's size: in a batch script without srun, mmtrain is one process, not all tasks.
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        return _checked(_slurm_address(env))
    return None


def _torchrun_address(env: Mapping[str, str]) -> Address:
    rank, size = _int(env, "RANK"), _int(env, "WORLD_SIZE")
    local = next((_int(env, name) for name in LOCAL_RANK_VARIABLES if name in env), None)
    port = _int(env, "MASTER_PORT") if "MASTER_PORT" in env else 29500
    attempt = _int(env, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in env else 0
    per_node = _int(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else 1
    if local is None:  # launchers fill one node after another
        local = rank % per_node if "LOCAL_WORLD_SIZE" in env else rank
    return Address(
        rank,
        size,
        local,
        env.get("MASTER_ADDR", "127.0.0.1"),
        port,
        "torchrun",
        attempt,
        per_node,
        _origin(env, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        env.get("TORCHELASTIC_RUN_ID", ""),
    )


def _slurm_address(env: Mapping[str, str]) -> Address:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    job, step = env.get("SLURM_JOB_ID", "0"), env.get("SLURM_STEP_ID", "0")
    # Two jobs on one node, and two steps of one job, need different ports, and all tasks of a step must choose the same
    # without communicating.
    number = (_number(job) + PORTS_BETWEEN_STEPS * _number(step)) % len(SLURM_PORTS)
    # `8(x2),4`: eight tasks on each of two nodes, and four on the next.
    tasks_per_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return Address(
        _int(env, "SLURM_PROCID"),
        _int(env, "SLURM_STEP_NUM_TASKS"),
        _int(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else 0,
        env.get("MASTER_ADDR") or first_host(nodes) or "127.0.0.1",
        _int(env, "MASTER_PORT") if "MASTER_PORT" in env else SLURM_PORTS[number],
        "slurm",
        ranks_per_node=int(tasks_per_node.group()) if tasks_per_node else 1,
        origin=_origin(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR", "MASTER_PORT"),
        job=f"{job}.{step}",
    )


def _origin(env: Mapping[str, str], *names: str) -> str:
    """Return the variables that say where this process belongs, for the user."""
    return ", ".join(f"{name}={env[name]}" if name in env else f"no {name}" for name in names)


def introduce_address(address: Address, note: Callable[[str], None] = print_note) -> None:
    """Say on rank 0 what was taken from which variables: they may be left from something else."""
    if address.rank:
        return
    ranks = "1 rank" if address.world_size == 1 else f"{address.world_size} ranks"
    meeting = "" if address.world_size == 1 else f"; they meet at {address.master}:{address.port}"
    note(f"{ranks}, as started by {_LAUNCHER_NAMES[address.launcher]} ({address.origin}){meeting}")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if address.world_size == 1 and num_gpus > 1:
        note(
            f"this machine has {num_gpus} GPUs, and one is used, because of these variables; to use all, "
            f"{way_to_start_own_ranks(address)}"
        )


def find_launched_world(num_ranks: int, env: Mapping[str, str] = os.environ) -> Address | None:
    """Return this process's rank among those of a launcher; None where we start `num_ranks` of our own.

    Variables that make this process the only one, of a shell that `srun --pty` started or left from something else, are
    no reason to do what needs several ranks with one.
    """
    address = find_address(env)
    if address is None or address.world_size > 1 or num_ranks == 1:
        return address
    print_note(f"starting {num_ranks} ranks here, though {address.origin} make this process the only one")
    return None


def way_to_start_own_ranks(address: Address) -> str:
    """Say how to make mmtrain start the ranks itself where a launcher's variables are set."""
    if address.launcher == "slurm":
        return "unset SLURM_PROCID"
    return "unset RANK and WORLD_SIZE"


def forget_launcher(env: MutableMapping[str, str] = os.environ) -> None:
    """Remove the variables of other launchers, in a rank that our own launcher has started."""
    for name in [name for name in env if LAUNCHER_VARIABLES.fullmatch(name)]:
        del env[name]


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


def join(address: Address, *, on_host: bool = False, watch_s: float = 0.0) -> World:
    """Join the default process group; after `leave`, the same ranks may join again.

    A group that this process has from before ends: that of a model that it computed alone, or of a run that failed.

    on_host: the ranks exchange objects only. They take no GPU, whose memory is left to other processes.
    watch_s: after so long without a sign of life of a rank that had come, this process ends. The caller closes
        `start_watch` of the world when something else watches. 0: nothing is watched.

    Raises LaunchError when the port cannot be used, a rank does not arrive in time, or two ranks have one GPU.
    """
    leave()
    prepare_allocator()
    cuda = torch.cuda.is_available() and not on_host
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", device_index(address.local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    if address.rank == 0 and address not in _meeting_points:
        _require_bindable(address)
    place = MeetingPlace(address.rank, address.world_size, address.master, address.port, address.origin)
    try:
        store, watch = _meet(address, place, cuda, watch_s)
    except (RuntimeError, ValueError) as e:
        origin = f" ({address.origin})" if address.origin else ""
        raise LaunchError(
            f"rank {address.rank} of {address.world_size} could not join at {place.to_text()}{origin}: "
            f"{str(e).splitlines()[0]}. Check that the port is free on the first node, that every node reaches the "
            "others (GLOO_SOCKET_IFNAME names the network), and that all ranks were started"
        ) from e
    calm_gloo_threads()
    world = World(address.rank, address.world_size, device, store, start_watch=watch)
    if cuda:
        uuid = torch.cuda.get_device_properties(device).uuid
        reject_shared_devices(world.all_gather(f"{socket.gethostname()}, {uuid}"))
    return world


def _meet(address: Address, place: MeetingPlace, cuda: bool, watch_s: float) -> tuple[Store | None, StartWatch | None]:
    """Wait for all ranks, and make the default process group of them.

    Return a client of their store for background threads, and the watch over the ranks; None for one rank.
    """
    patience = Patience()
    if address not in _meeting_points:
        if not _hosts_store(address):
            reach_first_rank(place, patience)
        _meeting_points[address] = _MeetingPoint(_connect(address, is_master=_hosts_store(address)))
    meeting_point = _meeting_points[address]
    meeting_point.num_meetings += 1
    prefix = _store_prefix(address, meeting_point.num_meetings)
    store = PrefixStore(prefix, meeting_point.store)
    watch = None
    if watch_s and address.world_size > 1:
        watch = StartWatch(partial(_new_client, address, prefix), place, watch_s)
    try:
        await_all_ranks(store, place, patience, may_repeat=has_agent_store(address))
        with noting_progress(
            Patience(), f"all ranks have come to {place.to_text()}, and rank {place.rank} connects to the others"
        ):
            dist.init_process_group(
                # Objects go over gloo: NCCL would pickle them through the memory of GPUs.
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=store,
                rank=address.rank,
                world_size=address.world_size,
                timeout=RENDEZVOUS_TIMEOUT,
            )
    except BaseException:
        if watch is not None:
            watch.close()
        raise
    _set_group_timeout(COLLECTIVE_TIMEOUT)  # of what follows; all ranks were there to connect
    # A wait of the main thread blocks torch's own client, lock included.
    return None if address.world_size == 1 else _new_client(address, prefix), watch


def _set_group_timeout(timeout: timedelta) -> None:
    """Set the timeout of the default group; before torch 2.14 the function has a private name."""
    name = "set_timeout" if hasattr(distributed_c10d, "set_timeout") else "_set_pg_timeout"
    getattr(distributed_c10d, name)(timeout)


def _connect(address: Address, is_master: bool) -> TCPStore:
    """Connect to the store of the ranks; `is_master`: make it."""
    listener = _listen_on_loopback(address.port) if is_master and address.master in _LOOPBACK else None
    return TCPStore(
        # The process that holds the store needs no name of its machine, which only others may be able to resolve.
        "127.0.0.1" if _hosts_store(address) else address.master,
        address.port,
        address.world_size,
        is_master=is_master,
        timeout=RENDEZVOUS_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,  # the store closes it
    )


def _listen_on_loopback(port: int) -> int:
    """Return a socket that only this machine reaches: torch's own would listen on all its networks, to anyone."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(_STORE_BACKLOG)
        except OSError as error:
            raise RuntimeError(f"port {port} cannot be listened on: {error.strerror}") from None
        return listener.detach()


def _new_client(address: Address, prefix: str) -> Store:
    """Connect to the store again, for a background thread."""
    return PrefixStore(f"{prefix}/threads", _connect(address, is_master=False))


def limit_threads(address: Address) -> None:
    """Keep torch's CPU threads of this rank from fighting those of the other ranks of its machine.

    Without a GPU a rank is one core. Beside a GPU it has its share of the cores, for tables and copies.
    """
    num_threads = 1
    if torch.cuda.is_available():
        num_cores = num_available_cores()
        # srun binds each task to cores of its own; every other launcher leaves all cores to all ranks.
        is_bound = address.launcher == "slurm" and num_scheduled_cores() < (os.cpu_count() or 1)
        num_threads = max(1, num_cores if is_bound else num_cores // address.ranks_here)
    # OMP_NUM_THREADS may say less. It is set anyway: a forked process replaces torch's pool of threads at first use,
    # and if two threads use it first at the same time, one finds none ("Invalid thread pool", torch 2.13).
    torch.set_num_threads(min(num_threads, torch.get_num_threads()))


def leave() -> None:
    """Leave the default process group, if joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_own_world() -> None:
    """Leave the world of this process alone, in which it computed a model, before ranks are forked.

    The threads of its group do not survive a fork, and a rank that ended the group would be killed by SIGSEGV.
    """
    if dist.is_initialized() and dist.get_world_size() == 1:
        leave()


def has_agent_store(address: Address, env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the ranks meet in a store of torchrun's agent, which already listens at MASTER_PORT."""
    return address.launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _hosts_store(address: Address) -> bool:
    return address.rank == 0 and not address.has_store and not has_agent_store(address)


def _store_prefix(address: Address, meeting: int) -> str:
    """Return what keeps the keys of one meeting of the ranks apart from those of another.

    The store of torchrun's agent outlives a failed attempt and still holds the addresses of its ranks. A store of our
    own is new in each start; agents that joined at different times count attempts differently. `meeting` counts in one
    start. The job's name keeps a rank of another job, at the same port by chance, from being taken for one of ours.
    """
    attempt = f"/{address.attempt}" if has_agent_store(address) else ""
    return f"mmtrain/{address.job}{attempt}/{meeting}"


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


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


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
