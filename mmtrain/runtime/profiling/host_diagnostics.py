"""Find packages that commands lack, and limits of the system that are too low, for `mmtrain doctor`. Without torch."""

import importlib
import importlib.metadata
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from mmtrain.costs.hardware import GIB
from mmtrain.extras import EXTRAS, Extra, listed
from mmtrain.machine_limits import MachineLimits, max_processes
from mmtrain.system_calls import num_scheduled_cores, user_limit

# Chosen by hand: with less, a run on one machine is slow or fails.
MIN_OPEN_FILES = 4096
MIN_PROCESSES = 1024
MIN_FREE_DISK_BYTES = 10 * GIB
MIN_SHARED_MEMORY_BYTES = GIB
MIN_FREE_MEMORY_BYTES = 2 * GIB


@dataclass(frozen=True)
class Diagnostic:
    """Something a user may want to change on this machine."""

    kind: Literal["slow", "missing"]
    what: str
    remedy: str
    commands: tuple[str, ...] = ()  # of mmtrain that it concerns; empty: all of them


def package_diagnostics() -> Iterator[Diagnostic]:
    """Yield packages that are absent, broken, or of a version that mmtrain does not support."""
    for extra in EXTRAS:
        yield from _extra_diagnostics(extra)
    try:
        requirements = importlib.metadata.requires("mmtrain") or ()
    except importlib.metadata.PackageNotFoundError:  # run from a tree that is not installed
        what = "mmtrain's own list of requirements: it runs from a folder and is not installed, so that no versions are"
        yield Diagnostic("missing", f"{what} compared", "pip install -e .")
        return
    extras = importlib.metadata.metadata("mmtrain").get_all("Provides-Extra") or ()
    yield from unmet_requirements(requirements, [extra for extra in extras if extra != "dev"])


def unmet_requirements(requirements: Iterable[str], extras: Sequence[str] = ()) -> Iterator[Diagnostic]:
    """Yield requirements of mmtrain that the installed packages do not meet; those of `extras` may be absent."""
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        is_required = marker is None or marker.evaluate({"extra": ""})
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        remedy = f"pip install '{requirement.name}{requirement.specifier}'"
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if is_required:
                yield Diagnostic("missing", f"{requirement.name}, which mmtrain needs", remedy)
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            what = f"{requirement.name} {installed} is installed, mmtrain supports {requirement.specifier}"
            yield Diagnostic("missing", what, remedy)


def _extra_diagnostics(extra: Extra) -> Iterator[Diagnostic]:
    """Yield the packages of an extra that are absent, and the libraries that its packages fail to load."""
    absent = []
    for module, package in extra.modules.items():
        try:
            importlib.import_module(module)
        except ImportError:
            absent.append(package)
        except OSError as error:  # the package is there, a library that it loads is not
            what = f"a library that {package} loads, for {extra.purpose}: {error}"
            yield Diagnostic("missing", what, "install it with the system's package manager", extra.commands)
    if absent:
        what = f"{listed(absent)}, for {extra.purpose}"
        yield Diagnostic("missing", what, extra.install, extra.commands)


def host_diagnostics(folder: Path, free_memory: float, limits: MachineLimits) -> Iterator[Diagnostic]:
    """Yield limits of the system that are too low: disk, shared memory, memory, cores, open files, processes.

    `folder` is where runs would be written; `free_memory` is in bytes; `limits` are those of the container.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < MIN_FREE_DISK_BYTES:
        what = f"{free / GIB:.1f} GiB of disk free in {existing}"
        yield Diagnostic("slow", what, "checkpoints need space; choose another --run-dir", ("train",))
    if not os.access(existing, os.W_OK):
        yield Diagnostic("missing", f"permission to write in {existing}", "choose another --run-dir", ("train",))
    shared = Path("/dev/shm")
    if shared.exists() and shutil.disk_usage(shared).total < MIN_SHARED_MEMORY_BYTES:
        what = "/dev/shm is small, and data workers and NCCL use it"
        yield Diagnostic("slow", what, "docker run --shm-size=8g or more", ("train", "data serve"))
    if free_memory < MIN_FREE_MEMORY_BYTES:
        what = f"{free_memory / GIB:.1f} GiB of memory free: each rank needs half a GiB before any model"
        yield Diagnostic("slow", what, "end other programs", ("train", "evaluate", "profile"))
    files = user_limit("open files")
    if files is not None and files < MIN_OPEN_FILES:
        what = f"{files} open files allowed; many ranks and workers need more"
        yield Diagnostic("slow", what, "ulimit -n 65536", ("train", "data serve"))
    processes = max_processes(limits)
    if processes is not None and processes < MIN_PROCESSES:
        what = f"{processes} processes and threads allowed; each rank has dozens"
        yield Diagnostic("slow", what, "ulimit -u, docker run --pids-limit", ("train", "data serve"))
    yield from _container_diagnostics(limits)


def _container_diagnostics(limits: MachineLimits) -> Iterator[Diagnostic]:
    """Yield limits of a container, which the machine's own cores and memory do not show."""
    if limits.cores is not None and limits.cores < num_scheduled_cores():
        cores = f"{limits.cores:.3g} of the {num_scheduled_cores()} cores"
        what = f"this container may use {cores}: more ranks and workers than that are throttled"
        yield Diagnostic("slow", what, "docker run --cpus, or fewer ranks", ("train",))
    memory = limits.memory_bytes
    if memory is not None and memory < 2 * MIN_FREE_MEMORY_BYTES:
        what = f"this container may use {memory / GIB:.1f} GiB of memory; processes beyond that are killed"
        yield Diagnostic("slow", what, "docker run --memory", ("train", "evaluate", "profile"))
