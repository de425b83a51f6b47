"""Hardware presets, with the source of every number: what one rank of a kind can compute, move and hold.

Presets are models: `mmtrain plan` prints "modelled" beside every figure that comes from here, and how far predictions
of published runs on that GPU were off (`published_errors`).
"""

from dataclasses import replace

from mmtrain.costs.attention_kernels import (
    CUDNN_ON_HOPPER,
    FLASH_ATTENTION_2_ON_AMPERE,
    FLASH_ATTENTION_2_ON_HOPPER,
    FLASH_ATTENTION_3_ON_HOPPER,
    FLASH_ATTENTION_4_ON_BLACKWELL,
)
from mmtrain.costs.hardware import GB, GIB, MIB, US, Hardware, Link
from mmtrain.costs.time_spread import TimeSpread

# Measured GEMMs: ai-dynamo/aiconfigurator@095f58a5, aic-core/src/aiconfigurator_core/systems/data, has seconds of bf16
# GEMMs of 22 x 22 weights with 1 to 32,768 rows of random numbers, by SGLang and TensorRT-LLM. `gemm_efficiency` and
# `half_efficiency_side` of a GPU named there are fitted to all above 2 GFLOP, by the curve of `Hardware.efficiency_at`,
# beside 2.5 to 3.3 us of a kernel, which `kernel_launch_s` holds. Its vLLM collection has weights that are not random,
# which draws less power, and is left out.

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
    own_run_ratios=(1.1, 2.9),
)

# Estimates, not measured: no preset has met two GPUs yet. NCCL allocates for each connection and thread block a buffer
# of 4 MiB (NCCL_BUFFSIZE) and smaller ones for short messages, about 5 MiB. A channel has 8 thread blocks and one
# connection; a ring for collectives has up to 16 thread blocks and two connections.
_NCCL_CHANNEL_BYTES = 40 * MIB
_NCCL_COMMUNICATOR_BYTES = 160 * MIB

# Of the memory that CUDA states, what its context takes in each process (aiconfigurator, as above: 551 MB). NCCL's
# buffers are counted for each communicator, what the allocator loses as a share (`costs.rank_memory.MEMORY_MARGIN`).
_CUDA_CONTEXT_BYTES = 551e6

# What NVLink and InfiniBand carry, for A100, H100 and H200. NCCL counts 20 GB/s for each of an A100's 12 NVLinks
# and 20.6 for each of an H100's 18 (src/graph/topo.h); its tests reach 233 GB/s on 8 A100 (NVIDIA/nccl#1048). A port of
# 200 Gb/s carries 24 GB/s (the same place), one of 400 Gb/s 48 (NVIDIA/nccl-tests#267). Steps lie between those of
# NCCL's protocols for small and for large messages, LL and LL128: 0.6 and 1.9 us over NVLink, 2.7 and 4.0 between
# nodes, and 7 and 14 us to begin (src/graph/tuning.cc).

# What collectives inside a node reach of these rates: bytes a second from 256 to 512 MiB in isolated calls of NCCL 2.27
# (A100) and 2.29 (H100, H200) by 2, 4 and 8 GPUs (ai-dynamo/aiconfigurator@095f58a5, comm/nccl): gathers 158, 202 and
# 222 GB/s, all-reduces 199, 225 and 230 (A100); gathers 270, 329 and 345, all-reduces 328 and 356 (H100, H200). Eight
# of these reduce at 476 by NVLink SHARP, which is not counted on: not every cluster has it on.
_GROUPS_OF_A100 = ((2, 0.66, 0.83), (4, 0.84, 0.94), (8, 0.925, 0.96))
_GROUPS_OF_H100 = ((2, 0.73, 0.89), (4, 0.89, 0.96), (8, 0.93, 1.0))

# What all GPUs share. GPUs of one type differ by 8% on average in sustained compute (Sinha et al., "Not All GPUs Are
# Created Equal", SC22), a standard deviation of about 2%. That passes of one layer on one GPU differ by 1% is an
# estimate: no run on several GPUs was seen yet. A collective of NCCL runs 16 to 24 thread blocks, each on a
# multiprocessor that GEMMs beside it lose: 0.15 of the GPU.
_SPREAD_OF_GPUS = TimeSpread(ranks=0.02, layers=0.01)
_NCCL_OVERLAP_SLOWDOWN = 0.15

