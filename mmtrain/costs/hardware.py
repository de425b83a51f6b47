"""What one rank can compute, move and hold, and the links between ranks; presets are in `hardware_presets`.

Rates are per rank and per direction. Peaks are dense rates (data sheets print twice that, with sparsity). A GEMM
reaches `gemm_efficiency` of the peak when all its sides are large; see `Hardware.efficiency_at` for smaller ones, and
`Hardware.clock` for what a GPU's power limit leaves of it.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from mmtrain.costs.attention_kernels import ANY_KERNEL, AttentionKernel
from mmtrain.costs.time_spread import NO_SPREAD, TimeSpread, expected_maximum

Precision = Literal["fp32", "bf16"]
GB = 1e9
GIB = 2**30
MIB = 2**20
US = 1e-6

# What the last wave of a GEMM leaves idle, as half a tile of so many elements of the product for each multiprocessor.
# cuBLAS has kernels of many tile sizes and divides deep products, so it is less than half of a tile of 128 x 128.
# Fitted to 3,800 to 6,900 GEMMs of one kind of GPU each: 530 to 3,500 (A100), 1,700 to 2,900 (H100, H200), 5,200 to
# 5,800 (B200, B300). 90% of 5,148 GEMMs on the H100 above 20 GFLOP are then within 9%; with whole waves of tiles of the
# best of seven sizes, within 12%.
GEMM_TILE_ELEMENTS = 3000
# Power that does not depend on the clock (memory, leakage, links), and with what power of the clock the rest grows:
# once with the clock, twice with a voltage that falls with the clock down to a floor.
CONSTANT_WATTS, POWER_OF_CLOCK = 120.0, 2.5
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
    attention_efficiency: float  # share that attention's forward reaches of its kernel's rate, or of the peak
    attention_backends: tuple[str, ...]  # values of `train.attention` whose rate a plan assumes
    memory_bytes_per_s: float
    memory_bytes: float
    kernel_launch_s: float  # of the smallest kernel, with the Python around it
    intra_node: Link
    inter_node: Link
    ranks_per_node: int  # that reach each other by `intra_node`: of a machine, or of an NVLink domain of several
    channel_bytes: float = 0.0  # of a communicator of two ranks, for messages
    communicator_bytes: float = 0.0  # of a communicator for collectives
    collective_start_s: float = 0.0  # what a collective takes before its first step
    # By the number of ranks of a collective on a node, the shares of `intra_node`'s rate that it reaches: a gather or a
    # reduce-scatter, an all-reduce. Empty: 1. More ranks than the last have its shares.
    group_rates: tuple[tuple[int, float, float], ...] = ()
    ports_per_rank: float = 1.0  # network ports of a node per rank on it; `inter_node` is one of them
    post_s: float = 0.0  # how long each end of a message, however small, keeps its rank from computing
    cut_s: float = 0.0  # what a pass loses each time it stops inside a layer and goes on; 0: not measured
    attention_backward_efficiency: float = 0.0  # the same share in backward; 0: twice the seconds of forward
    attention_kernels: tuple[AttentionKernel, ...] = ()  # whose rates are known; the first is assumed
    num_multiprocessors: int = 0  # of a GPU, among which the tiles of a GEMM are dealt out
    power_watts: float = 0.0  # limit of a GPU; 0: none that counts
    training_watts: float = 0.0  # that a step of training would draw at the clock for which efficiencies are stated
    memory_efficiency: float = 1.0  # share of `memory_bytes_per_s` that element-wise kernels reach
    time_spread: TimeSpread = NO_SPREAD  # of the compute times of ranks of this kind
    slowest_rank_ratio: float = 1.0  # compute time that costs are stated for, over that of a mean rank
    own_run_ratios: tuple[float, float] | None = None  # of mmtrain's own runs: measured over modelled steps, the range
    overlap_slowdown: float = 1.0  # share of a collective's time that GEMMs beside it lose; 1: nothing is hidden
    host_bytes_per_s: float | None = None  # to or from pinned host memory; None: memory is the host's
    host_memory_bytes: float = 0.0  # that a rank may fill with activations
    rail_optimized: bool = False  # the k-th ranks of all nodes share a switch, and only these do
    spans_machines: bool = False  # a node holds several machines, so a launcher's ranks on one are fewer

    def at_pace_of(self, num_ranks: int) -> "Hardware":
        """Return the hardware as the slowest of so many ranks computes, for which all of them wait."""
        return replace(self, slowest_rank_ratio=1 + self.time_spread.ranks * expected_maximum(num_ranks))

    @cached_property
    def clock(self) -> float:
        """Return the share of its clock that a GPU sustains in training, within its power limit."""
        if self.training_watts <= self.power_watts:
            return 1.0
        share = (self.power_watts - CONSTANT_WATTS) / (self.training_watts - CONSTANT_WATTS)
        return float(share ** (1 / POWER_OF_CLOCK))

    def attention_kernel(self, backend: str) -> AttentionKernel:
        """Return the kernel that a value of `train.attention` runs; of one that is not known, the one assumed here."""
        kernels = self.attention_kernels or (ANY_KERNEL,)
        return next((kernel for kernel in kernels if backend in kernel.backends), kernels[0])

    def with_attention(self, backend: str) -> "Hardware":
        """Return the hardware with the kernel of `backend` as the one assumed, if its rate is known."""
        kernel = self.attention_kernel(backend)
        if backend not in kernel.backends:
            return self
        others = tuple(other for other in self.attention_kernels if other is not kernel)
        return replace(self, attention_kernels=(kernel, *others), attention_backends=kernel.backends)

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

    def collective_bytes_per_s(self, ranks_on_node: int, *, is_all_reduce: bool) -> float:
        """Return the bytes that a rank sends in a second in a collective of so many ranks of a node."""
        share = 1.0
        for ranks, gather_share, all_reduce_share in self.group_rates:
            share = all_reduce_share if is_all_reduce else gather_share
            if ranks_on_node <= ranks:
                break
        return share * self.intra_node.bytes_per_s

    def link(self, same_node: bool) -> Link:
        """Return the connection between two ranks.

        Between nodes it is the sender's share of its node's ports: the other ranks of the node send at the same time,
        as they do in a pipeline. A rank with several ports uses them together.
        """
        return self.intra_node if same_node else self._share_of_ports

    @cached_property
    def _share_of_ports(self) -> Link:
        return replace(self.inter_node, bytes_per_s=self.ports_per_rank * self.inter_node.bytes_per_s)

    @property
    def rail_hop_s(self) -> float:
        """Return the seconds that a message takes longer whose ends are the k-th and the j-th rank of two nodes.

        Where the network is rail-optimized, NCCL first passes the message on to the rank of its own node that shares a
        switch with the receiver (PXN, since NCCL 2.12): one more step inside the node, while the bytes flow on.
        """
        return self.intra_node.step_s if self.rail_optimized else 0.0

    def efficiency_at(self, m: int, n: int, k: int) -> float:
        """Return the share of the peak that an (m, k) x (k, n) GEMM reaches: it saturates in each side.

        A GPU computes the product tile by tile, all its multiprocessors at once. The last wave of tiles fills them in
        part; exactly how much depends on sizes that vary from microbatch to microbatch. Each tile starts and ends with
        memory traffic that only a deep product hides.
        """
        half = self.half_efficiency_side
        depth = k / (k + half)
        if self.num_multiprocessors:
            half_wave = self.num_multiprocessors * GEMM_TILE_ELEMENTS / 2
            return self.clock * self.gemm_efficiency * depth * m * n / (m * n + half_wave)
        return self.gemm_efficiency * depth * (m / (m + half)) * (n / (n + half))
