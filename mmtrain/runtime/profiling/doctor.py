"""`mmtrain doctor`: examine what this machine can do, what would be slow and why, and what is missing."""

import contextlib
import importlib.metadata
import platform
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
import torch.distributed as dist
from pydantic import BaseModel

from mmtrain.costs import preset
from mmtrain.costs.cost_table import MessageEntry
from mmtrain.costs.hardware import GIB
from mmtrain.errors import MmtrainError, PlanError
from mmtrain.models.attention import backend_problems
from mmtrain.runtime.profiling.diagnostics import (
    Diagnostic,
    accelerator_diagnostics,
    host_diagnostics,
    num_usable_cores,
    package_diagnostics,
    throughput_diagnostics,
)
from mmtrain.runtime.profiling.profile import device_name, measure_messages
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.world import Address, detect_hardware, join, leave

DOCTOR_MESSAGE_BYTES = (2**10, 2**22)
NUM_TIMED_GEMMS = 5
PACKAGES = ("torch", "megatron-core", "numpy", "tokenizers", "jinja2", "safetensors", "pydantic", "pillow")
EXTRA_PACKAGES = ("flash-attn", "soundfile", "av", "pyarrow", "pyzmq", "matplotlib")
NETWORK_REMEDY = "check firewalls and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class MachineReport:
    """Everything that `doctor` found; the keys of its JSON."""

    versions: dict[str, str]
    devices: list[str]
    preset: str | None  # of this hardware, in plans
    backends: dict[str, bool]  # of torch.distributed
    attention: dict[str, str | None]  # backend -> why it cannot be used with the default precision; None: it can
    flops: float  # FLOP/s of large GEMMs on one rank: a GPU, or one core
    messages: dict[str, list[float]] = field(default_factory=dict)  # kind -> seconds of 1 KiB and of 4 MiB
    findings: list[Diagnostic] = field(default_factory=list)


class _MessageTimes(BaseModel):
    entries: list[MessageEntry]


def examine_machine(folder: Path, links: bool = True) -> MachineReport:
    """Examine this machine; `folder` is where runs would be written. With `links`, time messages between two ranks."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    attention = {str(name): problem for name, problem in backend_problems(device, dtype).items()}
    findings = [*package_diagnostics(), *accelerator_diagnostics(cuda, backends["nccl"], attention)]
    findings += host_diagnostics(folder, psutil.virtual_memory().available)
    messages: dict[str, list[float]] = {}
    if links and (not cuda or torch.cuda.device_count() > 1):
        try:
            messages = _time_messages()
        except MmtrainError as error:
            what = f"communication between two processes of this machine: {error}"
            findings.append(Diagnostic("missing", what, NETWORK_REMEDY, ("train", "profile")))
    preset_name = None
    flops = _gemm_rate(device, dtype)
    try:
        preset_name = detect_hardware()
        findings += throughput_diagnostics(preset(preset_name), "bf16" if cuda else "fp32", flops, messages)
    except PlanError as error:
        findings.append(Diagnostic("missing", "plans for this hardware", str(error), ("plan", "train")))
    return MachineReport(_versions(), _devices(cuda), preset_name, backends, attention, flops, messages, findings)


def _versions() -> dict[str, str]:
    """Return the versions of required packages, and of optional ones that are installed."""
    versions = {"python": platform.python_version()}
    for name in ("mmtrain", *PACKAGES, *EXTRA_PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _devices(cuda: bool) -> list[str]:
    """Describe the host and its GPUs, one line each."""
    name = device_name(torch.device("cpu")).removeprefix("one core of ")
    memory = psutil.virtual_memory()
    total, free = memory.total / GIB, memory.available / GIB
    host = f"{num_usable_cores()} cores, {name}, {total:.0f} GiB memory, {free:.0f} GiB free"
    gpus = []
    for index in range(torch.cuda.device_count() if cuda else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(f"GPU {index}: {properties.name}, {properties.total_memory / GIB:.0f} GiB")
    return [host, *gpus]


def _gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large GEMM on one rank's share of this machine: a GPU, or one core."""
    side = 8192 if device.type == "cuda" else 1024
    # Random: on constants a GPU draws less power, and so clocks up to 13% higher than on weights.
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = []
        for _ in range(NUM_TIMED_GEMMS):
            _synchronize(device)
            start_s = time.perf_counter()
            a @ b
            _synchronize(device)
            seconds.append(time.perf_counter() - start_s)
    finally:
        torch.set_num_threads(threads)
    return 2 * side**3 / min(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_messages() -> dict[str, list[float]]:
    """Return seconds of messages between two ranks, which are started as `train` starts them."""
    with TemporaryDirectory(prefix="mmtrain-doctor-") as folder:
        out = Path(folder) / "links.json"
        launch_local(2, partial(_measure_rank, out))
        entries = _MessageTimes.model_validate_json(out.read_text(encoding="utf-8")).entries
    return {entry.kind: list(entry.seconds) for entry in entries}


def _measure_rank(out: Path, address: Address) -> None:
    world = join(address)
    entries = measure_messages(world, DOCTOR_MESSAGE_BYTES)
    if world.is_first:
        out.write_text(_MessageTimes(entries=entries).model_dump_json(), encoding="utf-8")
    leave()