# Host memory: a copy over PCIe x16 reaches 80% of one direction, which carries 31.5 GB/s in generation 4 (A100) and 63
# in generation 5 (H100), while all GPUs of a node copy: an estimate. A DGX A100 and a DGX H100 have 2 TB for 8 GPUs
# (data sheets); half of a rank's share is left to the loader, to checkpoints and to what the allocator rounds up.
_PCIE_4_BYTES_PER_S = 25 * GB
_PCIE_5_BYTES_PER_S = 50 * GB
_HALF_OF_HOST_SHARE = 2000 * GB / 8 / 2

# NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s bf16, 19.5 fp32, 2039 GB/s, NVLink 600 GB/s in both directions together.
# DGX A100 data sheet: 8 GPUs, one 200 Gb/s InfiniBand port each. GEMMs: measured as above, 0.805 and 0.813 in two fits,
# and no slower when they run for long; the best single shape reaches 0.869 (stas00/ml-engineering,
# compute/accelerator, maximum achievable matmul FLOPS). Element-wise kernels: 85% of the memory's rate, as copies do.
# Memory: what CUDA states (openxla/xla, xla/tools/hlo_opt/gpu_specs/a100_sxm_80.txtpb); nvidia-smi says 81,920 MiB.
_A100 = Hardware(
    name="a100-80g",
    fp32_flops=19.5e12,
    bf16_flops=312e12,
    gemm_efficiency=0.81,
    half_efficiency_side=100,
    attention_efficiency=1.0,
    attention_backward_efficiency=1.0,
    attention_backends=FLASH_ATTENTION_2_ON_AMPERE.backends,
    attention_kernels=(FLASH_ATTENTION_2_ON_AMPERE,),
    memory_bytes_per_s=2039 * GB,
    memory_efficiency=0.85,
    memory_bytes=85_100_068_864 - _CUDA_CONTEXT_BYTES,
    kernel_launch_s=5 * US,
    intra_node=Link(240 * GB, 10 * US, 1 * US),
    group_rates=_GROUPS_OF_A100,
    inter_node=Link(24 * GB, 20 * US, 4 * US),
    ranks_per_node=8,
    channel_bytes=_NCCL_CHANNEL_BYTES,
    communicator_bytes=_NCCL_COMMUNICATOR_BYTES,
    collective_start_s=10 * US,
    num_multiprocessors=108,
    time_spread=_SPREAD_OF_GPUS,
    overlap_slowdown=_NCCL_OVERLAP_SLOWDOWN,
    host_bytes_per_s=_PCIE_4_BYTES_PER_S,
    host_memory_bytes=_HALF_OF_HOST_SHARE,
)

# NVIDIA A800 SXM: an A100 whose NVLink has 400 GB/s in both directions together instead of 600 (Reuters, 2022-11-07).
# Of the 200 in one direction, an all-reduce of 1 GiB reaches 152 on eight GPUs and 148 on four (a public report of
# NCCL 2.21.5 on A800-SXM4-80GB, 2026-03-18: 12.37 and 10.85 ms). Efficiencies, memory (nvidia-smi: 81,920 MiB) and
# ports between nodes are the A100's.
_A800 = replace(_A100, name="a800-80g", intra_node=Link(158 * GB, 10 * US, 1 * US))

# Nodes of the papers, with a network of their own. OmniBal (arXiv 2407.20761), table 15: A100 with four or two ports of
# 200 Gb/s for the eight GPUs of a node; its H100, with eight ports of 400, are those below. MMScale (DistTrain, arXiv
# 2408.04275), section 7: A800 with 300 GB/s of NVLink in both directions together, of which 80% is taken to be reached
# as on the A100, four ports of 200 Gb/s a node (RoCE), rail-optimized, and 1 TB of host memory.
_A100_4X200 = replace(_A100, name="a100-80g-4x200", ports_per_rank=4 / 8)
_A100_2X200 = replace(_A100, name="a100-80g-2x200", ports_per_rank=2 / 8)
_A800_4X200 = replace(
    _A800,
    name="a800-80g-4x200",
    intra_node=Link(120 * GB, 10 * US, 1 * US),
    ports_per_rank=4 / 8,
    rail_optimized=True,
    host_memory_bytes=1000 * GB / 8 / 2,
)

