"""What one rank can compute, move and hold, and the links between ranks; presets are in `hardware_presets`.

Rates are per rank and per direction. Peaks are dense rates (data sheets print twice that, with sparsity). A GEMM
reaches `gemm_efficiency` of the peak when all its sides are large; see `Hardware.efficiency_at` for smaller ones.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from mmtrain.costs.time_spread import NO_SPREAD, TimeSpread, expected_maximum

Precision = Literal["fp32", "bf16"]
GB = 1e9
GIB = 2**30
MIB = 2**20
US = 1e-6

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
    ranks_per_node: int  # that reach each other by `intra_node`: of a machine, or of an NVLink domain of several
    channel_bytes: float = 0.0  # of a communicator of two ranks, for messages
    communicator_bytes: float = 0.0  # of a communicator for collectives
    collective_start_s: float = 0.0  # what a collective takes before its first step
    ports_per_rank: float = 1.0  # network ports of a node per rank on it; `inter_node` is one of them
    post_s: float = 0.0  # how long each end of a message, however small, keeps its rank from computing
    cut_s: float = 0.0  # what a pass loses each time it stops inside a layer and goes on; 0: not measured
    attention_backward_efficiency: float = 0.0  # the same share in backward; 0: as in forward
    num_multiprocessors: int = 0  # of a GPU, among which the tiles of a GEMM are dealt out
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
