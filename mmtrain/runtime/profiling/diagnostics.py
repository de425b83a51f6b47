"""Find what slows training down on this machine, for `mmtrain doctor`."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from mmtrain.costs.hardware import GIB, Hardware, Precision
from mmtrain.models.attention import FUSED_KERNELS
from mmtrain.runtime.profiling.host_diagnostics import Diagnostic

MAX_FOREIGN_GPU_MEMORY_SHARE = 0.1  # of a GPU's memory, held by other processes; more is reported
MIN_GEMM_RATE_SHARE = 0.5  # of the rate that the preset assumes; less is reported
MIN_MESSAGE_RATE_SHARE = 0.2  # of the rate that the preset assumes; less is reported


def accelerator_diagnostics(
    cuda: bool, nccl: bool, attention: Mapping[str, str | None], gpu_file: Path = Path("/dev/nvidia0")
) -> Iterator[Diagnostic]:
    """Yield GPUs that torch cannot use, or not at full speed; `attention` maps a backend to why it cannot be used."""
    if not cuda and gpu_file.exists():
        build = "is a CPU build" if torch.version.cuda is None else f"is built for CUDA {torch.version.cuda}"
        what = f"this machine has a GPU, but torch {torch.__version__} cannot use it: it {build}"
        yield Diagnostic(
            "missing", what, "install a CUDA build of torch that the driver supports", ("train", "profile")
        )
        return
    if not cuda:
        what = "this machine has no GPU: models beyond some million parameters train slowly"
        yield Diagnostic(
            "slow", what, "train on a machine with GPUs; `plan` needs none", ("train", "evaluate", "profile")
        )
        return
    if not nccl:
        yield Diagnostic("missing", "NCCL, for more than one GPU", "install a CUDA build of torch", ("train",))
    yield from _attention_kernel_diagnostics(attention)
    yield from _gpu_diagnostics()


def _attention_kernel_diagnostics(attention: Mapping[str, str | None]) -> Iterator[Diagnostic]:
    """Yield a GPU without a fused kernel for attention, or without the one that is made for it."""
    problems = {name: attention[name] for name in FUSED_KERNELS if name in attention}
    if all(problems.values()):
        reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        what = f"attention has no fused kernel for packed sequences ({reasons})"
        yield Diagnostic("slow", what, "see `attention` above", ("train", "evaluate"))
        return
    major, _ = torch.cuda.get_device_capability(0)
    selected = next(name for name, problem in problems.items() if problem is None)
    fits_newer = FUSED_KERNELS["flash_attn_4"].widest_head(major) > 0
    if fits_newer and selected in ("flash_attn", "varlen"):
        # FlashAttention-3 (arXiv 2407.08608): 75% of the peak of an H100, against 35% of FlashAttention-2.
        what = (
            f"attention runs on FlashAttention-2's kernels ({selected}), which are about half as fast as those for "
            "Hopper and newer"
        )
        yield Diagnostic("slow", what, FUSED_KERNELS["flash_attn_4"].install, ("train", "evaluate"))


def _gpu_diagnostics() -> Iterator[Diagnostic]:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if len(set(names)) > 1:
        what = f"GPUs differ ({', '.join(dict.fromkeys(names))}): every step waits for the slowest"
        yield Diagnostic("slow", what, "choose GPUs of one kind with CUDA_VISIBLE_DEVICES", ("train",))
    for index, name in enumerate(names):
        if not torch.cuda.get_device_capability(index) >= (8, 0):
            what = f"GPU {index}, {name}, has no bf16 units"
            yield Diagnostic("slow", what, "train.precision: fp32, or an Ampere GPU or newer", ("train",))
        free, total = torch.cuda.mem_get_info(index)
        if free < (1 - MAX_FOREIGN_GPU_MEMORY_SHARE) * total:
            what = f"{(total - free) / GIB:.0f} of {total / GIB:.0f} GiB of GPU {index} are used by other processes"
            yield Diagnostic("slow", what, "end those (see nvidia-smi), or set cluster.memory_gib", ("train",))
        if index and not torch.cuda.can_device_access_peer(index, 0):
            what = f"GPU {index} cannot reach the memory of GPU 0: messages between them go through the host"
            yield Diagnostic("slow", what, "see `nvidia-smi topo -m`", ("train",))


def throughput_diagnostics(
    machine: Hardware, precision: Precision, flops: float, messages: Mapping[str, list[float]]
) -> Iterator[Diagnostic]:
    """Yield GEMMs and messages that are much slower than the preset assumes, which plans without a cost table rely on.

    flops: rate of large GEMMs, in FLOP/s; messages: seconds of a small and of a 4 MiB message, by kind.
    """
    assumed = machine.peak_flops(precision) * machine.gemm_efficiency
    remedy = "run `mmtrain profile RECIPE`, and name its table in cluster.costs"
    if flops < MIN_GEMM_RATE_SHARE * assumed:
        what = (
            f"large GEMMs reach {flops / 1e12:.3g} TFLOP/s, {flops / assumed:.0%} of what the preset "
            f"{machine.name} assumes: predicted step times without a table are too short"
        )
        yield Diagnostic("slow", what, remedy, ("plan", "simulate"))
    if "p2p" in messages:
        rate, link = 2**22 / messages["p2p"][-1], machine.intra_node.bytes_per_s
        if rate < MIN_MESSAGE_RATE_SHARE * link:
            what = (
                f"messages between two processes reach {rate / 1e9:.3g} GB/s, {rate / link:.0%} of what the preset "
                f"{machine.name} assumes"
            )
            yield Diagnostic("slow", what, remedy, ("train", "plan"))


def attention_diagnostics(machine: Hardware, backend: str) -> Iterator[Diagnostic]:
    """Yield a backend of attention other than those whose rate the preset holds, which plans without a table use."""
    if backend not in machine.attention_backends:
        what = (
            f"the preset {machine.name} assumes attention by {' or '.join(machine.attention_backends)}, and `auto` "
            f"selects {backend} here: plans without a table predict attention at another rate"
        )
        yield Diagnostic("slow", what, "run `mmtrain profile RECIPE`, and name its table in cluster.costs", ("plan",))
