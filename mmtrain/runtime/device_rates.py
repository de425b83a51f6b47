"""Measure a GPU that no preset describes: a GEMM, a copy, a copy to another GPU, and what its driver says of it.

Nothing here is special to one vendor or generation: any device that torch calls `cuda` runs it, and so do the tests
on a CPU.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch

from mmtrain.costs.find_hardware import MEASURED_GEMM_SIDE, MeasuredDevice, preset_for_device
from mmtrain.costs.hardware import GB, GIB
from mmtrain.errors import PlanError
from mmtrain.runtime.rendezvous import print_note

NUM_REPEATS = 5  # of each operation, after one that warms up; the least counts
COPIED_BYTES = 2**28  # far more than any cache holds
FP32_GEMM_SIDE = 4096  # where fp32 is up to forty times as slow as bf16


class Device(Protocol):
    """A GPU, as far as it is measured."""

    @property
    def name(self) -> str:
        """CUDA's name of it."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Its memory, as the driver says."""
        ...

    @property
    def num_multiprocessors(self) -> int:
        """Its multiprocessors, as the driver says."""
        ...

    @property
    def num_devices(self) -> int:
        """The GPUs of the machine."""
        ...

    def gemm_seconds(self, dtype: torch.dtype, side: int) -> float:
        """Return the seconds of a product of two square matrices."""
        ...

    def copy_seconds(self, nbytes: int) -> float:
        """Return the seconds in which `nbytes` are read and written."""
        ...

    def peer_copy_seconds(self, nbytes: int) -> float | None:
        """Return the seconds in which `nbytes` go to another GPU of the machine; None if there is none."""
        ...


@dataclass(frozen=True)
class TorchDevice:
    """A device of torch, which measures itself."""

    device: torch.device

    @property
    def name(self) -> str:
        """CUDA's name of it."""
        return torch.cuda.get_device_name(self.device)

    @property
    def memory_bytes(self) -> int:
        """Its memory, as the driver says."""
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def num_multiprocessors(self) -> int:
        """Its multiprocessors, as the driver says."""
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @property
    def num_devices(self) -> int:
        """The GPUs of the machine."""
        return torch.cuda.device_count()

    def gemm_seconds(self, dtype: torch.dtype, side: int) -> float:
        """Return the seconds of a product of two square matrices; one thread of a CPU computes it."""
        # Random: on constants a GPU draws less power, and so clocks up to 13% higher than on weights.
        a, b = (torch.randn(side, side, dtype=dtype, device=self.device) for _ in range(2))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._least_seconds(lambda: a @ b)
        finally:
            torch.set_num_threads(threads)

    def copy_seconds(self, nbytes: int) -> float:
        """Return the seconds in which `nbytes` are read and written."""
        source = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        return self._least_seconds(partial(torch.empty_like(source).copy_, source))

    def peer_copy_seconds(self, nbytes: int) -> float | None:
        """Return the seconds in which `nbytes` go to another GPU of the machine; None if there is none."""
        if self.device.type != "cuda" or self.num_devices < 2:
            return None
        peer = torch.device("cuda", ((self.device.index or 0) + 1) % self.num_devices)
        source = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        return self._least_seconds(partial(torch.empty_like(source, device=peer).copy_, source))

    def _least_seconds(self, operation: Callable[[], object]) -> float:
        seconds = []
        for _ in range(1 + NUM_REPEATS):
            self._synchronize()
            start_s = time.perf_counter()
            operation()
            self._synchronize()
            seconds.append(time.perf_counter() - start_s)
        return min(seconds[1:])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def gemm_flops(device: Device, dtype: torch.dtype, side: int) -> float:
    """Return the FLOP/s of a product of two square matrices."""
    return 2 * side**3 / device.gemm_seconds(dtype, side)


def measure_device(device: Device) -> MeasuredDevice:
    """Measure a GPU.

    Raises:
        PlanError: its memory does not hold three matrices, because other processes hold it.
    """
    try:
        peer_s = device.peer_copy_seconds(COPIED_BYTES)
        return MeasuredDevice(
            device=device.name,
            bf16=gemm_flops(device, torch.bfloat16, MEASURED_GEMM_SIDE) / 1e12,
            fp32=gemm_flops(device, torch.float32, FP32_GEMM_SIDE) / 1e12,
            memory=2 * COPIED_BYTES / device.copy_seconds(COPIED_BYTES) / GB,
            gib=device.memory_bytes / GIB,
            processors=device.num_multiprocessors,
            ranks=device.num_devices,
            peer=0.0 if peer_s is None else COPIED_BYTES / peer_s / GB,
        )
    except torch.OutOfMemoryError as error:
        raise PlanError(
            f"cluster.hardware: `auto` finds no preset for `{device.name}`, and cannot measure it, since other "
            "processes hold its memory. Allowed: a preset, or `auto` with a gibibyte free. End those processes (see "
            "nvidia-smi), or set the closest preset, and cluster.memory_gib if its memory differs"
        ) from error


@cache
def hardware_of_gpu(index: int, notify: bool) -> str:
    """Return the hardware of a GPU: its preset, or what is measured of it; the cache spares measuring it again.

    notify: say on stderr what a plan for a measured GPU rests on.
    """
    device = TorchDevice(torch.device("cuda", index))
    known = preset_for_device(device.name)
    if known is not None:
        return known
    measured = measure_device(device)
    torch.cuda.empty_cache()
    if notify:
        print_note(describe_measured(measured))
    return str(measured)


def describe_measured(measured: MeasuredDevice) -> str:
    """Say what a plan for a GPU without a preset rests on, and what would make it better."""
    peer = f"a copy to another GPU ({measured.peer:.3g} GB/s), " if measured.peer else ""
    return (
        f"cluster.hardware: no preset describes `{measured.device}`, so plans rest on what was measured here: a GEMM "
        f"({measured.bf16:.3g} TFLOP/s in bf16), a copy ({measured.memory:.4g} GB/s), {peer}and the memory that the "
        f"driver states ({measured.gib:.3g} GiB). Attention and links are estimates. State "
        "cluster.intra_node_gb_per_s, cluster.ports_per_node and cluster.inter_node_gb_per_s, or measure with "
        "`mmtrain profile` and set cluster.costs"
    )
