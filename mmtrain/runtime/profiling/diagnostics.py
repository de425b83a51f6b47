"""What `doctor` looks for: packages that are missing for some command, and what would slow a machine down and why."""

import importlib
import importlib.metadata
import os
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import Requirement

from mmtrain.costs.hardware import GIB, Hardware, Precision

MIN_OPEN_FILES = 4096
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
    """Something a user may want to change."""

    kind: Literal["slow", "missing"]
    what: str
    remedy: str
    commands: tuple[str, ...] = ()  # of mmtrain that it concerns; none where it is all of them


@dataclass(frozen=True)
class _OptionalPackage:
    module: str
    extra: str  # of mmtrain, that brings it
    purpose: str  # what cannot be done without
    commands: tuple[str, ...]


OPTIONAL_PACKAGES = (
    _OptionalPackage("soundfile", "audio", "recipes with model.audio", ("data digits", *DATA_READING_COMMANDS)),
    _OptionalPackage("av", "video", "samples with videos", DATA_READING_COMMANDS),
    _OptionalPackage("pyarrow", "parquet", "sources in Parquet", DATA_READING_COMMANDS),
    _OptionalPackage("zmq", "serve", "producers on other machines (data.producers)", ("data serve", "train")),
    _OptionalPackage("matplotlib", "report", "pictures (--png)", ("report", "data stats")),
)


def package_diagnostics() -> Iterator[Diagnostic]:
    """Packages that are absent, broken, or of a version that mmtrain is not made for."""
    for name in OPTIONAL_PACKAGES:
        try:
            importlib.import_module(name.module)
        except ImportError:
            remedy = f"pip install 'mmtrain[{name.extra}]'"
            yield Diagnostic("missing", f"{name.module}, for {name.purpose}", remedy, name.commands)
        except OSError as error:  # the package is there, a library it loads is not
            what = f"a library that {name.module} loads, for {name.purpose}: {error}"
            yield Diagnostic("missing", what, "install it with the system's packages", name.commands)
    yield from unmet_requirements(importlib.metadata.requires("mmtrain") or ())


