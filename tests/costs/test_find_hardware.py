"""Which preset describes a device, and what stands for a GPU that none describes."""

from dataclasses import replace

import pytest

from mmtrain.costs import PRESETS, preset, preset_for_device
from mmtrain.costs.find_hardware import MeasuredDevice, is_other_hardware, is_same_hardware, slowest_hardware
from mmtrain.costs.hardware import GB, GIB
from mmtrain.costs.hardware_presets import DEVICE_WORDS
from mmtrain.errors import PlanError

GH200 = MeasuredDevice("NVIDIA GH200 480GB", 612, 51, 3121, 94.5, 132, 1)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (None, "cpu-core"),
        ("NVIDIA H200", "h200-141g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A800-SXM4-80GB", "a800-80g"),
        ("NVIDIA B300 SXM6 AC", "b300-270g"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("NVIDIA GB10", "gb10-128g"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24g"),
        ("NVIDIA RTX A6000", "a6000-48g"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-96g"),
        ("AMD Instinct MI300X", "mi300x-192g"),
        ("NVIDIA GH200 480GB", None),
        ("Tesla T4", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
    ],
)
def test_the_device_name_decides_on_the_preset(device: str | None, name: str | None) -> None:
    assert preset_for_device(device) == name


def test_an_unknown_preset_names_the_nearest_and_a_prefix_may_have_variants() -> None:
    with pytest.raises(PlanError, match=r"cluster\.hardware: `h100x` is not a known preset; did you mean `h100-80g`\?"):
        preset("h100x")
    with pytest.raises(PlanError, match=r"`rtx` is not a known preset; it may be `rtx-pro-6000-96g` or `rtx-4090-24g`"):
        preset("rtx")
    assert preset("h100") is preset("h100-80g")
    assert preset("a100") is preset("a100-80g"), "other presets are this one with fewer ports"
    assert set(DEVICE_WORDS.values()) <= set(PRESETS)


def test_presets_of_papers_have_the_networks_that_they_state() -> None:
    def port_gbit_per_node(name: str) -> float:
        hardware = preset(name)
        return hardware.ports_per_rank * hardware.ranks_per_node * hardware.inter_node.bytes_per_s * 8 / 1e9 / 0.96

    assert port_gbit_per_node("a100-80g-4x200") == pytest.approx(4 * 200)  # OmniBal, table 15
    assert port_gbit_per_node("a100-80g-2x200") == pytest.approx(2 * 200)
    assert port_gbit_per_node("h100-80g") == pytest.approx(8 * 400)
    assert port_gbit_per_node("a800-80g-4x200") == pytest.approx(4 * 200)  # MMScale, section 7
    mmscale = preset("a800-80g-4x200")
    assert mmscale.rail_optimized
    assert mmscale.intra_node.bytes_per_s / preset("a100-80g").intra_node.bytes_per_s == 300 / 600


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"cpu-core"}))
def test_a_preset_is_consistent(name: str) -> None:
    """Dense peaks, not sparse ones: about 15 TFLOP/s a multiprocessor at most, and links slower than memory."""
    hardware = PRESETS[name]
    assert hardware.name == name
    assert hardware.bf16_flops / hardware.num_multiprocessors < 17e12
    assert 3 < hardware.bf16_flops / hardware.fp32_flops < 32 or "rtx" in name
    assert hardware.inter_node.bytes_per_s * hardware.ports_per_rank <= hardware.intra_node.bytes_per_s * 1.21
    assert hardware.intra_node.bytes_per_s < hardware.memory_bytes_per_s
    assert hardware.ports_per_rank * hardware.ranks_per_node == pytest.approx(
        round(hardware.ports_per_rank * hardware.ranks_per_node)
    ), "a node has whole ports"
    assert hardware.memory_bytes < 300 * GB


def test_a_measured_gpu_is_known_by_its_name_alone() -> None:
    name = str(GH200)
    assert MeasuredDevice.parse(name) == GH200
    hardware = preset(name)
    assert hardware.name == name
    assert hardware.memory_bytes == 94.5 * GIB
    assert hardware.bf16_flops * hardware.efficiency_at(8192, 8192, 8192) == pytest.approx(612e12)
    assert hardware.moved_bytes_per_s == 3121 * GB
    assert (hardware.ranks_per_node, hardware.ports_per_rank, hardware.host_memory_bytes) == (1, 1.0, 0.0)
    eight = replace(GH200, ranks=8, peer=310.0)
    assert preset(str(eight)).intra_node.bytes_per_s == 310 * GB
    assert preset(str(eight)).ports_per_rank == 1 / 8


@pytest.mark.parametrize(
    "values", ["", "bf16=612", "bf16=x,fp32=51,memory=1,gib=1,processors=1,ranks=1", "bf16=1,fp32=1,speed=3"]
)
def test_a_text_that_describes_no_measured_gpu_is_rejected(values: str) -> None:
    with pytest.raises(PlanError, match=r"does not describe a measured GPU; allowed: a text like `measured/NVIDIA"):
        preset(f"measured/NVIDIA GH200 480GB/{values}")
    with pytest.raises(PlanError, match="holds a number that is not above 0"):
        preset(str(replace(GH200, memory=0.0)))


def test_a_gpu_that_was_measured_twice_is_the_same_hardware() -> None:
    again, other = replace(GH200, bf16=607.0), replace(GH200, device="Tesla T4")
    assert is_same_hardware(str(GH200), str(again))
    assert not is_same_hardware(str(GH200), str(other))
    assert not is_same_hardware("a100-80g", "a100-80g-2x200")
    assert not is_other_hardware("a100-80g-2x200", "NVIDIA A100-SXM4-80GB"), "the same GPU with fewer ports"
    assert is_other_hardware("h100-80g", "NVIDIA A100-SXM4-80GB")
    assert not is_other_hardware(str(GH200), GH200.device)


def test_ranks_of_two_kinds_are_planned_as_the_slowest_if_they_differ_little() -> None:
    assert slowest_hardware(["h100-80g", "h200-141g"]) == "h100-80g"
    assert slowest_hardware(["mi300x-192g", "h100-80g", "mi300x-192g"]) == "mi300x-192g"
    with pytest.raises(
        PlanError,
        match=r"h100-80g \(rank 0\) computes 3\.1 times as fast as a100-80g \(rank 8\).* up to 2 times",
    ):
        slowest_hardware(["h100-80g"] * 8 + ["a100-80g"] * 8)