# NVIDIA H100 SXM data sheet: 989 TFLOP/s bf16 dense, 67 fp32, 3.35 TB/s, NVLink 900 GB/s in both directions together.
# DGX H100 data sheet: 8 GPUs, one 400 Gb/s InfiniBand port each. GEMMs: measured as above, 0.795 (H200: 0.755 and
# 0.818); the best single shape reaches 0.803 (ml-engineering, "H200 is the same"). GEMMs that run for 10 ms and longer
# are 10% slower: the power limit of 700 W. By `Hardware.clock` they would draw 875 W otherwise. In training they take
# about 0.7 of the time, and what runs between them draws about 500 W (an estimate): 760 W, a clock of 0.96.
# Attention: FlashAttention-4, which comes with `mmtrain[cuda]`. Memory: what CUDA states (openxla/xla,
# xla/tools/hlo_opt/gpu_specs/h100_sxm.txtpb); nvidia-smi says 81,559 MiB, of which the driver keeps 0.5 GiB.
_H100 = Hardware(
    name="h100-80g",
    fp32_flops=67e12,
    bf16_flops=989e12,
    gemm_efficiency=0.795,
    half_efficiency_side=130,
    attention_efficiency=1.0,
    attention_backward_efficiency=1.0,
    attention_backends=FLASH_ATTENTION_3_ON_HOPPER.backends,
    attention_kernels=(FLASH_ATTENTION_3_ON_HOPPER, FLASH_ATTENTION_2_ON_HOPPER, CUDNN_ON_HOPPER),
    power_watts=700,
    training_watts=760,
    memory_bytes_per_s=3350 * GB,
    memory_efficiency=0.85,
    memory_bytes=84_978_434_048 - _CUDA_CONTEXT_BYTES,
    kernel_launch_s=5 * US,
    intra_node=Link(370 * GB, 10 * US, 1 * US),
    group_rates=_GROUPS_OF_H100,
    inter_node=Link(48 * GB, 20 * US, 4 * US),
    ranks_per_node=8,
    channel_bytes=_NCCL_CHANNEL_BYTES,
    communicator_bytes=_NCCL_COMMUNICATOR_BYTES,
    collective_start_s=10 * US,
    num_multiprocessors=132,
    time_spread=_SPREAD_OF_GPUS,
    overlap_slowdown=_NCCL_OVERLAP_SLOWDOWN,
    host_bytes_per_s=_PCIE_5_BYTES_PER_S,
    host_memory_bytes=_HALF_OF_HOST_SHARE,
)

# NVIDIA H200 SXM data sheet: the H100's compute with 141 GB at 4.8 TB/s. DGX H200: links as in DGX H100. Memory: torch
# states 139.8 GiB (messages of allocations that failed); nvidia-smi says 143,771 MiB.
_H200 = replace(_H100, name="h200-141g", memory_bytes_per_s=4800 * GB, memory_bytes=139.8 * GIB - _CUDA_CONTEXT_BYTES)

# An H100 whose power is limited to 500 W, as Meta's are (pytorch/torchtitan,
# benchmarks/llama3_h100_202412_torchtitan.md: "500W power limit"). Its clock follows from the limit. Those have other
# memory, too: "96GB HBM2e with 2.4 TB/sec peak memory bandwidth".
_H100_500W = replace(_H100, name="h100-80g-500w", power_watts=500)

# GPUs that no published run was compared with. Peaks and rates of memory are those of data sheets. GEMMs are measured
# as above where it is said, else estimated; that they slow down by up to 12% when they run for long is not counted
# here. Attention, launches, links between nodes and host memory are estimates, too, unless a source is named.

