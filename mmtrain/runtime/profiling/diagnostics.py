"""Find packages that commands lack, and what slows this machine down, for `mmtrain doctor`."""

import importlib
import importlib.metadata
import os
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import Requirement

from mmtrain.costs.hardware import GIB, Hardware, Precision
from mmtrain.machine_limits import MachineLimits, max_processes, num_scheduled_cores
from mmtrain.models.attention import FUSED_KERNELS

# Chosen by hand: with less, a run on one machine is slow or fails.
MIN_OPEN_FILES = 4096
MIN_PROCESSES = 1024
MIN_FREE_DISK_BYTES = 10 * GIB
MIN_SHARED_MEMORY_BYTES = GIB
MIN_FREE_MEMORY_BYTES = 2 * GIB
MAX_FOREIGN_GPU_MEMORY_SHARE = 0.1  # of a GPU's memory, held by other processes; more is reported
MIN_GEMM_RATE_SHARE = 0.5  # of the rate that the preset assumes; less is reported
MIN_MESSAGE_RATE_SHARE = 0.2  # of the rate that the preset assumes; less is reported
DATA_READING_COMMANDS = (
    *("data stats", "data group", "data check", "data serve"),
    *("plan", "profile", "simulate", "report", "train", "evaluate"),
)


@dataclass(frozen=True)
class Diagnostic:
    """Something a user may want to change on this machine."""

    kind: Literal["slow", "missing"]
    what: str
    remedy: str
    commands: tuple[str, ...] = ()  # of mmtrain that it concerns; empty: all of them


@dataclass(frozen=True)
class _OptionalPackage:
    module: str
    extra: str  # of mmtrain that installs it
    purpose: str  # what needs it
    commands: tuple[str, ...]


OPTIONAL_PACKAGES = (
    _OptionalPackage("soundfile", "audio", "recipes with an audio encoder", ("data digits", *DATA_READING_COMMANDS)),
    _OptionalPackage("av", "video", "samples with videos", DATA_READING_COMMANDS),
    _OptionalPackage("pyarrow", "parquet", "sources in Parquet", DATA_READING_COMMANDS),
    _OptionalPackage("zmq", "serve", "producers on other machines (data.producers)", ("data serve", "train")),
    _OptionalPackage("matplotlib", "report", "pictures (--png)", ("report", "data stats")),
)


def package_diagnostics() -> Iterator[Diagnostic]:
    """Yield packages that are absent, broken, or of a version that mmtrain does not support."""
    for package in OPTIONAL_PACKAGES:
        try:
            importlib.import_module(package.module)
        except ImportError:
            remedy = f"pip install 'mmtrain[{package.extra}]'"
            yield Diagnostic("missing", f"{package.module}, for {package.purpose}", remedy, package.commands)
        except OSError as error:  # the package is there, a library that it loads is not
            what = f"a library that {package.module} loads, for {package.purpose}: {error}"
            yield Diagnostic("missing", what, "install it with the system's package manager", package.commands)
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


def accelerator_diagnostics(
    cuda: bool, nccl: bool, attention: Mapping[str, str | None], gpu_file: Path = Path("/dev/nvidia0")
) -> Iterator[Diagnostic]:
    """Yield GPUs that torch cannot use, or not at full speed; `attention` maps a backend to why it cannot be used."""
    if not cuda and gpu_file.exists():
        build = "is a CPU build" if torch.version.cuda is None else f"is built for CUDA {torch.version.cuda}"
        what = f"this machine has a GPU, but torch {torch.__version__} cannot use it: it {build}"
        yield Diagnostic(
            "missing", what, "install a CUDA build of torch that the driver supports", ("train", "profile")
        )
        return
    if not cuda:
        what = "this machine has no GPU: models beyond some million parameters train slowly"
        yield Diagnostic(
            "slow", what, "train on a machine with GPUs; `plan` needs none", ("train", "evaluate", "profile")
        )
        return
    if not nccl:
        yield Diagnostic("missing", "NCCL, for more than one GPU", "install a CUDA build of torch", ("train",))
    yield from _attention_kernel_diagnostics(attention)
    yield from _gpu_diagnostics()


