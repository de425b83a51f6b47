"""Hardware presets: what one rank can compute, move and hold, with the source of every number.

Rates are per rank and per direction. Peaks are dense rates (data sheets print twice that, with sparsity). A GEMM
reaches `gemm_efficiency` of the peak when all its sides are large; see `Hardware.efficiency_at` for smaller ones.
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
MIB = 2**20
US = 1e-6

_FLASH_ATTENTION_2 = ("flash_attn", "varlen")  # torch's `varlen` holds the same kernels

GEMM_TILE_ELEMENTS = 128 * 128  # of a product; larger tiles are taken only where they fill the GPU as well
ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2}  # of an activation


@dataclass(frozen=True)
class Link:
    """A connection between two ranks."""

    bytes_per_s: float
    latency_s: float  # of a message
    step_s: float  # of one step of a collective, which one kernel or thread takes after another

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
    half_efficiency_side: float  # length of one side (on a GPU: the depth) at which a GEMM reaches half of that
    attention_efficiency: float  # share of the peak inside attention's forward, by one of `attention_backends`
    attention_backends: tuple[str, ...]  # values of `train.attention`
    memory_bytes_per_s: float
    memory_bytes: float
    kernel_launch_s: float  # of the smallest kernel, with the Python around it
    intra_node: Link
    inter_node: Link
    ranks_per_node: int
    channel_bytes: float = 0.0  # of a communicator of two ranks, for messages
    communicator_bytes: float = 0.0  # of a communicator for collectives
    collective_start_s: float = 0.0  # what a collective takes before its first step
    ports_per_rank: float = 1.0  # network ports of a node per rank on it; `inter_node` is one of them
    post_s: float = 0.0  # how long each end of a message, however small, keeps its rank from computing
    cut_s: float = 0.0  # what a pass loses each time it stops inside a layer and goes on; 0: not measured
    attention_backward_efficiency: float = 0.0  # the same share in backward; 0: as in forward
    num_multiprocessors: int = 0  # of a GPU, among which the tiles of a GEMM are dealt out
    memory_efficiency: float = 1.0  # share of `memory_bytes_per_s` that element-wise kernels reach
    slowest_rank_ratio: float = 1.0  # compute time of the slowest rank, for which all wait, over that of a mean one
    expected_ratio: float = 1.15  # within which a modelled step time is expected to lie of the measured one
    overlap_slowdown: float = 1.0  # share of a collective's time that GEMMs beside it lose; 1: nothing is hidden
    host_bytes_per_s: float | None = None  # to or from pinned host memory; None: memory is the host's
    host_memory_bytes: float = 0.0  # that a rank may fill with activations

    @property
    def band(self) -> str:
        """Return within what a modelled step time is expected to lie of the measured one, as text."""
        ratio = self.expected_ratio
        return f"within {ratio - 1:.0%}" if ratio < 2 else f"within a factor of {ratio:g}"

    @property
    def moved_bytes_per_s(self) -> float:
        """Return the bytes that element-wise kernels read and write in a second."""
        return self.memory_bytes_per_s * self.memory_efficiency

    def overlapped(self, collective_s: float, compute_s: float) -> float:
        """Return by how much a collective lengthens the compute that runs beside it."""
        hidden_s = min(collective_s, compute_s)
        return collective_s - hidden_s + self.overlap_slowdown * hidden_s

    def peak_flops(self, precision: Precision) -> float:
        """Return the FLOP/s that efficiencies and MFU refer to."""
        return self.fp32_flops if precision == "fp32" else self.bf16_flops

    def link(self, same_node: bool) -> Link:
        """Return the connection between two ranks."""
        return self.intra_node if same_node else self.inter_node

    def efficiency_at(self, m: int, n: int, k: int) -> float:
        """Return the share of the peak that an (m, k) x (k, n) GEMM reaches: it saturates in each side.

        A GPU computes the product tile by tile, all its multiprocessors at once. The last wave of tiles fills them half
        on average; exactly how much depends on sizes that vary from microbatch to microbatch. Each tile starts and ends
        with memory traffic that only a deep product hides.
        """
        half = self.half_efficiency_side
        depth = k / (k + half)
        if self.num_multiprocessors:
            half_wave = self.num_multiprocessors * GEMM_TILE_ELEMENTS / 2
            return self.gemm_efficiency * depth * m * n / (m * n + half_wave)
        return self.gemm_efficiency * depth * (m / (m + half)) * (n / (n + half))


# Measured with torch 2.13, one thread of an AMD EPYC (Zen 4) core: fp32 GEMMs of sides 32 to 2048 reach 13 to
# 99 GFLOP/s, within 25% of the curve below; streaming through main memory reads and writes 25 GB/s. Small blocks of
# this package, profiled as a run computes them (the demo's layers, on an Intel Xeon), take about 25 us for each
# kernel, Python included. Cores differ from each other and from themselves under load: steps took 1.1 to 2.9 times as
# long as predicted.
# Links: gloo over loopback, about 2 GB/s and 100 us a message, and of each end's own processor time about 0.2 ms
# (bench_posting at 3874c7cf). A pass of a ViT's blocks that stops behind each piece loses 0.07 ms a stop in forward and
# 0.19 ms in backward, least of 60 repeats on an Intel Xeon. Memory: 4 GiB is a usual share of one core.
_CPU_CORE = Hardware(
    name="cpu-core",
    fp32_flops=100e9,
    bf16_flops=100e9,
    gemm_efficiency=0.9,
    half_efficiency_side=8,
    attention_efficiency=0.3,
    attention_backends=("sdpa",),
    memory_bytes_per_s=25 * GB,
    memory_bytes=4 * GIB,
    kernel_launch_s=25 * US,
    intra_node=Link(2 * GB, 100 * US, 100 * US),
    inter_node=Link(1 * GB, 200 * US, 200 * US),
    ranks_per_node=64,
    post_s=200 * US,
    cut_s=130 * US,
    expected_ratio=3.0,
)

# Estimates, not measured: no preset has met two GPUs yet. NCCL allocates for each connection and thread block a buffer
# of 4 MiB (NCCL_BUFFSIZE) and smaller ones for short messages, about 5 MiB. A channel has 8 thread blocks and one
# connection; a ring for collectives has up to 16 thread blocks and two connections.
_NCCL_CHANNEL_BYTES = 40 * MIB
_NCCL_COMMUNICATOR_BYTES = 160 * MIB

# What NVLink and InfiniBand carry, for the three presets below. NCCL counts 20 GB/s for each of an A100's 12 NVLinks
# and 20.6 for each of an H100's 18 (src/graph/topo.h); its tests reach 233 GB/s on 8 A100 (NVIDIA/nccl#1048). A port of
# 200 Gb/s carries 24 GB/s (the same place), one of 400 Gb/s 48 (NVIDIA/nccl-tests#267). Steps lie between those of
# NCCL's protocols for small and for large messages, LL and LL128: 0.6 and 1.9 us over NVLink, 2.7 and 4.0 between
# nodes, and 7 and 14 us to begin (src/graph/tuning.cc).

# What all three share. Among ranks that wait for each other at every layer or microbatch the slowest sets the pace.
# GPUs of one type differ by 8% on average in sustained compute (Sinha et al., "Not All GPUs Are Created Equal", SC22),
# a standard deviation of about 2%, and the slowest of 8 to 512 lies 1.4 to 3 deviations behind the mean. A collective
# of NCCL runs 16 to 24 thread blocks, each on a multiprocessor that GEMMs beside it lose: 0.15 of the GPU.
# The expected ratio of 1.15 holds for all 23 published runs of scripts/bench_known.py, with their frameworks' kernels.
_SLOWEST_OF_GPUS = 1.04
_NCCL_OVERLAP_SLOWDOWN = 0.15

# Host memory: a copy over PCIe x16 reaches 80% of one direction, which carries 31.5 GB/s in generation 4 (A100) and 63
# in generation 5 (H100), while all GPUs of a node copy: an estimate. A DGX A100 and a DGX H100 have 2 TB for 8 GPUs
# (data sheets); half of a rank's share is left to the loader, to checkpoints and to what the allocator rounds up.
_PCIE_4_BYTES_PER_S = 25 * GB
_PCIE_5_BYTES_PER_S = 50 * GB
_HALF_OF_HOST_SHARE = 2000 * GB / 8 / 2

# NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s bf16, 19.5 fp32, 2039 GB/s, NVLink 600 GB/s in both directions together.
# DGX A100 data sheet: 8 GPUs, one 200 Gb/s InfiniBand port each. GEMMs: within its 400 W it sustains 1,305 of 1,410 MHz
# (NVIDIA's clock for HPL), times 0.93 for what a large product reaches at that clock. A tile's start and end cost as
# much as a depth of 128. Attention: FlashAttention-2 (arXiv 2307.08691) reports up to 225 TFLOP/s forward and 190
# backward with heads of 128, causal runs of 2,000 to 8,000 tokens less: 0.6 and 0.5. Element-wise kernels: 85% of the
# memory's rate, as copies do.
_A100 = Hardware(
    name="a100-80g",
    fp32_flops=19.5e12,
    bf16_flops=312e12,
    gemm_efficiency=0.86,
    half_efficiency_side=128,
    attention_efficiency=0.6,
    attention_backward_efficiency=0.5,
    attention_backends=_FLASH_ATTENTION_2,
    memory_bytes_per_s=2039 * GB,
    memory_efficiency=0.85,
    memory_bytes=80 * GB,
    kernel_launch_s=5 * US,
    intra_node=Link(240 * GB, 10 * US, 1 * US),
    inter_node=Link(24 * GB, 20 * US, 4 * US),
    ranks_per_node=8,
    channel_bytes=_NCCL_CHANNEL_BYTES,
    communicator_bytes=_NCCL_COMMUNICATOR_BYTES,
    collective_start_s=10 * US,
    num_multiprocessors=108,
    slowest_rank_ratio=_SLOWEST_OF_GPUS,
    overlap_slowdown=_NCCL_OVERLAP_SLOWDOWN,
    host_bytes_per_s=_PCIE_4_BYTES_PER_S,
    host_memory_bytes=_HALF_OF_HOST_SHARE,
)

# NVIDIA A800 SXM: an A100 whose NVLink has 400 GB/s in both directions together instead of 600 (Reuters, 2022-11-07).
# Efficiencies and ports between nodes are taken to be the A100's; no published run of this GPU has been compared.
_A800 = replace(_A100, name="a800-80g", intra_node=Link(160 * GB, 10 * US, 1 * US))

# NVIDIA H100 SXM data sheet: 989 TFLOP/s bf16 dense, 67 fp32, 3.35 TB/s, NVLink 900 GB/s in both directions together.
# DGX H100 data sheet: 8 GPUs, one 400 Gb/s InfiniBand port each. GEMMs: the peak is counted at 1,830 MHz, of which
# 700 W sustain about 1,400 in training, times 0.88; an estimate, with which scripts/bench_known.py agrees. Its cores do
# twice an A100's arithmetic in a cycle while latencies stay, so a tile's start and end cost as much as a depth of 256.
# Attention: FlashAttention-3 (arXiv 2407.08608) gives 35% forward for FlashAttention-2 on this GPU, which every torch
# brings, and 75% for itself, which a measured table will hold; backward of FlashAttention-2 is a little slower.
_H100 = Hardware(
    name="h100-80g",
    fp32_flops=67e12,
    bf16_flops=989e12,
    gemm_efficiency=0.67,
    half_efficiency_side=256,
    attention_efficiency=0.35,
    attention_backward_efficiency=0.3,
    attention_backends=_FLASH_ATTENTION_2,
    memory_bytes_per_s=3350 * GB,
    memory_efficiency=0.85,
    memory_bytes=80 * GB,
    kernel_launch_s=5 * US,
    intra_node=Link(370 * GB, 10 * US, 1 * US),
    inter_node=Link(48 * GB, 20 * US, 4 * US),
    ranks_per_node=8,
    channel_bytes=_NCCL_CHANNEL_BYTES,
    communicator_bytes=_NCCL_COMMUNICATOR_BYTES,
    collective_start_s=10 * US,
    num_multiprocessors=132,
    slowest_rank_ratio=_SLOWEST_OF_GPUS,
    overlap_slowdown=_NCCL_OVERLAP_SLOWDOWN,
    host_bytes_per_s=_PCIE_5_BYTES_PER_S,
    host_memory_bytes=_HALF_OF_HOST_SHARE,
)

# NVIDIA H200 SXM data sheet: the H100's compute with 141 GB at 4.8 TB/s. DGX H200: links as in DGX H100.
_H200 = replace(_H100, name="h200-141g", memory_bytes_per_s=4800 * GB, memory_bytes=141 * GB)

PRESETS = {h.name: h for h in (_CPU_CORE, _A100, _A800, _H100, _H200)}
CORE_PREFIX = "one core of "  # of what `mmtrain profile` names a processor
_DEVICE_NAMES = {"A100": "a100-80g", "A800": "a800-80g", "H100": "h100-80g", "H200": "h200-141g"}


def preset(name: str) -> Hardware:
    """Return the preset called `name`, or the only one whose name starts so (`h100`).

    Raises:
        PlanError: there is none; the message suggests the nearest name.
    """
    matches = [name] if name in PRESETS else [known for known in PRESETS if known.startswith(name)]
    if len(matches) == 1:
        return PRESETS[matches[0]]
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
    if (known := _preset_of_gpu(device_name)) is not None:
        return known
    raise PlanError(
        f"cluster.hardware: `auto` knows no preset for this machine's device `{device_name}`. "
        f"Set the closest of {', '.join(PRESETS)}, and cluster.memory_gib if its memory differs."
    )


def is_other_hardware(preset_name: str, device_name: str) -> bool:
    """Return whether a device is certainly not what a preset describes: a core for a GPU, or a GPU of another preset.

    device_name: as `mmtrain profile` writes it. A GPU without a preset may be measured under the closest one.
    """
    if device_name.startswith(CORE_PREFIX):
        return preset_name != "cpu-core"
    known = _preset_of_gpu(device_name)
    return known is not None and known != preset_name


def _preset_of_gpu(device_name: str) -> str | None:
    words = re.split(r"[^A-Z0-9]+", device_name.upper())
    return next((name for mark, name in _DEVICE_NAMES.items() if mark in words), None)  # as a word: a GH200 is no H200