def unmet_requirements(requirements: Iterable[str]) -> Iterator[Diagnostic]:
    """Requirements of mmtrain itself that the installed packages do not meet."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Diagnostic("missing", f"{requirement.name}, which mmtrain needs", f"pip install '{requirement}'")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            what = f"{requirement.name} {found} is installed, mmtrain is made for {requirement.specifier}"
            yield Diagnostic("missing", what, f"pip install '{requirement}'")


def accelerator_diagnostics(
    cuda: bool, nccl: bool, attention: Mapping[str, str | None], gpu_file: Path = Path("/dev/nvidia0")
) -> Iterator[Diagnostic]:
    """GPUs that torch cannot use, or not as fast as they are."""
    if not cuda and gpu_file.exists():
        build = "is a CPU build" if torch.version.cuda is None else f"is built for CUDA {torch.version.cuda}"
        what = f"a GPU is there, but torch {torch.__version__} cannot use it: it {build}"
        yield Diagnostic(
            "missing", what, "install a CUDA build of torch that the driver supports", ("train", "profile")
        )
        return
    if not cuda:
        what = "no GPU: models beyond some million parameters take long"
        yield Diagnostic("slow", what, "train where GPUs are; `plan` needs none", ("train", "evaluate", "profile"))
        return
    if not nccl:
        yield Diagnostic("missing", "NCCL, for more than one GPU", "install a CUDA build of torch", ("train",))
    fused = [attention[name] for name in ("flash_attn", "varlen") if name in attention]
    if all(problem is not None for problem in fused):
        what = f"attention has no fused kernel for packed sequences: {fused[0]}"
        yield Diagnostic("slow", what, "see `attention` above", ("train", "evaluate"))
    yield from _each_gpu()


def _each_gpu() -> Iterator[Diagnostic]:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if len(set(names)) > 1:
        what = f"GPUs differ ({', '.join(dict.fromkeys(names))}): every step waits for the slowest"
        yield Diagnostic("slow", what, "choose alike ones with CUDA_VISIBLE_DEVICES", ("train",))
    for index, name in enumerate(names):
        if not torch.cuda.get_device_capability(index) >= (8, 0):
            what = f"GPU {index}, {name}, has no bf16 units"
            yield Diagnostic("slow", what, "train.precision: fp32, or an Ampere GPU or newer", ("train",))
        free, total = torch.cuda.mem_get_info(index)
        if free < (1 - MAX_FOREIGN_GPU_MEMORY_SHARE) * total:
            what = f"{(total - free) / GIB:.0f} of {total / GIB:.0f} GiB of GPU {index} are taken by other processes"
            yield Diagnostic("slow", what, "end them (see nvidia-smi), or set cluster.memory_gib", ("train",))
        if index and not torch.cuda.can_device_access_peer(index, 0):
            what = f"GPU {index} cannot reach the memory of GPU 0: messages go through the host"
            yield Diagnostic("slow", what, "see `nvidia-smi topo -m`", ("train",))


def throughput_diagnostics(
    machine: Hardware, precision: Precision, flops: float, messages: Mapping[str, list[float]]
) -> Iterator[Diagnostic]:
    """Products and messages that are much slower than the preset assumes, by which plans without a table are made.

    flops: rate of large products, in FLOP/s; messages: seconds of a small and of a 4 MiB one, by kind.
    """
    assumed = machine.peak_flops(precision) * machine.gemm_efficiency
    measure = "`mmtrain profile RECIPE`, and name its table in cluster.costs"
    if flops < MIN_GEMM_RATE_SHARE * assumed:
        what = (
            f"large products reach {flops / 1e12:.3g} TFLOP/s, {flops / assumed:.0%} of what the preset "
            f"{machine.name} assumes: predictions without a table are too short"
        )
        yield Diagnostic("slow", what, measure, ("plan", "simulate"))
    if "p2p" in messages:
        rate, link = 2**22 / messages["p2p"][-1], machine.intra_node.bytes_per_s
        if rate < MIN_MESSAGE_RATE_SHARE * link:
            what = (
                f"messages between two processes reach {rate / 1e9:.3g} GB/s, {rate / link:.0%} of what the preset "
                f"{machine.name} assumes"
            )
            yield Diagnostic("slow", what, measure, ("train", "plan"))


def host_diagnostics(folder: Path, free_memory: float, cgroup: Path = Path("/sys/fs/cgroup")) -> Iterator[Diagnostic]:
    """Limits of the system: disk, shared memory, memory, cores, open files. `folder` is where runs would be written."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < MIN_FREE_DISK_BYTES:
        what = f"{free / GIB:.1f} GiB of disk free in {existing}"
        yield Diagnostic("slow", what, "checkpoints need room; see --run-dir", ("train",))
    if not os.access(existing, os.W_OK):
        yield Diagnostic("missing", f"leave to write in {existing}", "another --run-dir", ("train",))
    shared = Path("/dev/shm")
    if shared.exists() and shutil.disk_usage(shared).total < MIN_SHARED_MEMORY_BYTES:
        what = "/dev/shm is small, which data workers and NCCL use"
        yield Diagnostic("slow", what, "docker run --shm-size=8g or more", ("train", "data serve"))
    if free_memory < MIN_FREE_MEMORY_BYTES:
        what = f"{free_memory / GIB:.1f} GiB of memory free: each rank takes half a GiB before any model"
        yield Diagnostic("slow", what, "end other programs", ("train", "evaluate", "profile"))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES:
        what = f"{files} open files allowed; many ranks and workers need more"
        yield Diagnostic("slow", what, "ulimit -n 65536", ("train", "data serve"))
    yield from _container(cgroup)


def _container(cgroup: Path) -> Iterator[Diagnostic]:
    """Limits of a container, which `cores` and `memory` above do not show."""
    quota = _first_word(cgroup / "cpu.max")
    if quota is not None:
        period = int((cgroup / "cpu.max").read_text().split()[1])
        cores = quota / period
        if cores < 0.9 * num_usable_cores():
            available = num_usable_cores()
            what = (
                f"this container may use {cores:.3g} of the {available} cores: ranks and workers are held up in turns"
            )
            yield Diagnostic("slow", what, "docker run --cpus, or fewer ranks and data.workers", ("train",))
    memory = _first_word(cgroup / "memory.max")
    if memory is not None and memory < 2 * MIN_FREE_MEMORY_BYTES:
        what = f"this container may use {memory / GIB:.1f} GiB of memory; processes beyond that are killed"
        yield Diagnostic("slow", what, "docker run --memory", ("train", "evaluate", "profile"))


def _first_word(path: Path) -> int | None:
    """The limit in a file of a control group; None where there is none."""
    try:
        word = path.read_text().split()[0]
    except (OSError, IndexError):
        return None
    return int(word) if word.isdigit() else None


def num_usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
