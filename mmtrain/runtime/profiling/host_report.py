"""What `mmtrain doctor` finds without torch: versions, the host, its networks, and what each command needs."""

import contextlib
import importlib.metadata
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mmtrain.costs.hardware import GIB
from mmtrain.extras import CommandState, command_state
from mmtrain.limited_reads import can_leave_network
from mmtrain.machine_limits import machine_limits, num_available_cores
from mmtrain.runtime.profiling.host_diagnostics import Diagnostic, host_diagnostics, package_diagnostics

INFINIBAND_FOLDER = Path("/sys/class/infiniband")
LOOPBACK = "lo"
PACKAGES = ("torch", "megatron-core", "numpy", "tokenizers", "jinja2", "safetensors", "pydantic", "pillow")
EXTRA_PACKAGES = (
    *("triton", "liger-kernel", "flash-attn-3", "flash-attn-4", "flash-attn", "transformer-engine"),
    *("soundfile", "av", "pyarrow", "pyzmq", "matplotlib"),
)


@dataclass(frozen=True)
class MachineReport:
    """Everything that `doctor` found; the keys of its JSON."""

    versions: dict[str, str]
    devices: list[str]
    # These need torch; without it they are empty.
    preset: str | None = None  # of this hardware, in plans
    backends: dict[str, bool] = field(default_factory=dict)  # of torch.distributed
    # Backend, in the order of `auto` -> why it cannot be used with the default precision; None: it can.
    attention: dict[str, str | None] = field(default_factory=dict)
    attention_by_head_dim: dict[int, str] = field(default_factory=dict)  # width of heads, up to which -> backend
    kernels: list[str] = field(default_factory=list)  # operations between GEMMs, each with the form of `auto`, and why
    flops: float | None = None  # FLOP/s of large GEMMs on one rank: a GPU, or one core
    messages: dict[str, list[float]] = field(default_factory=dict)  # kind -> seconds of 1 KiB and of 4 MiB
    findings: list[Diagnostic] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)  # which GPUs reach each other directly
    network: list[str] = field(default_factory=list)  # interfaces, and variables that choose among them
    commands: list[CommandState] = field(default_factory=list)


def examine_host(folder: Path, commands: Sequence[str]) -> MachineReport:
    """Examine this machine without torch; `folder` is where runs would be written. Check the needs of `commands`."""
    findings = [*package_diagnostics(), *host_diagnostics(folder, usable_memory()[1], machine_limits())]
    return MachineReport(
        versions=_versions(),
        devices=[_host_line()],
        findings=[*findings, *network_diagnostics()],
        network=[*network_lines(), isolation_line()],
        commands=[command_state(command) for command in commands],
    )


def _versions() -> dict[str, str]:
    """Return the versions of Python, mmtrain, and its packages that are installed."""
    versions = {"python": platform.python_version()}
    for name in ("mmtrain", *PACKAGES, *EXTRA_PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _host_line() -> str:
    total, free = (num_bytes / GIB for num_bytes in usable_memory())
    return f"{num_available_cores()} cores, {processor_name()}, {total:.0f} GiB memory, {free:.0f} GiB free"


def processor_name() -> str:
    """Return the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def usable_memory() -> tuple[int, int]:
    """Return how many bytes of memory this process may use, and how many of them no process uses now."""
    memory = psutil.virtual_memory()
    limit = machine_limits().memory_bytes or memory.total
    return min(memory.total, limit), min(memory.available, limit)


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


def isolation_line() -> str:
    """Say whether what reads files of others is without network here."""
    if can_leave_network():
        return "none for what reads files of others"
    return "the kernel lets no process leave the network: what reads files of others keeps it"


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
