"""`mmtrain doctor`: examine what this machine can do, what would be slow and why, and what is missing."""

import contextlib
import importlib.metadata
import os
import platform
import re
import socket
from collections.abc import Iterator, Mapping
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
from mmtrain.costs.find_hardware import MEASURED_GEMM_SIDE
from mmtrain.costs.hardware import GIB
from mmtrain.errors import MmtrainError, PlanError
from mmtrain.machine_limits import machine_limits, num_available_cores
from mmtrain.models.attention import backend_problems, choose_backend
from mmtrain.models.kernels.choice import kernel_choices
from mmtrain.runtime.device_rates import TorchDevice, gemm_flops
from mmtrain.runtime.profiling.diagnostics import (
    Diagnostic,
    accelerator_diagnostics,
    attention_diagnostics,
    host_diagnostics,
    package_diagnostics,
    throughput_diagnostics,
)
from mmtrain.runtime.profiling.message_profiler import measure_messages
from mmtrain.runtime.profiling.profile import device_name
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.world import Address, detect_hardware, join, leave

DRIVER_FILE = Path("/proc/driver/nvidia/version")
INFINIBAND_FOLDER = Path("/sys/class/infiniband")
LOOPBACK = "lo"
DOCTOR_MESSAGE_BYTES = (2**10, 2**22)
CORE_GEMM_SIDE = 1024  # on a core; on a GPU that of `find_hardware`
PACKAGES = ("torch", "megatron-core", "numpy", "tokenizers", "jinja2", "safetensors", "pydantic", "pillow")
EXTRA_PACKAGES = (
    *("triton", "liger-kernel", "flash-attn-3", "flash-attn-4", "flash-attn", "transformer-engine"),
    *("soundfile", "av", "pyarrow", "pyzmq", "matplotlib"),
)
HEAD_DIMS = (128, 256, 512)  # the widest that kernels differ in; 512 stands for every wider one
NETWORK_REMEDY = "check firewalls and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class MachineReport:
    """Everything that `doctor` found; the keys of its JSON."""

    versions: dict[str, str]
    devices: list[str]
    preset: str | None  # of this hardware, in plans
    backends: dict[str, bool]  # of torch.distributed
    # Backend, in the order of `auto` -> why it cannot be used with the default precision; None: it can.
    attention: dict[str, str | None]
    attention_by_head_dim: dict[int, str]  # features of a head, up to which -> backend that `auto` selects
    kernels: list[str]  # operations between GEMMs, each with the form that `auto` selects, and why
    flops: float  # FLOP/s of large GEMMs on one rank: a GPU, or one core
    messages: dict[str, list[float]] = field(default_factory=dict)  # kind -> seconds of 1 KiB and of 4 MiB
    findings: list[Diagnostic] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)  # which GPUs reach each other directly
    network: list[str] = field(default_factory=list)  # interfaces, and variables that choose among them


class _MessageTimes(BaseModel):
    entries: list[MessageEntry]