# NVIDIA B200 (HGX): 2,250 TFLOP/s bf16 and 75 fp32 (data sheet: 36 and 0.6 PFLOP/s for eight, bf16 with sparsity). 180
# GB (DGX B200 user guide: 1,440 for eight), of which CUDA states 191,514,673,152 bytes (openxla/xla,
# xla/tools/hlo_opt/gpu_specs/b200.txtpb), 7.67 TB/s and 148 multiprocessors as its driver says (pytorch/ao#4002).
# GEMMs: measured as above. NVLink 1,800 GB/s in both directions together, 80% of one direction reached as on A100 and
# H100. DGX B200: eight ports of 400 Gb/s and 2 TB of host memory.
_B200 = replace(
    _H100,
    name="b200-180g",
    fp32_flops=75e12,
    bf16_flops=2250e12,
    gemm_efficiency=0.70,
    half_efficiency_side=88,
    attention_backends=FLASH_ATTENTION_4_ON_BLACKWELL.backends,
    attention_kernels=(FLASH_ATTENTION_4_ON_BLACKWELL,),
    power_watts=1000,
    training_watts=0,
    memory_bytes_per_s=7670 * GB,
    memory_bytes=191_514_673_152 - _CUDA_CONTEXT_BYTES,
    intra_node=Link(720 * GB, 10 * US, 1 * US),
    num_multiprocessors=148,
)

# NVIDIA B300 (HGX): the B200's bf16 and fp32 (NVIDIA/cosmos-framework#114; the data sheet's 36 PFLOP/s with sparsity
# for eight), 270 GB at 7.7 TB/s (verda.com, GB300 NVL72 architecture), a ConnectX-8 of 800 Gb/s for each GPU (HGX
# B300). Multiprocessors: taken to be the B200's. GEMMs: measured as above.
_B300 = replace(
    _B200,
    name="b300-270g",
    gemm_efficiency=0.857,
    half_efficiency_side=33,
    memory_bytes_per_s=7700 * GB,
    memory_bytes=270 * GB,
    inter_node=Link(96 * GB, 20 * US, 4 * US),
)

# NVIDIA GB200 NVL72: 72 GPUs in one NVLink domain (DGX GB200 user guide), which is the node here: 18 machines of four
# GPUs. 2,500 TFLOP/s bf16 and 80 fp32 a GPU (data sheet: 360 and 5.76 PFLOP/s a rack, bf16 with sparsity), 186 GB
# (MLPerf Inference 6.1, GB200-186GB; 13.4 TB a rack) at 8 TB/s. NVLink as in B200; one port of 400 Gb/s for each GPU.
# Host memory: 480 GB of each Grace CPU, which two GPUs share, over NVLink-C2C: 900 GB/s in both directions together,
# of which a GPU is taken to reach 80% of half a direction. Multiprocessors: estimated by the ratio of peaks and clocks.
# GEMMs: measured as above.
_GB200 = replace(
    _B200,
    name="gb200-nvl72",
    fp32_flops=80e12,
    bf16_flops=2500e12,
    memory_bytes_per_s=8000 * GB,
    memory_bytes=186 * GB,
    ranks_per_node=72,
    spans_machines=True,
    num_multiprocessors=152,
    host_bytes_per_s=180 * GB,
    host_memory_bytes=480 * GB / 2 / 2,
)

# NVIDIA GB300 NVL72: the GB200's bf16 and fp32, 279 GB at 8 TB/s (verda.com: 20 TB a rack), a ConnectX-8 of 800 Gb/s
# for each GPU (NVIDIA's NVL72 enterprise reference architecture: four a tray of four GPUs). GEMMs: measured as above.
_GB300 = replace(
    _GB200,
    name="gb300-nvl72",
    gemm_efficiency=0.771,
    half_efficiency_side=35,
    memory_bytes=279 * GB,
    inter_node=Link(96 * GB, 20 * US, 4 * US),
)

# GPUs on PCIe. Where one GPU may write into another's memory, a copy reaches 25 GB/s in generation 4 and 53 in
# generation 5 (measured on RTX PRO 6000: voipmonitor/rtx6kpro, hardware/pcie-bandwidth.md), and less from socket to
# socket, which a ring of all GPUs passes; NCCL counts PCIe steps at 1.0 to 1.9 us (src/graph/tuning.cc). GeForce has
# none of it, so all passes through host memory. FlashAttention-2 reaches the shares of the A100 on GPUs of its kind.
_PCIE_4_PEERS = Link(20 * GB, 10 * US, 2 * US)
_PCIE_5_PEERS = Link(40 * GB, 10 * US, 2 * US)
_PCIE_4_THROUGH_HOST = Link(10 * GB, 20 * US, 5 * US)
_PCIE_5_THROUGH_HOST = Link(20 * GB, 20 * US, 5 * US)
_PORT_100_GBIT = Link(12 * GB, 30 * US, 6 * US)
_HOST_SHARE_OF_WORKSTATION = 64 * GB / 2

