"""Hardware presets: what one rank can compute, move and hold, with the source of every number.

Rates are per rank and per direction. Peaks are dense rates (data sheets print twice that, with sparsity). A GEMM
reaches `gemm_efficiency` of the peak when all its sides are large; a side of `half_efficiency_side` halves that.
Presets are models: `mmtrain plan` prints "modelled" beside every figure that comes from here.
"""

import difflib
import re
from dataclasses import dataclass, replace
from typing import Literal

from mmtrain.errors import PlanError

Precision = Literal["fp32", "bf16"]
GB = 1e9
GIB = 2**30
US = 1e-6

ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2}  # of an activation


@dataclass(frozen=True)
class Link:
    """A connection between two ranks."""

    bytes_per_s: float
    latency_s: float

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of one message."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Hardware:
    """One kind of rank, and the links between ranks."""

    name: str
    fp32_flops: float  # FLOP/s of dense GEMMs
    bf16_flops: float
    gemm_efficiency: float  # share of the peak that a large GEMM reaches
    half_efficiency_side: float  # length of one side at which a GEMM reaches half of that
    attention_efficiency: float  # share of the peak inside attention
    memory_bytes_per_s: float
    memory_bytes: float
    kernel_launch_s: float  # of the smallest kernel, with the Python around it
    intra_node: Link
    inter_node: Link
    ranks_per_node: int
    post_s: float = 0.0  # how long each end of a message, however small, keeps its rank from computing

    def peak_flops(self, precision: Precision) -> float:
        """Return the FLOP/s that efficiencies and MFU refer to."""
        return self.fp32_flops if precision == "fp32" else self.bf16_flops

    def link(self, same_node: bool) -> Link:
        """Return the connection between two ranks."""
        return self.intra_node if same_node else self.inter_node

    def efficiency_at(self, m: int, n: int, k: int) -> float:
        """Return the share of the peak that an (m, k) x (k, n) GEMM reaches: it saturates in each side."""
        half = self.half_efficiency_side
        return self.gemm_efficiency * (m / (m + half)) * (n / (n + half)) * (k / (k + half))


# Measured with torch 2.13, one thread of an AMD EPYC (Zen 4) core: fp32 GEMMs of sides 32 to 2048 reach 13 to
# 99 GFLOP/s, within 25% of the curve below; streaming through main memory reads and writes 25 GB/s. Small blocks of
# this package, profiled as a run computes them (the demo's layers, on an Intel Xeon), take about 25 us for each
# kernel, Python included.
# Links: gloo over loopback, about 2 GB/s and 100 us a message, and of each end's own processor time about 0.2 ms
# (scripts/bench_posting.py). Memory: 4 GiB is a usual share of one core.
_CPU_CORE = Hardware(
    name="cpu-core",
    fp32_flops=100e9,
    bf16_flops=100e9,
    gemm_efficiency=0.9,
    half_efficiency_side=8,
    attention_efficiency=0.3,
    memory_bytes_per_s=25 * GB,
    memory_bytes=4 * GIB,
    kernel_launch_s=25 * US,
    intra_node=Link(2 * GB, 100 * US),
    inter_node=Link(1 * GB, 200 * US),
    ranks_per_node=64,
    post_s=200 * US,
)

# NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s bf16, 19.5 fp32, 2039 GB/s, NVLink 600 GB/s in both directions together.
# DGX A100 data sheet: 8 GPUs, one 200 Gb/s InfiniBand port each. Attention: FlashAttention-2 (arXiv 2307.08691)
# reports up to 225 of 312 TFLOP/s forward, less backward: 0.6. GEMMs: cuBLAS figures on public benchmarks lie near
# 0.85 of the peak for sides of 8192 and near half of it for sides of 1024; the curve is our fit to that.
_A100 = Hardware(
    name="a100-80g",
    fp32_flops=19.5e12,
    bf16_flops=312e12,
    gemm_efficiency=0.88,
    half_efficiency_side=160,
    attention_efficiency=0.6,
    memory_bytes_per_s=2039 * GB,
    memory_bytes=80 * GB,
    kernel_launch_s=5 * US,
    intra_node=Link(300 * GB, 10 * US),
    inter_node=Link(25 * GB, 20 * US),
    ranks_per_node=8,
)

# NVIDIA H100 SXM data sheet: 989 TFLOP/s bf16 dense, 67 fp32, 3.35 TB/s, NVLink 900 GB/s in both directions together.
# DGX H100 data sheet: 8 GPUs, one 400 Gb/s InfiniBand port each. Attention: FlashAttention-3 (arXiv 2407.08608) gives
# 35% for FlashAttention-2 on this GPU. GEMMs: near 0.7 of the peak for sides of 8192 (power-limited), 0.4 for 1024.
_H100 = Hardware(
    name="h100-80g",
    fp32_flops=67e12,
    bf16_flops=989e12,
    gemm_efficiency=0.76,
    half_efficiency_side=256,
    attention_efficiency=0.35,
    memory_bytes_per_s=3350 * GB,
    memory_bytes=80 * GB,
    kernel_launch_s=5 * US,
    intra_node=Link(450 * GB, 10 * US),
    inter_node=Link(50 * GB, 20 * US),
    ranks_per_node=8,
)

# NVIDIA H200 SXM data sheet: the H100's compute with 141 GB at 4.8 TB/s. DGX H200: links as in DGX H100.
_H200 = replace(_H100, name="h200-141g", memory_bytes_per_s=4800 * GB, memory_bytes=141 * GB)

PRESETS = {h.name: h for h in (_CPU_CORE, _A100, _H100, _H200)}
_DEVICE_NAMES = {"A100": "a100-80g", "H100": "h100-80g", "H200": "h200-141g"}


def preset(name: str) -> Hardware:
    """Return the preset called `name`.

    Raises:
        PlanError: there is none; the message suggests the nearest name.
    """
    if name in PRESETS:
        return PRESETS[name]
    nearest = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.3)
    hint = f"; did you mean `{nearest[0]}`?" if nearest else "."
    raise PlanError(
        f"cluster.hardware: `{name}` is not a known preset{hint} Known: {', '.join(PRESETS)}; "
        "`auto` takes the one of this machine."
    )


def preset_for_device(device_name: str | None) -> str:
    """Return the name of the preset for `auto`: `cpu-core` without a GPU, else by CUDA's name of the device.

    Raises:
        PlanError: the GPU has no preset; a plan for another GPU would mislead.
    """
    if device_name is None:
        return "cpu-core"
    words = re.split(r"[^A-Z0-9]+", device_name.upper())
    for mark, name in _DEVICE_NAMES.items():
        if mark in words:  # as a word: a GH200 is no H200
            return name
    raise PlanError(
        f"cluster.hardware: `auto` knows no preset for this machine's device `{device_name}`. "
        f"Set the closest of {', '.join(PRESETS)}, and cluster.memory_gib if its memory differs."
    )
