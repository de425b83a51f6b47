"""What this process may use of its machine: cores, memory and processes, less than the machine has in a container."""

import math
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mmtrain.system_calls import num_scheduled_cores, user_limit

CORE_COUNT_VARIABLE = "PYTHON_CPU_COUNT"  # Python's own, which reads it from 3.13 on
# OpenMP's own ways to bind threads to cores, which it does when it is loaded: with any of them, all ranks and workers
# of a machine share the cores that it chooses in each process anew.
BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_NO_LIMIT_BYTES = 1 << 60  # version 1 writes about 2**63 for no limit


@dataclass(frozen=True)
class MachineLimits:
    """The limits of a process's control groups; None where there is none."""

    cores: float | None = None
    memory_bytes: int | None = None
    num_processes: int | None = None  # and threads


def num_available_cores(env: Mapping[str, str] = os.environ) -> int:
    """Return how many cores this process may use: `PYTHON_CPU_COUNT`, else those that the system lets it run on.

    A quota of processor time counts as so many whole cores, at least one.
    """
    stated = env.get(CORE_COUNT_VARIABLE, "")
    if stated.isdecimal() and int(stated):
        return int(stated)
    quota = machine_limits().cores
    cores = num_scheduled_cores()
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


@cache
def machine_limits() -> MachineLimits:
    """Return the limits of this process, as they were at the first call."""
    return read_limits(Path("/"))


def read_limits(root: Path) -> MachineLimits:
    """Read the limits of this process's control groups of version 1 and 2 below `root`, the file system's.

    A limit of a group holds for the groups inside it, so that the lowest one up to the mounted group counts.
    """
    folders: dict[str, list[Path]] = {"cpu": [], "memory": [], "pids": []}
    for controller, group_folders in _groups(root):
        for name in folders if controller is None else (controller,):
            folders.get(name, []).extend(group_folders)
    return MachineLimits(
        cores=min(filter(None, map(_read_cores, folders["cpu"])), default=None),
        memory_bytes=min(filter(None, map(_read_memory, folders["memory"])), default=None),
        num_processes=min(filter(None, map(_read_processes, folders["pids"])), default=None),
    )


def max_processes(limits: MachineLimits) -> int | None:
    """Return how many processes and threads this user may have (`ulimit -u`, or the container's); None for any."""
    return min(filter(None, (user_limit("processes"), limits.num_processes)), default=None)


def drop_thread_binding(env: MutableMapping[str, str] = os.environ) -> str | None:
    """Remove OpenMP's binding of threads from the environment; return a line for the user if there was any.

    Must be called before torch is imported. A launcher's own binding (`srun --cpu-bind`, taskset) stays.
    """
    found = [name for name in BINDING_VARIABLES if env.pop(name, None) is not None]
    if not found:
        return None
    return f"ignoring {', '.join(found)}, which would bind all ranks and workers of this machine to the same cores"


def _groups(root: Path) -> Iterator[tuple[str | None, Sequence[Path]]]:
    """Yield each control group of this process: its controller (None: all of version 2), and its folder with those
    above it, as far as they are mounted.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux
        return
    paths: dict[str | None, str] = {}  # controller -> path in its hierarchy
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path) if controllers else {None: path})
    for line in mounts:
        before, _, behind = line.partition(" - ")
        fields, (kind, _, options) = before.split(), behind.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        for controller in [None] if kind == "cgroup2" else options.split(","):
            if controller in paths:
                yield controller, _folders(root / fields[4].lstrip("/"), fields[3], paths[controller])


def _folders(mount: Path, mounted: str, path: str) -> Sequence[Path]:
    """Return the folder of the group `path` and those above it, where the group `mounted` is mounted at `mount`.

    In a container the path may be one of the host's that is not mounted: then only the mounted group is known.
    """
    inner = Path(os.path.relpath(path, mounted))
    if ".." in inner.parts or not (mount / inner).is_dir():
        return (mount,)
    return [mount / part for part in (inner, *inner.parents)]


def _read_cores(folder: Path) -> float | None:
    quota_and_period = _read_numbers(folder / "cpu.max")
    if quota_and_period is None:
        quota, period = _read_numbers(folder / "cpu.cfs_quota_us"), _read_numbers(folder / "cpu.cfs_period_us")
        quota_and_period = None if quota is None or period is None else (quota[0], period[0])
    return None if quota_and_period is None else quota_and_period[0] / quota_and_period[1]


def _read_memory(folder: Path) -> int | None:
    limit = _read_numbers(folder / "memory.max") or _read_numbers(folder / "memory.limit_in_bytes")
    return None if limit is None or limit[0] >= _NO_LIMIT_BYTES else limit[0]


def _read_processes(folder: Path) -> int | None:
    limit = _read_numbers(folder / "pids.max")
    return None if limit is None else limit[0]


def _read_numbers(path: Path) -> tuple[int, ...] | None:
    """Return the numbers in a file of a control group; None if it is not there or says that there is no limit."""
    try:
        words = path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return None
    return tuple(map(int, words)) if words and all(word.isdigit() for word in words) else None