# NVIDIA L40S data sheet: 362 TFLOP/s bf16, 91.6 fp32, 48 GB at 864 GB/s, PCIe 4, no NVLink; 142 multiprocessors. Its
# 350 W do not sustain the peak; GEMMs: measured as above. A server of eight with four ports of 200 Gb/s.
_L40S = replace(
    _A100,
    name="l40s-48g",
    fp32_flops=91.6e12,
    bf16_flops=362e12,
    gemm_efficiency=0.54,
    half_efficiency_side=69,
    memory_bytes_per_s=864 * GB,
    memory_bytes=48 * GB,
    intra_node=_PCIE_4_PEERS,
    group_rates=(),
    ports_per_rank=4 / 8,
    num_multiprocessors=142,
    host_memory_bytes=_HOST_SHARE_OF_WORKSTATION,
)

# NVIDIA RTX PRO 6000 Blackwell (600 W): 4,000 TOPS of fp4 with sparsity, an eighth of it for bf16; 125 TFLOP/s fp32, 96
# GB at 1,792 GB/s (Server Edition: 1,597), 188 multiprocessors, PCIe 5. GEMMs: measured as above. A server
# of eight with eight ports of 400 Gb/s.
_RTX_PRO_6000 = replace(
    _L40S,
    name="rtx-pro-6000-96g",
    fp32_flops=125e12,
    bf16_flops=500e12,
    gemm_efficiency=0.78,
    half_efficiency_side=92,
    memory_bytes_per_s=1597 * GB,
    memory_bytes=96 * GB,
    intra_node=_PCIE_5_PEERS,
    inter_node=_H100.inter_node,
    ports_per_rank=1.0,
    num_multiprocessors=188,
    host_bytes_per_s=_PCIE_5_BYTES_PER_S,
)

# NVIDIA RTX 4090 (Ada white paper): 165.2 TFLOP/s bf16 with fp32 sums, 82.6 fp32, 24 GB at 1,008 GB/s, 128
# multiprocessors, PCIe 4. GeForce's sums in fp32 run at half rate, which 450 W sustain. Servers of eight, one port of
# 100 Gb/s.
_RTX_4090 = replace(
    _L40S,
    name="rtx-4090-24g",
    fp32_flops=82.6e12,
    bf16_flops=165.2e12,
    gemm_efficiency=0.85,
    memory_bytes_per_s=1008 * GB,
    memory_bytes=24 * GB,
    intra_node=_PCIE_4_THROUGH_HOST,
    inter_node=_PORT_100_GBIT,
    ports_per_rank=1 / 8,
    num_multiprocessors=128,
)

# NVIDIA RTX 5090 (RTX Blackwell white paper): 209.5 TFLOP/s bf16 with fp32 sums (838 with sparsity and fp16 sums),
# 104.8 fp32, 32 GB at 1,792 GB/s, 170 multiprocessors, PCIe 5.
_RTX_5090 = replace(
    _RTX_4090,
    name="rtx-5090-32g",
    fp32_flops=104.8e12,
    bf16_flops=209.5e12,
    memory_bytes_per_s=1792 * GB,
    memory_bytes=32 * GB,
    intra_node=_PCIE_5_THROUGH_HOST,
    num_multiprocessors=170,
    host_bytes_per_s=_PCIE_5_BYTES_PER_S,
)

# NVIDIA RTX A6000 (GA102 white paper; Microway's comparison of Ampere GPUs): 154.8 TFLOP/s bf16, 38.7 fp32, 48 GB at
# 768 GB/s, 84 multiprocessors, PCIe 4. NVLink bridges join pairs (112.5 GB/s), which is not counted. 300 W do not
# sustain the peak. A workstation of four, one port of 100 Gb/s.
_A6000 = replace(
    _L40S,
    name="a6000-48g",
    fp32_flops=38.7e12,
    bf16_flops=154.8e12,
    gemm_efficiency=0.65,
    memory_bytes_per_s=768 * GB,
    ranks_per_node=4,
    inter_node=_PORT_100_GBIT,
    ports_per_rank=1 / 4,
    num_multiprocessors=84,
)

