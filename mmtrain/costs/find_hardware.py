"""Find the hardware that a name stands for: a preset, or a GPU without one whose rates its name holds.

A GPU that no preset describes is measured (`runtime.device_rates`), and the figures become part of its name. So a plan,
a cost table and every rank know the hardware without a file or a registry beside it.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from mmtrain.costs.hardware import GB, GIB, Hardware
from mmtrain.costs.hardware_presets import DEVICE_WORDS, OTHER_VARIANT_WORDS, PRESETS
from mmtrain.errors import PlanError

CORE_PREFIX = "one core of "  # of what `mmtrain profile` names a processor
MEASURED_PREFIX = "measured/"
MEASURED_GEMM_SIDE = 8192  # of the square GEMM in bf16 whose rate a measured name holds
# Ranks of a plan have equal shares, so the fast ones wait. Twice as fast ones wait half of the time, and a cluster of
# them alone would be as fast with half as many GPUs.
MAX_RATIO_OF_DEVICES = 2.0
# Taken of a measured GPU, whose links are not known: PCIe 4 inside a machine where copies between GPUs were not
# measured, and one port of 100 Gb/s for all GPUs of a machine.
_UNKNOWN_PEER_BYTES_PER_S = 20 * GB
_UNKNOWN_PORT_BYTES_PER_S = 12 * GB


@dataclass(frozen=True)
class MeasuredDevice:
    """What was measured of a GPU that no preset describes, and what its driver says, in the units of its name."""

    device: str  # CUDA's name
    bf16: float  # TFLOP/s of a square GEMM with sides of `MEASURED_GEMM_SIDE`
    fp32: float
    memory: float  # GB/s that a copy reads and writes
    gib: float  # of memory
    processors: int
    ranks: int  # GPUs of the machine
    peer: float = 0.0  # GB/s of a copy to another GPU of the machine; 0: there is none

    def __str__(self) -> str:
        values = ",".join(f"{f.name}={getattr(self, f.name):.4g}" for f in fields(self) if f.name != "device")
        return f"{MEASURED_PREFIX}{self.device.replace('/', ' ')}/{values}"

    @classmethod
    def parse(cls, name: str) -> "MeasuredDevice":
        """Parse what `str` makes. Raises PlanError for any other text."""
        try:
            device, values = name.removeprefix(MEASURED_PREFIX).split("/")
            known = {field.name: field.type for field in fields(cls)}
            pairs = dict(pair.split("=") for pair in values.split(","))
            parsed = {key: int(value) if known[key] is int else float(value) for key, value in pairs.items()}
            measured = cls(device, **parsed)  # type: ignore[arg-type]
        except (ValueError, TypeError, KeyError):
            example = MeasuredDevice("NVIDIA GH200 480GB", 612, 51, 3120, 94.5, 132, 1)
            raise PlanError(
                f"cluster.hardware: `{name}` does not describe a measured GPU; allowed: a text like `{example}` "
                f"(TFLOP/s, GB/s, GiB), as `auto` makes it, or one of {', '.join(PRESETS)}"
            ) from None
        if min(measured.bf16, measured.fp32, measured.memory, measured.gib, measured.processors, measured.ranks) <= 0:
            raise PlanError(f"cluster.hardware: `{name}` holds a number that is not above 0; measure again with `auto`")
        return measured

    def hardware(self) -> Hardware:
        """Return the hardware: as measured, else as the H100 or an estimate.

        The rate of the GEMM stands for the peak, so MFU is a share of what GEMMs reach. Attention reaches half of it,
        as FlashAttention-2 does on the H100. Host memory is not known, so nothing can be offloaded unless the recipe
        states it.
        """
        like, peer_bytes_per_s = PRESETS["h100-80g"], self.peer * GB or _UNKNOWN_PEER_BYTES_PER_S
        curve = replace(
            like,
            gemm_efficiency=1.0,
            half_efficiency_side=128,
            num_multiprocessors=self.processors,
            attention_kernels=(),
            training_watts=0.0,
        )
        share = curve.efficiency_at(MEASURED_GEMM_SIDE, MEASURED_GEMM_SIDE, MEASURED_GEMM_SIDE)
        return replace(
            curve,
            name=str(self),
            bf16_flops=self.bf16 * 1e12 / share,
            fp32_flops=self.fp32 * 1e12 / share,
            attention_efficiency=0.5,
            attention_backward_efficiency=0.45,
            memory_bytes_per_s=self.memory * GB,
            memory_efficiency=1.0,
            memory_bytes=self.gib * GIB,
            intra_node=replace(like.intra_node, bytes_per_s=peer_bytes_per_s),
            inter_node=replace(like.inter_node, bytes_per_s=_UNKNOWN_PORT_BYTES_PER_S),
            ranks_per_node=self.ranks,
            ports_per_rank=1 / self.ranks,
            host_memory_bytes=0.0,
        )


def preset(name: str) -> Hardware:
    """Return the preset called `name`, or one whose name starts so: the only one, or the one that others vary (`a100`).

    A name that `MeasuredDevice` makes stands for what it holds.

    Raises:
        PlanError: there is none; the message suggests the nearest name.
    """
    if name.startswith(MEASURED_PREFIX):
        return MeasuredDevice.parse(name).hardware()
    matches = [name] if name in PRESETS else [known for known in PRESETS if known.startswith(name)]
    base = min(matches, key=len, default="")
    if matches and all(match.startswith(base) for match in matches):
        return PRESETS[base]
    nearest = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.3)
    hint = f"; did you mean `{nearest[0]}`?" if nearest else "."
    if matches:
        hint = f"; it may be {' or '.join(f'`{match}`' for match in matches)}."
    raise PlanError(
        f"cluster.hardware: `{name}` is not a known preset{hint} Known: {', '.join(PRESETS)}; "
        "`auto` takes the one of this machine."
    )


def preset_for_device(device_name: str | None) -> str | None:
    """Return the name of the preset that describes a device, by CUDA's name of it: `cpu-core` without a GPU.

    None: no preset describes the GPU, so it must be measured.
    """
    return "cpu-core" if device_name is None else _preset_of_gpu(device_name)


def is_other_hardware(preset_name: str, device_name: str) -> bool:
    """Return whether a device is certainly not what a preset describes: a core for a GPU, or a GPU of another preset.

    device_name: as `mmtrain profile` writes it. A GPU without a preset may be measured under the closest one. Presets
    that differ in their network alone describe the same GPU.
    """
    if device_name.startswith(CORE_PREFIX):
        return preset_name != "cpu-core"
    known = _preset_of_gpu(device_name)
    return known is not None and not preset_name.startswith(known)


def is_same_hardware(one: str, other: str) -> bool:
    """Return whether two names stand for the same hardware; a GPU that was measured twice has two."""
    both_measured = one.startswith(MEASURED_PREFIX) and other.startswith(MEASURED_PREFIX)
    return one == other or (both_measured and one.rpartition("/")[0] == other.rpartition("/")[0])


def slowest_hardware(names: Sequence[str]) -> str:
    """Return the kind of device that computes slowest among those of all ranks, for which the others wait.

    names: of each rank's hardware.

    Raises:
        PlanError: the fastest computes over `MAX_RATIO_OF_DEVICES` times as fast.
    """
    distinct = list(dict.fromkeys(names))
    rates = {name: _rates(preset(name)) for name in distinct}
    slowest, fastest = min(distinct, key=lambda name: rates[name]), max(distinct, key=lambda name: rates[name])
    ratio = rates[fastest][0] / rates[slowest][0]
    if ratio > MAX_RATIO_OF_DEVICES:
        ranks = {name: [rank for rank, of_rank in enumerate(names) if of_rank == name] for name in (slowest, fastest)}
        raise PlanError(
            f"cluster.hardware: `auto` found ranks whose GPUs differ too much: {fastest} (rank {ranks[fastest][0]}) "
            f"computes {ratio:.1f} times as fast as {slowest} (rank {ranks[slowest][0]}), and ranks have equal shares "
            f"of the work. Allowed: up to {MAX_RATIO_OF_DEVICES:g} times. Start on nodes of one kind, or set "
            f"cluster.hardware to {slowest} if the fast ones shall wait"
        )
    return slowest


def _rates(hardware: Hardware) -> tuple[float, float]:
    """Return the FLOP/s in bf16 that large GEMMs sustain, and the bytes that element-wise kernels move in a second."""
    return hardware.bf16_flops * hardware.gemm_efficiency, hardware.moved_bytes_per_s


def _preset_of_gpu(device_name: str) -> str | None:
    words = re.split(r"[^A-Z0-9]+", device_name.upper())  # as words: a GH200 is no H200
    if OTHER_VARIANT_WORDS.intersection(words):
        return None
    for marks, name in DEVICE_WORDS.items():
        if any(tuple(words[start : start + len(marks)]) == marks for start in range(len(words))):
            return name
    return None
