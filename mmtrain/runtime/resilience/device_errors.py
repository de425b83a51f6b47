"""Tell errors that a GPU reports of itself from those of a program, and name the node whose GPU it is.

CUDA says such an error in the texts of `cudaGetErrorString`. The driver writes an Xid line into the kernel's log, with
the address of the GPU on its bus (NVIDIA, "Xid Errors"). Many machines let only root read that log.
"""

import re
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import torch

MAX_LOG_READ_S = 5.0
_OF_DEVICES = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "hardware stack error",
    "fallen off the bus",
    "GPU is lost",
)
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
# Those of devices and their links; others, as 13, 31, 43 and 45, come from programs.
_XIDS_OF_DEVICES = {
    48: "uncorrectable ECC error",
    62: "internal halt of a micro-controller",
    64: "a bad row of memory could not be replaced",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "time-out of the GPU's system processor",
    120: "error of the GPU's system processor",
}


def describe_device_error(
    error: BaseException,
    rank: int,
    bus_address: Callable[[], str | None] | None = None,
    read_log: Callable[[], str] | None = None,
) -> str | None:
    """Name the node and what its GPU reports, if an error comes from the device; None for any other error.

    bus_address: of this process's GPU, such as `0000:3b:00`; the log's lines on other GPUs say nothing of it.
    """
    text = str(error)
    said = next((of_device for of_device in _OF_DEVICES if of_device in text), None)
    if said is None and "CUDA error" not in text:
        return None
    address = (bus_address or own_bus_address)()
    xid = newest_xid((read_log or read_kernel_log)(), address)
    if said is None and xid is None:
        return None
    of_log = f" (Xid {xid}: {_XIDS_OF_DEVICES[xid]})" if xid is not None else ""
    where = f"rank {rank} on {socket.gethostname()}" + (f", GPU at {address}" if address else "")
    return (
        f"{where}: the GPU reports {said or 'an error of its own'}{of_log}. Take the node out or reset the GPU, and "
        "start the run again with --resume"
    )


def newest_xid(log: str, address: str | None) -> int | None:
    """Return the last Xid of a device in the kernel's log, of the GPU at an address if that is known."""
    numbers = [
        int(number)
        for bus, number in _XID.findall(log)
        if address is None or bus.lower().split(".")[0] == address.lower()
    ]
    return next((number for number in reversed(numbers) if number in _XIDS_OF_DEVICES), None)


def own_bus_address() -> str | None:
    """Return the address of this process's GPU on its bus, as the kernel's log writes it; None if it cannot be told."""
    try:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        bus = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    except (RuntimeError, AttributeError):  # the device is gone, or torch does not know
        return None
    return "{:04x}:{:02x}:{:02x}".format(*bus)


def read_kernel_log() -> str:
    """Return the kernel's log; empty if this user may not read it."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=MAX_LOG_READ_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