# NVIDIA GB10 (DGX Spark): 1,000 TOPS of fp4 with sparsity, an eighth of it for bf16, of which about 60 TFLOP/s were
# measured (banandre.com, 2025-10-28); 31 fp32 (Hot Chips 2025), 128 GB that CPU and GPU share at 273 GB/s, 6,144 cores
# in 48 multiprocessors. One GPU a machine; a ConnectX-7 of 200 Gb/s. An eighth of the memory is left to the system.
_GB10 = replace(
    _RTX_5090,
    name="gb10-128g",
    fp32_flops=31e12,
    bf16_flops=125e12,
    gemm_efficiency=0.5,
    attention_efficiency=0.35,
    attention_backward_efficiency=0.3,
    attention_kernels=(),
    memory_bytes_per_s=273 * GB,
    memory_bytes=112 * GB,
    ranks_per_node=1,
    inter_node=Link(24 * GB, 20 * US, 4 * US),
    ports_per_rank=1.0,
    num_multiprocessors=48,
    host_bytes_per_s=None,
    host_memory_bytes=0.0,
)

# AMD Instinct MI300X data sheet: 1,307.4 TFLOP/s bf16, 163.4 fp32, 192 GB at 5.3 TB/s, 304 compute units. About 45% of
# the peak is reached (aiweekly.co, "AMD MI300X hits only 45% of peak FLOPs"). Eight GPUs, each with a link of 128 GB/s
# in both directions together to each other one: 448 GB/s in one direction, of which 70% is taken to be reached. Host
# memory: 1.5 TiB (MLPerf Inference 4.1). Ports: taken to be eight of 400 Gb/s. mmtrain has never run on it.
_MI300X = replace(
    _H100,
    name="mi300x-192g",
    fp32_flops=163.4e12,
    bf16_flops=1307.4e12,
    gemm_efficiency=0.45,
    attention_efficiency=0.3,
    attention_backward_efficiency=0.22,
    attention_kernels=(),
    power_watts=0,
    training_watts=0,
    memory_bytes_per_s=5300 * GB,
    memory_bytes=192 * GB,
    intra_node=Link(315 * GB, 10 * US, 1.5 * US),
    group_rates=(),
    num_multiprocessors=304,
    host_memory_bytes=1536 * GIB / 8 / 2,
)

PRESETS: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _CPU_CORE,
        *(_A100, _A100_4X200, _A100_2X200, _A800, _A800_4X200, _H100, _H100_500W, _H200),
        *(_B200, _B300, _GB200, _GB300, _L40S, _RTX_PRO_6000, _RTX_4090, _RTX_5090, _A6000, _GB10, _MI300X),
    )
}

# By the words of CUDA's name of a device that a preset describes, in their order. A name that also has one of
# `OTHER_VARIANT_WORDS` is of another variant: on PCIe instead of SXM, with other memory, less power or a smaller chip.
DEVICE_WORDS: dict[tuple[str, ...], str] = {
    ("A100",): "a100-80g",
    ("A800",): "a800-80g",
    ("H100",): "h100-80g",
    ("H200",): "h200-141g",
    ("B200",): "b200-180g",
    ("B300",): "b300-270g",
    ("GB200",): "gb200-nvl72",
    ("GB300",): "gb300-nvl72",
    ("L40S",): "l40s-48g",
    ("RTX", "PRO", "6000"): "rtx-pro-6000-96g",
    ("RTX", "4090"): "rtx-4090-24g",
    ("RTX", "5090"): "rtx-5090-32g",
    ("RTX", "A6000"): "a6000-48g",
    ("GB10",): "gb10-128g",
    ("MI300X",): "mi300x-192g",
}
OTHER_VARIANT_WORDS = frozenset({"PCIE", "NVL", "40GB", "64GB", "94GB", "96GB", "LAPTOP", "D", "MAX", "WS"})
