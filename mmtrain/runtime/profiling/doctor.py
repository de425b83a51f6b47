"""`mmtrain doctor`: examine what this machine can do, what would be slow and why, and what is missing."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from pydantic import BaseModel

from mmtrain.costs import preset
from mmtrain.costs.cost_table import MessageEntry
from mmtrain.costs.find_hardware import MEASURED_GEMM_SIDE
from mmtrain.costs.hardware import GIB
from mmtrain.errors import MmtrainError, PlanError
from mmtrain.models.attention import backend_problems, choose_backend
from mmtrain.models.kernels.choice import kernel_choices
from mmtrain.runtime.device_rates import TorchDevice, gemm_flops
from mmtrain.runtime.profiling.diagnostics import (
    accelerator_diagnostics,
    attention_diagnostics,
    throughput_diagnostics,
)
from mmtrain.runtime.profiling.host_diagnostics import Diagnostic
from mmtrain.runtime.profiling.host_report import MachineReport, examine_host
from mmtrain.runtime.profiling.message_profiler import measure_messages
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.world import Address, detect_hardware, join, leave

DRIVER_FILE = Path("/proc/driver/nvidia/version")
DOCTOR_MESSAGE_BYTES = (2**10, 2**22)
CORE_GEMM_SIDE = 1024  # on a core; on a GPU that of `find_hardware`
HEAD_DIMS = (128, 256, 512)  # the widest that kernels differ in; 512 stands for every wider one
NETWORK_REMEDY = "check firewalls and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"


class _MessageTimes(BaseModel):
    entries: list[MessageEntry]


def examine_machine(folder: Path, links: bool = True, commands: Sequence[str] = ()) -> MachineReport:
    """Examine this machine; `folder` is where runs would be written. With `links`, time messages between two ranks.

    commands: whose needs are checked.
    """
    host = examine_host(folder, commands)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    attention = {str(name): problem for name, problem in backend_problems(device, dtype).items()}
    by_head_dim: dict[int, str] = {width: choose_backend("auto", device, dtype, width) for width in HEAD_DIMS}
    findings = [*host.findings, *accelerator_diagnostics(cuda, backends["nccl"], attention)]
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
    return replace(
        host,
        versions={**host.versions, **gpu_software_versions()},
        devices=[*host.devices, *(_gpu_lines() if cuda else [])],
        preset=preset_name,
        backends=backends,
        attention=attention,
        attention_by_head_dim=by_head_dim,
        kernels=[
            str(choice) for choice in kernel_choices("auto", device, dtype, has_experts=True, has_delta_nets=True)
        ],
        flops=flops,
        messages=messages,
        findings=findings,
        peers=peer_lines(torch.cuda.device_count()) if cuda else [],
    )


def _gpu_lines() -> list[str]:
    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines.append(f"GPU {index}: {properties.name}, {properties.total_memory / GIB:.0f} GiB")
    return lines


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
