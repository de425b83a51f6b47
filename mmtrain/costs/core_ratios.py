"""How fast the cores of a CPU are, relative to those of the hardware preset."""

from dataclasses import dataclass, replace

from mmtrain.costs.analytic_costs import gemm_seconds
from mmtrain.costs.cost_table import CoreSpeed
from mmtrain.costs.hardware import Hardware, Precision
from mmtrain.costs.part_records import Gemm

GEMM_SIDE = 512  # of the GEMM that `CoreSpeed` times
COPIED_BYTES = 2**26  # of its copy: larger than caches


@dataclass(frozen=True)
class CoreRatios:
    """Seconds of a GEMM and of a copy over those of the preset."""

    gemm: float = 1.0
    copy: float = 1.0

    def applied(self, machine: Hardware) -> Hardware:
        """Return the preset with cores of this speed; kernels start in Python, which depends on a core as GEMMs do."""
        return replace(
            machine,
            fp32_flops=machine.fp32_flops / self.gemm,
            bf16_flops=machine.bf16_flops / self.gemm,
            kernel_launch_s=machine.kernel_launch_s * self.gemm,
            memory_bytes_per_s=machine.memory_bytes_per_s / self.copy,
        )


def core_ratios(speed: CoreSpeed, machine: Hardware, precision: Precision) -> CoreRatios:
    """Return how cores of this speed compare with those of the preset."""
    of_preset = modelled_core_speed(machine, precision)
    return CoreRatios(speed.gemm_s / of_preset.gemm_s, speed.copy_s / of_preset.copy_s)


def modelled_core_speed(machine: Hardware, precision: Precision) -> CoreSpeed:
    """Return what a core of `machine` takes for the GEMM and the copy, as modelled."""
    return CoreSpeed(
        gemm_s=gemm_seconds(machine, precision, Gemm(GEMM_SIDE, GEMM_SIDE, GEMM_SIDE)),
        copy_s=2 * COPIED_BYTES / machine.moved_bytes_per_s,
    )
