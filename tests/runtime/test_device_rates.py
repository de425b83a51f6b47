"""A GPU without a preset is measured: here a fake one, and the operations themselves on a CPU."""

from dataclasses import dataclass

import pytest
import torch

from mmtrain.costs import preset
from mmtrain.errors import PlanError
from mmtrain.runtime import device_rates, world
from mmtrain.runtime.device_rates import (
    COPIED_BYTES,
    FP32_GEMM_SIDE,
    TorchDevice,
    describe_measured,
    gemm_flops,
    measure_device,
)


@dataclass(frozen=True)
class FakeGpu:
    """A GPU of 500 TFLOP/s in bf16 and 50 in fp32, 2 TB/s and 90 GiB, beside a second one."""

    name: str = "NVIDIA GH200 480GB"
    memory_bytes: int = 90 * 2**30
    num_multiprocessors: int = 132
    num_devices: int = 2
    is_full: bool = False

    def gemm_seconds(self, dtype: torch.dtype, side: int) -> float:
        """Return the seconds of 2 side^3 FLOP at the rate of the type."""
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert side == (8192 if dtype == torch.bfloat16 else FP32_GEMM_SIDE)
        return 2 * side**3 / (500e12 if dtype == torch.bfloat16 else 50e12)

    def copy_seconds(self, nbytes: int) -> float:
        """Return the seconds of reading and writing at 2 TB/s."""
        return 2 * nbytes / 2e12

    def peer_copy_seconds(self, nbytes: int) -> float | None:
        """Return the seconds of a copy at 25 GB/s, if there is another GPU."""
        return nbytes / 25e9 if self.num_devices > 1 else None


def test_a_gpu_without_a_preset_is_planned_for_as_measured() -> None:
    measured = measure_device(FakeGpu())
    hardware = preset(str(measured))
    assert hardware.bf16_flops * hardware.efficiency_at(8192, 8192, 8192) == pytest.approx(500e12)
    assert hardware.moved_bytes_per_s == pytest.approx(2e12)
    assert hardware.memory_bytes == 90 * 2**30
    assert hardware.intra_node.bytes_per_s == pytest.approx(25e9)
    assert hardware.ranks_per_node == 2
    assert measure_device(FakeGpu(num_devices=1)).peer == 0.0
    text = describe_measured(measured)
    for figure in ("`NVIDIA GH200 480GB`", "500 TFLOP/s", "2000 GB/s", "another GPU (25 GB/s)", "90 GiB", "estimates"):
        assert figure in text


def test_a_gpu_whose_memory_others_hold_is_named() -> None:
    with pytest.raises(PlanError, match=r"cannot measure it, since other processes hold its memory\. Allowed"):
        measure_device(FakeGpu(is_full=True))


def test_the_operations_run_on_any_device_of_torch() -> None:
    core = TorchDevice(torch.device("cpu"))
    assert 0 < gemm_flops(core, torch.float32, 64) < 1e15
    assert core.copy_seconds(2**16) > 0
    assert core.peer_copy_seconds(2**16) is None
    assert COPIED_BYTES > 2**27, "an L2 cache of 126 MB would hide the memory"


def test_without_a_preset_the_machine_has_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a machine with two such GPUs, of which the process sees what a launcher gave it."""
    monkeypatch.setattr(device_rates, "TorchDevice", lambda device: FakeGpu())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(world, "find_address", lambda: None)
    device_rates.hardware_of_gpu.cache_clear()
    try:
        name = world.detect_hardware()
        assert name == str(measure_device(FakeGpu()))
        assert world.detect_hardware(torch.device("cuda", 1)) == name
        assert world.detect_hardware(torch.device("cpu")) == "cpu-core"
        assert "no preset describes `NVIDIA GH200 480GB`" in capsys.readouterr().err
    finally:
        device_rates.hardware_of_gpu.cache_clear()
