"""What `mmtrain doctor` says of GPUs' software, of connections between GPUs, and of this machine's networks."""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import torch

from mmtrain.runtime.profiling.diagnostics import Diagnostic

DRIVER_FILE = Path("/proc/driver/nvidia/version")
INFINIBAND_FOLDER = Path("/sys/class/infiniband")
LOOPBACK = "lo"


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