def examine_machine(folder: Path, links: bool = True) -> MachineReport:
    """Examine this machine; `folder` is where runs would be written. With `links`, time messages between two ranks."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    attention = {str(name): problem for name, problem in backend_problems(device, dtype).items()}
    by_head_dim: dict[int, str] = {width: choose_backend("auto", device, dtype, width) for width in HEAD_DIMS}
    findings = [*package_diagnostics(), *accelerator_diagnostics(cuda, backends["nccl"], attention)]
    findings += host_diagnostics(folder, _usable_memory()[1], machine_limits())
    findings += network_diagnostics()
    messages: dict[str, list[float]] = {}
    if links and (not cuda or torch.cuda.device_count() > 1):
        try:
            messages = _time_messages()
        except MmtrainError as error:
            what = f"communication between two processes of this machine: {error}"
            findings.append(Diagnostic("missing", what, NETWORK_REMEDY, ("train", "profile")))
    preset_name = None
    flops = gemm_flops(TorchDevice(device), dtype, MEASURED_GEMM_SIDE if cuda else CORE_GEMM_SIDE)
    try:
        preset_name = detect_hardware()
        findings += throughput_diagnostics(preset(preset_name), "bf16" if cuda else "fp32", flops, messages)
        findings += attention_diagnostics(preset(preset_name), by_head_dim[HEAD_DIMS[0]])
    except PlanError as error:
        findings.append(Diagnostic("missing", "plans for this hardware", str(error), ("plan", "train")))
    peers = peer_lines(torch.cuda.device_count()) if cuda else []
    return MachineReport(
        versions=_versions(),
        devices=_devices(cuda),
        preset=preset_name,
        backends=backends,
        attention=attention,
        attention_by_head_dim=by_head_dim,
        kernels=[str(choice) for choice in kernel_choices("auto", device, dtype)],
        flops=flops,
        messages=messages,
        findings=findings,
        peers=peers,
        network=network_lines(),
    )


def _versions() -> dict[str, str]:
    """Return the versions of required packages, and of optional ones that are installed."""
    versions = {"python": platform.python_version()}
    for name in ("mmtrain", *PACKAGES, *EXTRA_PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {**versions, **gpu_software_versions()}


def _devices(cuda: bool) -> list[str]:
    """Describe the host and its GPUs, one line each."""
    name = device_name(torch.device("cpu")).removeprefix("one core of ")
    total, free = (num_bytes / GIB for num_bytes in _usable_memory())
    host = f"{num_available_cores()} cores, {name}, {total:.0f} GiB memory, {free:.0f} GiB free"
    gpus = []
    for index in range(torch.cuda.device_count() if cuda else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(f"GPU {index}: {properties.name}, {properties.total_memory / GIB:.0f} GiB")
    return [host, *gpus]


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


def _usable_memory() -> tuple[int, int]:
    """Return how many bytes of memory this process may use, and how many of them no process uses now."""
    memory = psutil.virtual_memory()
    limit = machine_limits().memory_bytes or memory.total
    return min(memory.total, limit), min(memory.available, limit)


def gpu_software_versions(driver_file: Path = DRIVER_FILE) -> dict[str, str]:
    """Return the versions of NVIDIA's driver and of the libraries that torch brings, as far as they are here."""
    versions = {}
    if (driver := _driver_version(driver_file)) is not None:
        versions["nvidia-driver"] = driver
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        if torch.distributed.is_nccl_available():
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions


def _driver_version(driver_file: Path) -> str | None:
    try:
        text = driver_file.read_text(encoding="utf-8")
    except OSError:
        return None
    # `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ...`, or `... Open Kernel Module for ...`.
    found = re.search(r"^NVRM version:.*?\b(\d+\.\d+(?:\.\d+)?)\b", text, re.MULTILINE)
    return found[1] if found else None


def peer_lines(num_gpus: int) -> list[str]:
    """Return for each of several GPUs which others it reaches without the host, by NVLink or PCIe."""
    lines = []
    for gpu in range(num_gpus) if num_gpus > 1 else ():
        others = [other for other in range(num_gpus) if other != gpu]
        peers = [str(other) for other in others if torch.cuda.can_device_access_peer(gpu, other)]
        lines.append(f"GPU {gpu} reaches {', '.join(peers) or 'no other GPU'} directly")
    return [*lines, "`nvidia-smi topo -m` says by what"] if lines else []


def network_lines(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the interfaces that ranks on other machines can reach, and what the environment says about them."""
    lines = []
    speeds = psutil.net_if_stats()
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        is_up = name in speeds and speeds[name].isup
        ip = next((address.address for address in addresses if address.family == socket.AF_INET), None)
        if is_up and ip is not None and name != LOOPBACK:
            speed = f", {speeds[name].speed / 1000:g} Gb/s" if speeds[name].speed else ""
            lines.append(f"{name} {ip}{speed}")
    if INFINIBAND_FOLDER.is_dir() and (devices := sorted(path.name for path in INFINIBAND_FOLDER.iterdir())):
        lines.append(f"InfiniBand or RoCE devices: {', '.join(devices)}")
    chosen = [f"{name}={env[name]}" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if env.get(name)]
    return [*(lines or ["none besides loopback"]), *chosen]


def network_diagnostics(env: Mapping[str, str] = os.environ) -> Iterator[Diagnostic]:
    """Yield variables that name an interface which this machine does not have: ranks would wait for each other."""
    present = sorted(psutil.net_if_addrs())
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = env.get(variable, "")
        if not value or value.startswith("^"):  # NCCL: all but these
            continue
        is_exact = variable.startswith("GLOO") or value.startswith("=")
        names = [name.partition(":")[0] for name in value.lstrip("=").split(",")]
        if not any(found == name or (not is_exact and found.startswith(name)) for found in present for name in names):
            what = f"{variable}: {value} found, and this machine has the interfaces {', '.join(present)}"
            yield Diagnostic("missing", what, f"name one of them, or unset {variable}", ("train", "profile"))