def _attention_kernel_diagnostics(attention: Mapping[str, str | None]) -> Iterator[Diagnostic]:
    """Yield a GPU without a fused kernel for attention, or without the one that is made for it."""
    problems = {name: attention[name] for name in FUSED_KERNELS if name in attention}
    if all(problems.values()):
        reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        what = f"attention has no fused kernel for packed sequences ({reasons})"
        yield Diagnostic("slow", what, "see `attention` above", ("train", "evaluate"))
        return
    major, _ = torch.cuda.get_device_capability(0)
    selected = next(name for name, problem in problems.items() if problem is None)
    fits_newer = FUSED_KERNELS["flash_attn_4"].widest_head(major) > 0
    if fits_newer and selected in ("flash_attn", "varlen"):
        # FlashAttention-3 (arXiv 2407.08608): 75% of the peak of an H100, against 35% of FlashAttention-2.
        what = (
            f"attention runs on FlashAttention-2's kernels ({selected}), which are about half as fast as those for "
            "Hopper and newer"
        )
        yield Diagnostic("slow", what, FUSED_KERNELS["flash_attn_4"].install, ("train", "evaluate"))


def _gpu_diagnostics() -> Iterator[Diagnostic]:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if len(set(names)) > 1:
        what = f"GPUs differ ({', '.join(dict.fromkeys(names))}): every step waits for the slowest"
        yield Diagnostic("slow", what, "choose GPUs of one kind with CUDA_VISIBLE_DEVICES", ("train",))
    for index, name in enumerate(names):
        if not torch.cuda.get_device_capability(index) >= (8, 0):
            what = f"GPU {index}, {name}, has no bf16 units"
            yield Diagnostic("slow", what, "train.precision: fp32, or an Ampere GPU or newer", ("train",))
        free, total = torch.cuda.mem_get_info(index)
        if free < (1 - MAX_FOREIGN_GPU_MEMORY_SHARE) * total:
            what = f"{(total - free) / GIB:.0f} of {total / GIB:.0f} GiB of GPU {index} are used by other processes"
            yield Diagnostic("slow", what, "end those (see nvidia-smi), or set cluster.memory_gib", ("train",))
        if index and not torch.cuda.can_device_access_peer(index, 0):
            what = f"GPU {index} cannot reach the memory of GPU 0: messages between them go through the host"
            yield Diagnostic("slow", what, "see `nvidia-smi topo -m`", ("train",))


def throughput_diagnostics(
    machine: Hardware, precision: Precision, flops: float, messages: Mapping[str, list[float]]
) -> Iterator[Diagnostic]:
    """Yield GEMMs and messages that are much slower than the preset assumes, which plans without a cost table rely on.

    flops: rate of large GEMMs, in FLOP/s; messages: seconds of a small and of a 4 MiB message, by kind.
    """
    assumed = machine.peak_flops(precision) * machine.gemm_efficiency
    remedy = "run `mmtrain profile RECIPE`, and name its table in cluster.costs"
    if flops < MIN_GEMM_RATE_SHARE * assumed:
        what = (
            f"large GEMMs reach {flops / 1e12:.3g} TFLOP/s, {flops / assumed:.0%} of what the preset "
            f"{machine.name} assumes: predicted step times without a table are too short"
        )
        yield Diagnostic("slow", what, remedy, ("plan", "simulate"))
    if "p2p" in messages:
        rate, link = 2**22 / messages["p2p"][-1], machine.intra_node.bytes_per_s
        if rate < MIN_MESSAGE_RATE_SHARE * link:
            what = (
                f"messages between two processes reach {rate / 1e9:.3g} GB/s, {rate / link:.0%} of what the preset "
                f"{machine.name} assumes"
            )
            yield Diagnostic("slow", what, remedy, ("train", "plan"))


def attention_diagnostics(machine: Hardware, backend: str) -> Iterator[Diagnostic]:
    """Yield a backend of attention other than those whose rate the preset holds, which plans without a table use."""
    if backend not in machine.attention_backends:
        what = (
            f"the preset {machine.name} assumes attention by {' or '.join(machine.attention_backends)}, and `auto` "
            f"selects {backend} here: plans without a table predict attention at another rate"
        )
        yield Diagnostic("slow", what, "run `mmtrain profile RECIPE`, and name its table in cluster.costs", ("plan",))


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
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES:
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
