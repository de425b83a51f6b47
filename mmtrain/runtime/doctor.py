"""`mmtrain doctor`: what this machine can do, what would be slow and why, and what is missing for which command."""

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import psutil
import torch
import torch.distributed as dist
from pydantic import BaseModel

from mmtrain.costs import preset_for_device
from mmtrain.costs.hardware import GIB
from mmtrain.costs.table import MessageEntry
from mmtrain.errors import MmtrainError, PlanError
from mmtrain.models.attention import problems
from mmtrain.runtime.launch import launch_local
from mmtrain.runtime.profile import device_name, measure_messages
from mmtrain.runtime.world import Address, join, leave

QUICK_BYTES = (2**10, 2**22)
FEW_FILES, LITTLE_DISK, LITTLE_SHARED = 4096, 10 * GIB, GIB
PACKAGES = ("torch", "megatron-core", "numpy", "tokenizers", "safetensors", "pydantic", "pillow")
# Module, extra that brings it, and what cannot be done without.
OPTIONAL = (
    ("soundfile", "audio", "recipes with model.audio, `mmtrain data digits`"),
    ("av", "video", "samples with videos"),
    ("pyarrow", "parquet", "sources in Parquet"),
    ("zmq", "serve", "`mmtrain data serve` and data.producers"),
    ("matplotlib", "report", "pictures of `mmtrain data stats --png`"),
)
TALK = "look at firewalls, and at GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class Finding:
    """Something a user may want to change."""

    kind: Literal["slow", "missing"]
    what: str
    remedy: str


@dataclass(frozen=True)
class Health:
    """Everything `doctor` found."""

    versions: dict[str, str]
    devices: list[str]
    preset: str | None  # stands for this hardware in plans
    backends: dict[str, bool]  # of torch.distributed
    attention: dict[str, str | None]  # backend -> why it cannot be used, in the precision training takes by default
    messages: dict[str, list[float]] = field(default_factory=dict)  # kind -> seconds of 1 KiB and of 4 MiB
    findings: list[Finding] = field(default_factory=list)


class _Measured(BaseModel):
    entries: list[MessageEntry]


def examine(folder: Path, links: bool = True) -> Health:
    """Look at this machine; `folder` is where runs would be written. `links` times messages of two ranks."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    attention = {str(name): problem for name, problem in problems(device, dtype).items()}
    findings = [*_missing(), *_hardware(cuda, backends, attention), *_system(folder)]
    messages: dict[str, list[float]] = {}
    if links and (not cuda or torch.cuda.device_count() > 1):
        try:
            messages = _links()
        except MmtrainError as error:
            findings.append(Finding("missing", f"two processes of this machine cannot talk: {error}", TALK))
    try:
        preset = preset_for_device(torch.cuda.get_device_name(0) if cuda else None)
    except PlanError as error:
        preset = None
        findings.append(Finding("missing", "plans for this hardware", str(error)))
    return Health(_versions(), _devices(cuda), preset, backends, attention, messages, findings)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "mmtrain": importlib.metadata.version("mmtrain")}
    return found | {name: importlib.metadata.version(name) for name in PACKAGES}


def _devices(cuda: bool) -> list[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = device_name(torch.device("cpu")).removeprefix("one core of ")
    memory = psutil.virtual_memory()
    host = f"{cores} cores, {name}, {memory.total / GIB:.0f} GiB memory, {memory.available / GIB:.0f} GiB free"
    gpus = []
    for index in range(torch.cuda.device_count() if cuda else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(f"GPU {index}: {properties.name}, {properties.total_memory / GIB:.0f} GiB")
    return [host, *gpus]


def _missing() -> list[Finding]:
    return [
        Finding("missing", f"{module}, for {purpose}", f"pip install 'mmtrain[{extra}]'")
        for module, extra, purpose in OPTIONAL
        if importlib.util.find_spec(module) is None
    ]


def _hardware(cuda: bool, backends: dict[str, bool], attention: dict[str, str | None]) -> list[Finding]:
    if not cuda:
        return [Finding("slow", "no GPU: models beyond some million parameters take long", "train where GPUs are")]
    found = []
    if not backends["nccl"]:
        found.append(Finding("missing", "NCCL, for more than one GPU", "install a CUDA build of torch"))
    fused = [attention[name] for name in ("flash_attn", "varlen") if name in attention]
    if all(problem is not None for problem in fused):
        found.append(
            Finding("slow", f"attention has no fused kernel for packed sequences: {fused[0]}", "see `attention` above")
        )
    return found


def _system(folder: Path) -> list[Finding]:
    found = []
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < LITTLE_DISK:
        found.append(
            Finding("slow", f"{free / GIB:.1f} GiB of disk free in {existing}", "checkpoints need room; see --run-dir")
        )
    shared = Path("/dev/shm")
    if shared.exists() and shutil.disk_usage(shared).total < LITTLE_SHARED:
        found.append(
            Finding("slow", "/dev/shm is small, which data workers and NCCL use", "docker run --shm-size=8g or more")
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < FEW_FILES:
        found.append(
            Finding("slow", f"{files} open files allowed; many ranks and workers need more", "ulimit -n 65536")
        )
    return found


def _links() -> dict[str, list[float]]:
    """Seconds of messages between two ranks started as `train` would."""
    with TemporaryDirectory(prefix="mmtrain-doctor-") as folder:
        out = Path(folder) / "links.json"
        launch_local(2, partial(_measure_rank, out))
        entries = _Measured.model_validate_json(out.read_text(encoding="utf-8")).entries
    return {entry.kind: list(entry.seconds) for entry in entries}


def _measure_rank(out: Path, address: Address) -> None:
    world = join(address)
    entries = measure_messages(world, QUICK_BYTES)
    if world.is_first:
        out.write_text(_Measured(entries=entries).model_dump_json(), encoding="utf-8")
    leave()
